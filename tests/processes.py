"""The processes that a test has started."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess

_left: set[BaseProcess] = set()


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
