"""Child processes for a stage whose work holds the GIL: one private pipe each, results by value."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from intune_callbacks.errors import WorkerDied
from intune_callbacks.pipelines.wire import Reducer, Wire

__all__ = ["Child", "ProcessPool", "Startup", "WorkerMemory"]

QUIT_S = 2.0
# The kernel walks all pages of a process to tell its private memory, 20 ms for a GB: at most so often, and at most so
# small a share of the time.
MEMORY_EVERY_S, MEMORY_SHARE = 5.0, 0.002

# One child is started at a time: a child forked in between would inherit the other's pipe end.
_starting = threading.Lock()


def _child_main(
    connection: Connection,
    fn: Callable[[Any], Any],
    start: Callable[[int], None] | None,
    worker_id: int,
    reducer: Reducer | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What came with the fork is the parent's to finalise.
    gc.freeze()
    parent, wire = os.getppid(), Wire(connection, reducer)
    broken: BaseException | None = None
    try:
        if start is not None:
            start(worker_id)
    except Exception as error:
        broken = error
    try:
        while True:
            task = wire.receive(lambda: os.getppid() == parent)
            if task is None:
                return
            begin_cpu_s = time.process_time()
            try:
                if broken is not None:
                    raise broken
                value = fn(task[0])
                wire.send((True, value, time.process_time() - begin_cpu_s))
            except (BrokenPipeError, ConnectionError):
                return
            except Exception as error:
                wire.send((False, *_portable(error)))
            task = value = None
    except (EOFError, OSError):
        return


def _portable(error: Exception) -> tuple[Exception, str]:
    """Return the error in a form that survives the pipe, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None), text


class RemoteTraceback(Exception):
    """The traceback a worker process printed, as the cause of the error it raised."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f'\n"""\n{text}"""')


class Startup:
    """What starting workers has cost the thread that starts them.

    Attributes:
        count: workers started.
        total_s: seconds it took.
    """

    def __init__(self) -> None:
        self.count, self.total_s = 0, 0.0

    def add(self, count: int, spent_s: float) -> None:
        """Count `count` workers that took `spent_s` seconds together."""
        self.count += count
        self.total_s += spent_s


class WorkerMemory:
    """What one worker costs in private memory, looked up now and then."""

    def __init__(self) -> None:
        self._due_s, self._bytes = float("-inf"), 0.0

    def read(self, pids: Sequence[int]) -> float:
        """Return the bytes of the largest of the first two of these processes, perhaps as they were seconds ago."""
        begin_s = time.monotonic()
        if pids and begin_s >= self._due_s:
            self._bytes = max(_private_bytes(pid) for pid in pids[:2])
            end_s = time.monotonic()
            self._due_s = end_s + max(MEMORY_EVERY_S, (end_s - begin_s) / MEMORY_SHARE)
        return self._bytes


class Child:
    """One started child process and this side's end of its pipe."""

    def __init__(self, process: Any, wire: Wire) -> None:
        self.process, self.wire, self.usable = process, wire, True


class ProcessPool:
    """Child processes that all hold the same function; idle ones are parked and reused.

    Args:
        fn: what a child does to one item; pickled unless the context forks.
        context: a multiprocessing context.
        start: called once in each child with its worker number.
        reducer: pickling of special types, as `pickle.Pickler.reducer_override`.
        startup: where the seconds spent starting children are added up.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        context: BaseContext,
        start: Callable[[int], None] | None = None,
        reducer: Reducer | None = None,
        startup: Startup | None = None,
    ) -> None:
        self.startup = startup or Startup()
        self._fn, self._context, self._start, self._reducer = fn, context, start, reducer
        self._idle: list[Child] = []
        self._all: dict[int, Child] = {}
        self._count = 0
        self._closed = False
        self._lock = threading.RLock()
        self._memory = WorkerMemory()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children alive."""
        return tuple(pid for pid, child in list(self._all.items()) if child.process.is_alive())

    @property
    def idle(self) -> int:
        """Parked children."""
        return len(self._idle)

    def get(self) -> Child:
        """Return an idle child, or start one.

        Raises:
            OSError: no process could be started.
        """
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.process.is_alive():
                    return child
                self._forget(child)
            worker_id, self._count = self._count, self._count + 1
        begin_s = time.perf_counter()
        with _starting:
            ours, theirs = self._context.Pipe(duplex=True)
            try:
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=_child_main, args=(theirs, self._fn, self._start, worker_id, self._reducer), daemon=True
                )
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        self.startup.add(1, time.perf_counter() - begin_s)
        child = Child(process, Wire(ours, self._reducer))
        with self._lock:
            self._all[process.pid] = child
        return child

    def call(self, child: Child, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float]:
        """Run the function on `item` in `child`.

        Returns:
            The result and the CPU seconds it took.

        Raises:
            WorkerDied: the child ended first.
            Exception: what the function raised, with the child's traceback as its cause.
        """
        try:
            child.wire.send((item,))
            ok, value, rest = child.wire.receive(lambda: child.process.is_alive() and not cancelled())
        except (EOFError, ConnectionError) as error:
            child.usable = False
            if cancelled():
                raise WorkerDied("stopped while the stage was closed") from error
            child.process.join(QUIT_S)
            raise WorkerDied(
                f"worker process {child.process.pid} died while computing an item (exit code "
                f"{child.process.exitcode}; -9 is SIGKILL, often the kernel's out-of-memory killer)"
            ) from error
        if ok:
            return value, rest
        value.__cause__ = RemoteTraceback(rest)
        raise value

    def put(self, child: Child) -> None:
        """Park a child for later use; one that is not usable any more is ended."""
        with self._lock:
            keep = child.usable and not self._closed
            if keep:
                self._idle.append(child)
        if not keep:
            self._end([child])

    def worker_bytes(self) -> float:
        """Return what one child costs in private memory, in bytes; looked up at most every five seconds."""
        return self._memory.read(self.pids)

    def close(self) -> None:
        """End the idle children now and every other one when it is put back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._end(idle)

    def _end(self, children: list[Child]) -> None:
        for child in children:
            try:
                if child.usable:
                    child.wire.send(None)
                else:
                    child.process.terminate()
            except OSError:
                pass
        deadline_s = time.monotonic() + QUIT_S
        for child in children:
            child.process.join(max(0.0, deadline_s - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join(QUIT_S)
            with self._lock:
                self._forget(child)

    def _forget(self, child: Child) -> None:
        self._all.pop(child.process.pid, None)
        child.wire.close()


def _private_bytes(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return 1024.0 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0.0
