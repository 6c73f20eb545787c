"""What a worker process does: take an item from its pipe, compute, send the result back, until nobody needs it."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from intune_callbacks.pipelines.workers.payload import inherited
from intune_callbacks.pipelines.workers.surroundings import Surroundings
from intune_callbacks.pipelines.workers.wire import Reducer, Wire
from intune_callbacks.pipelines.workers.worker import put_aside

__all__ = ["Given", "Starts", "child_main", "portable"]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Starts(Protocol):
    """What begins a child."""

    told: Any

    def __call__(self, number: int) -> Any: ...


# What to do to one item, and what is called once before the first one.
Given = tuple[Callable[[Any], Any], Starts | None]


def child_main(
    connection: Connection,
    given: Given | None,
    parts: Sequence[Any],
    worker_id: int,
    reducer: Reducer | None,
    starter: int | None,
    surroundings: Surroundings,
) -> None:
    """Be a worker process; called in one.

    It says when it can be given something: first what it lacks of `given`, then, once it has begun, items. That second
    message is what `given` returned at its begin.

    Args:
        connection: the child's end of its pipe.
        given: what to do; None where it comes through the pipe.
        parts: of what comes through the pipe.
        worker_id: workers started before.
        starter: the process to end with, None where the starting thread may end before it.
    """
    for number, handler in put_aside.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # blocked by `interrupts_wait`
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What came with the fork is the parent's to finalise.
    gc.freeze()
    parent, wire = os.getppid(), Wire(connection, reducer)
    if starter is not None:
        _end_with_parent()
        if parent != starter:  # it ended before the kernel was told
            return

    def is_needed() -> bool:
        return os.getppid() == parent

    surroundings.run(lambda: _work(wire, given, parts, worker_id, is_needed))


def _work(wire: Wire, given: Given | None, parts: Sequence[Any], worker_id: int, is_needed: Callable[[], bool]) -> None:
    fn: Callable[[Any], Any] | None = None
    start: Starts | None = None
    broken: tuple[Any, ...] = ()
    told: Any = None
    try:
        try:
            fn, start = _received(wire, parts, is_needed) if given is None else given
            if start is not None:
                told = start(worker_id)
        except Exception as error:
            broken = portable(error)
        wire.send(told)
        while True:
            task = wire.receive(is_needed)
            if task is None:
                return
            if start is not None:
                start.told = task[1]
            begin_cpu_s = time.process_time()
            try:
                if broken or fn is None:
                    answer = wire.pack((False, *broken))
                else:
                    answer = wire.pack((True, fn(task[0]), time.process_time() - begin_cpu_s))
            except Exception as error:
                answer = wire.pack((False, *portable(error)))
            # Apart from the work: what fails from here on leaves half a message, after which nothing can be told.
            wire.write(answer)
            task = answer = None  # type: ignore[assignment]
    except (EOFError, OSError):
        return


def _received(wire: Wire, parts: Sequence[Any], is_needed: Callable[[], bool]) -> Given:
    wire.send(None)
    with inherited(parts):
        return wire.receive(is_needed)  # type: ignore[no-any-return]


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that forked it, even if it hangs in somebody's code then."""
    with suppress(Exception):  # Linux only; elsewhere a child looks for its parent between two items
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _Told:
    """An error as torch tells it: its kind, made anew with its words.

    Args:
        error: as it was caught; what it holds stays here.
    """

    def __init__(self, error: Exception) -> None:
        self._kind, self._words = type(error), str(error)

    def __reduce__(self) -> Any:
        return self._kind, (self._words,)


def portable(error: Exception) -> tuple[Any, tuple[str, type[Exception]]]:
    """Return the error in a form that survives the pipe, its traceback as text, and its kind if that survives it."""
    text, kind = "".join(traceback.format_exception(error)), RuntimeError
    with suppress(Exception):
        kind = pickle.loads(pickle.dumps(type(error)))
    error.__cause__ = error.__context__ = None
    for form in (lambda: error.with_traceback(None), lambda: _Told(error)):
        with suppress(Exception):
            made: Any = form()
            if isinstance(pickle.loads(pickle.dumps(made)), Exception):
                return made, (text, kind)
    return RuntimeError(f"{type(error).__name__}: {error}"), (text, kind)
