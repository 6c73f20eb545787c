"""The processes that a test has started."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess
from typing import Any

_left: set[BaseProcess] = set()


def _end_as_others() -> None:
    main: Any = threading.main_thread()
    if isinstance(main, threading._DummyThread) and getattr(main, "_tstate_lock", main) is None:
        main._set_tstate_lock()


# Python 3.11 ends each process with an error that was forked in a thread which C started, as Keras has a loader of
# torch's do in TensorFlow's, and then torch raises in the training: without us, too, in 3 of 60 fits on a busy machine.
os.register_at_fork(after_in_child=_end_as_others)


def begin() -> None:
    """Leave out of account from now on what earlier tests have left.

    An error that a test keeps, keeps the frames it came through: their workers end when the collector finds them.
    """
    _left.clear()
    _left.update(multiprocessing.active_children())


def started() -> set[BaseProcess]:
    """Return the processes that this test has started and that are there."""
    return {*multiprocessing.active_children()} - _left


def children() -> int:
    """Return how many those are."""
    return len(started())
