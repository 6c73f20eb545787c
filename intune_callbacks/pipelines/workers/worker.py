"""One worker process as the training process sees it: its pipe, and how long it takes until it can compute."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from intune_callbacks.pipelines.base import begin, in_main_thread, join
from intune_callbacks.pipelines.workers.payload import Payload
from intune_callbacks.pipelines.workers.wire import Wire

__all__ = [
    "READY_S",
    "Child",
    "RemoteTraceback",
    "Told",
    "interrupts_wait",
    "is_of_worker",
    "put_aside",
    "start_process",
]

# How often whoever waits for a process to begin looks whether it is still wanted: a choice. A look costs microseconds,
# and nobody notices a worker that leaves so much later.
READY_S = 0.05
# A process that has ended shows at its pipe within half a second (`wire.POLL_MS`).
GREETED_S = 2.0
# What torch gives its workers (`MP_STATUS_CHECK_INTERVAL`): one that is ended at once leaves half a file behind it, or
# holds a lock for ever.
GRACE_S = 5.0


class RemoteTraceback(Exception):
    """The traceback a worker process printed, as the cause of the error it raised.

    Args:
        kind: of the error as it was raised there; RuntimeError where that cannot be sent.
    """

    def __init__(self, text: str, kind: type[Exception] = RuntimeError) -> None:
        self.text, self.kind = text, kind
        super().__init__(f'\n"""\n{text}"""')


def is_of_worker(error: Exception) -> bool:
    """Return whether the user's code raised it in a worker process; a StopIteration there is an end and no error."""
    return isinstance(error.__cause__, RemoteTraceback) and not isinstance(error, StopIteration)


# The handlers that `interrupts_wait` has put aside; a process that is forked meanwhile has them, too.
put_aside: dict[int, Any] = {}


@contextmanager
def interrupts_wait(method: str) -> Iterator[None]:
    """Have Ctrl+C, and what else Python handles, wait while a process is started; `child_main` lets it come again.

    A terminal sends it to all processes, also to one that does not ignore it yet. And what a handler raises here inside
    a fork is lost: Python runs functions around that, and prints what comes out of them.

    Args:
        method: the start method; a fork server starts its children apart from this, and would keep the signal blocked.
    """
    if method == "forkserver":
        yield
        return
    with ExitStack() as told, ExitStack() as back:
        if in_main_thread():
            back.callback(put_aside.clear)
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)):
                    put_aside[number] = handler
                    back.callback(signal.signal, number, handler)
                    # Other threads of this process are told all the same, and then the main one's handler is called.
                    signal.signal(number, lambda *given, handler=handler: told.callback(handler, *given))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        back.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield


class Told:
    """What the first process returned at its begin; all of them are told before they compute."""

    def __init__(self) -> None:
        self.value: Any = None
        self.is_known = threading.Event()


class Child:
    """One started process and this side's end of its pipe.

    Args:
        payload: what it waits for; None where it has inherited all it needs.
        told: shared by all children of a pool.
        is_first: what it returns is what the others are told.
        begun: called with its id once it can compute.

    Attributes:
        usable: False once the pipe is not to be read any more.
        ready: set when the process can be given its first item, or never will be.
        failed: why it never will be.
    """

    def __init__(
        self,
        process: Any,
        wire: Wire,
        payload: Payload | None,
        told: Told,
        is_first: bool,
        begun: Callable[[int], None] | None = None,
    ) -> None:
        self.process, self.wire, self.usable = process, wire, True
        self.ready = threading.Event()
        self.failed: BaseException | None = None
        self.lacks_payload = payload is not None
        self._payload, self._told, self._is_first, self._begun = payload, told, is_first, begun
        # In a thread of its own: what is sent may be large, and it is read only when the process has imported enough.
        self._greeter = threading.Thread(target=self._greet, daemon=True, name="intune-start")
        begin(self._greeter)

    def _greet(self) -> None:
        """Send what the process lacks and wait until it has begun."""
        told = self._told
        try:
            if self._payload is not None:
                self.wire.receive(self.process.is_alive)
                self.wire.write(self._payload.message())
                self._payload, self.lacks_payload = None, False
            value = self.wire.receive(self.process.is_alive)
            if self._begun is not None:
                self._begun(self.process.pid)
            if self._is_first:
                told.value = value
        except BaseException as error:
            self.failed, self.usable = error, False
        finally:
            if self._is_first:
                told.is_known.set()
            while not told.is_known.wait(READY_S) and self.usable and self.process.is_alive():
                pass
            self.ready.set()

    def awaited(self, cancelled: Callable[[], bool]) -> Callable[[], bool]:
        """Return what says whether its answer may still come, also, for a while, when nobody wants it any more."""
        until_s: float | None = None

        def may_come() -> bool:
            nonlocal until_s
            if until_s is None and cancelled():
                until_s = time.monotonic() + GRACE_S
            return self.process.is_alive() and (until_s is None or time.monotonic() < until_s)

        return may_come

    def has_let_go(self) -> bool:
        """Wait, at most two seconds, until no thread reads the pipe of this ended process any more."""
        join(self._greeter, GREETED_S)
        return not self._greeter.is_alive()


def start_process(process: Any, method: str) -> None:
    """Start a process, Ctrl+C waiting; where none is to be had, leave no pipe of multiprocessing's open.

    Raises:
        OSError: no process could be started.
    """
    try:
        with interrupts_wait(method):
            process.start()
    except OSError as error:
        # To fork, it opens two pipes first, and closes none where the second one or the fork fails. The training goes
        # on without the process, so each try would take descriptors from it.
        step = error.__traceback__ if method == "fork" else None
        while step is not None:
            if step.tb_frame.f_code.co_name == "_launch":
                held = step.tb_frame.f_locals
                for end in {"parent_r", "child_w", "child_r", "parent_w"}.intersection(held):
                    os.close(held[end])
            step = step.tb_next
        raise
