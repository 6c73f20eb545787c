"""Child processes for a stage whose work holds the GIL: one private pipe each, results by value."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from intune_callbacks.errors import WorkerDied
from intune_callbacks.pipelines.wire import Reducer, Wire

__all__ = ["Child", "ProcessPool", "Startup", "WorkerMemory"]

QUIT_S = 2.0
# A child nobody needs any more may be needed again by the next decisions; after that it only holds memory.
PARKED_S = 3.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The kernel walks all pages of a process to tell its private memory, 20 ms for a GB: at most so often, and at most so
# small a share of the time.
MEMORY_EVERY_S, MEMORY_SHARE = 5.0, 0.002

# One child is started at a time: a child forked in between would inherit the other's pipe end.
_starting = threading.Lock()


def _child_main(
    connection: Connection,
    fn: Callable[[Any], Any],
    start: Starts | None,
    worker_id: int,
    reducer: Reducer | None,
    starter: int | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What came with the fork is the parent's to finalise.
    gc.freeze()
    parent, wire = os.getppid(), Wire(connection, reducer)
    if starter is not None:
        _end_with_parent()
        if parent != starter:  # it ended before the kernel was told
            return
    broken: BaseException | None = None
    told: Any = None
    try:
        if start is not None:
            told = start(worker_id)
    except Exception as error:
        broken = error
    try:
        if start is not None and worker_id == 0:
            wire.send(told)
        while True:
            task = wire.receive(lambda: os.getppid() == parent)
            if task is None:
                return
            if start is not None:
                start.told = task[1]
            begin_cpu_s = time.process_time()
            try:
                if broken is not None:
                    raise broken
                answer = wire.pack((True, fn(task[0]), time.process_time() - begin_cpu_s))
            except Exception as error:
                answer = wire.pack((False, *_portable(error)))
            # Apart from the work: what fails from here on leaves half a message, after which nothing can be told.
            wire.write(answer)
            task = answer = None  # type: ignore[assignment]
    except (EOFError, OSError):
        return


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that forked it, even if it hangs in somebody's code then."""
    with suppress(Exception):  # Linux only; elsewhere a child looks for its parent between two items
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


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
    """What one worker costs in private memory, looked up now and then in a thread of its own."""

    def __init__(self) -> None:
        self._due_s, self._bytes = float("-inf"), 0.0

    def read(self, pids: Sequence[int]) -> float:
        """Return the bytes of the largest of the first two of these processes, as they were at an earlier call."""
        if pids and time.monotonic() >= self._due_s:
            self._due_s = float("inf")  # until this look is over
            try:
                threading.Thread(target=self._look, args=(pids[:2],), daemon=True, name="intune-memory").start()
            except RuntimeError:  # no thread is to be had: it is not known
                self._due_s = time.monotonic() + MEMORY_EVERY_S
        return self._bytes

    def _look(self, pids: Sequence[int]) -> None:
        begin_s = time.monotonic()
        self._bytes = max(_private_bytes(pid) for pid in pids)
        end_s = time.monotonic()
        self._due_s = end_s + max(MEMORY_EVERY_S, (end_s - begin_s) / MEMORY_SHARE)


class Starts(Protocol):
    """What begins a child."""

    told: Any

    def __call__(self, number: int) -> Any: ...


class Child:
    """One started child process and this side's end of its pipe."""

    def __init__(self, process: Any, wire: Wire) -> None:
        self.process, self.wire, self.usable = process, wire, True


class ProcessPool:
    """Child processes that all hold the same function; idle ones are parked and reused.

    Args:
        fn: what a child does to one item; pickled unless the context forks.
        context: a multiprocessing context.
        start: called once in each child with the number of children started before; what the first one returned is
            in its `told` in all of them before they compute.
        reducer: pickling of special types, as `pickle.Pickler.reducer_override`.
        startup: where the seconds spent starting children are added up.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        context: BaseContext,
        start: Starts | None = None,
        reducer: Reducer | None = None,
        startup: Startup | None = None,
    ) -> None:
        self.startup = startup or Startup()
        self._fn, self._context, self._start, self._reducer = fn, context, start, reducer
        self._idle: list[tuple[Child, float]] = []
        self._reaper: threading.Timer | None = None
        self._all: dict[int, Child] = {}
        self._count = 0
        self._closed = False
        self._told: Any = None
        self._is_told = start is None
        self._first: Child | None = None
        self._telling = threading.Lock()
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
                child, _ = self._idle.pop()
                if child.process.is_alive():
                    return child
                self._forget(child)
        begin_s = time.perf_counter()
        with _starting:
            worker_id = self._count
            ours, theirs = self._context.Pipe(duplex=True)
            try:
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=_child_main,
                    args=(theirs, self._fn, self._start, worker_id, self._reducer, self._starter()),
                    daemon=True,
                )
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._count += 1
        self.startup.add(1, time.perf_counter() - begin_s)
        child = Child(process, Wire(ours, self._reducer))
        with self._lock:
            self._all[process.pid] = child
            if worker_id == 0:
                self._first = child
        return child

    def _starter(self) -> int | None:
        """Return our process id, if children may end with the thread that starts them: the main one lives as long."""
        forks = self._context.get_start_method() != "forkserver"  # there the server is the parent
        return os.getpid() if forks and threading.current_thread() is threading.main_thread() else None

    def call(self, child: Child, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float, int]:
        """Run the function on `item` in `child`.

        Returns:
            The result, the CPU seconds it took and the bytes that crossed the pipe.

        Raises:
            WorkerDied: the child ended first.
            Exception: what the function raised, with the child's traceback as its cause.
        """
        task = child.wire.pack((item, self._told_by_first(cancelled)))
        try:
            child.wire.write(task)
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
        except BaseException:
            # The answer, or the rest of it, is still in the pipe: the next one would get it.
            child.usable = False
            raise
        if ok:
            return value, rest, child.wire.received_bytes
        value.__cause__ = RemoteTraceback(rest)
        raise value

    def _told_by_first(self, cancelled: Callable[[], bool]) -> Any:
        """Return what the first child's `start` returned, once it is known; None if it never will be."""
        if not self._is_told:
            with self._telling:
                first = self._first
                if not self._is_told and first is not None:
                    try:
                        self._told = first.wire.receive(lambda: first.process.is_alive() and not cancelled())
                    except (EOFError, OSError) as error:
                        if cancelled():
                            raise WorkerDied("stopped while the stage was closed") from error
                    except BaseException:
                        first.usable = False
                        raise
                    self._is_told, self._first = True, None
        return self._told

    def put(self, child: Child, surplus: bool = False) -> None:
        """Park a child for later use; one that is not usable any more is ended.

        Args:
            child: from `get`.
            surplus: fewer are wanted than before: it ends if it is not used again soon, and gives its memory back.
        """
        with self._lock:
            keep = child.usable and not self._closed
            if keep:
                self._idle.append((child, time.monotonic() + PARKED_S if surplus else float("inf")))
                if surplus and self._reaper is None:
                    self._watch_idle()
        if not keep:
            self._end([child])

    def trim(self) -> None:
        """End the idle children, without waiting for it."""
        with self._lock:
            self._idle = [(child, 0.0) for child, _ in self._idle]
            self._stop_reaper()
            self._watch_idle(0.0)

    def _watch_idle(self, after_s: float = PARKED_S) -> None:
        self._reaper = threading.Timer(after_s, self._reap)
        self._reaper.daemon, self._reaper.name = True, "intune-reaper"
        try:
            self._reaper.start()
        except RuntimeError:  # no thread is to be had: they stay parked
            self._reaper = None

    def _reap(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            ended = [child for child, until_s in self._idle if until_s <= now_s]
            self._idle = [(child, until_s) for child, until_s in self._idle if until_s > now_s]
            due_s = min((until_s for _, until_s in self._idle), default=float("inf"))
            self._reaper = None
            if due_s < float("inf") and not self._closed:
                self._watch_idle(due_s - now_s + 0.01)
        self._end(ended)

    def _stop_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    def worker_bytes(self) -> float:
        """Return what one child costs in private memory, in bytes; looked up at most every five seconds."""
        return self._memory.read(self.pids)

    def close(self) -> None:
        """End the idle children now and every other one when it is put back."""
        with self._lock:
            self._closed = True
            self._stop_reaper()
            idle, self._idle = self._idle, []
        self._end([child for child, _ in idle])

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
        if child is self._first:
            self._first = None
        child.wire.close()


def _private_bytes(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return 1024.0 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0.0
