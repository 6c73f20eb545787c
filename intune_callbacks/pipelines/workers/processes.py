"""Child processes for a stage whose work holds the GIL: one private pipe each, results by value."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from intune_callbacks.errors import WorkerDied, exit_words
from intune_callbacks.pipelines.base import begin, in_main_thread
from intune_callbacks.pipelines.worker_cost import Startup, WorkerMemory
from intune_callbacks.pipelines.workers.child import Given, Starts, child_main
from intune_callbacks.pipelines.workers.payload import Payload
from intune_callbacks.pipelines.workers.surroundings import Surroundings
from intune_callbacks.pipelines.workers.wire import Reducer, Wire
from intune_callbacks.pipelines.workers.worker import READY_S, Child, RemoteTraceback, Told, start_process

__all__ = ["ProcessPool"]

# A child that has not ended after this is killed. A choice: it ends between two items, and the training waits.
QUIT_S = 2.0
# A child nobody needs any more may be needed again by the next decisions; after that it only holds memory.
PARKED_S = 3.0
# The start methods of multiprocessing that send a new process what it needs.
SENDING = ("forkserver", "spawn")

# One child is started at a time: a child forked in between would inherit the other's pipe end.
_starting = threading.Lock()


class ProcessPool:
    """Child processes that all hold the same function; idle ones are parked and reused.

    Args:
        fn: what a child does to one item; pickled, once for all children, unless the context forks.
        start: called once in each child with the number of children started before; what the first one returned is
            in its `told` in all of them before they compute.
        reducer: pickling of special types.
        startup: where the seconds spent starting children are added up.
        surroundings: of all children; by default those of now.
        name: what the error of one that dies calls it.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        context: BaseContext,
        start: Starts | None = None,
        reducer: Reducer | None = None,
        startup: Startup | None = None,
        surroundings: Surroundings | None = None,
        name: str = "DataLoader worker",
    ) -> None:
        self.startup, self._name = startup or Startup(), name
        self._given: Given = (fn, start)
        self._context, self._reducer = context, reducer
        self._payload: Payload | None = None
        self._method = str(context.get_start_method())
        self._is_sent = self._method in SENDING
        self._surroundings = (surroundings or Surroundings.now()).inherited_by(self._method)
        self._idle: list[tuple[Child, float]] = []
        self._reaper: threading.Timer | None = None
        self._all: dict[int, Child] = {}
        self._count, self._closed = 0, False
        self._process = os.getpid()
        self.is_short = False  # set from outside: no more can be had, and one that is not needed ends at once
        self.told = Told()
        self._lock = threading.RLock()
        self._memory = WorkerMemory()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children alive."""
        return tuple(pid for pid, child in list(self._all.items()) if child.process.is_alive())

    @property
    def processes(self) -> list[Any]:
        """The children, of multiprocessing."""
        return [child.process for child in list(self._all.values())]

    @property
    def idle(self) -> int:
        """Parked children."""
        return len(self._idle)

    @property
    def starting(self) -> int:
        """Children that cannot compute yet."""
        return sum(not child.ready.is_set() for child in list(self._all.values()))

    def prepare(self, count: int) -> bool:
        """Have so many idle children, without waiting for them; return whether all of them can compute.

        Raises:
            OSError: no process could be started.
            WorkerDied: one has ended already.
        """
        with self._lock:
            idle = [child for child, _ in self._idle]
        for child in idle:
            if child.failed is not None or not child.process.is_alive():
                raise WorkerDied(f"worker process {child.process.pid} died before it could compute")
        for _ in range(count - len(idle)):
            self.put(self._begin())
        return count <= len(idle) and all(child.ready.is_set() for child in idle)

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
                self._end([child])
        return self._begin()

    def _begin(self) -> Child:
        begin_s = time.perf_counter()
        with _starting:
            worker_id, payload = self._count, self._sent()
            given, parts = (self._given, []) if payload is None else (None, payload.parts)
            surroundings = self._surroundings.at_start()
            ours, theirs = self._context.Pipe(duplex=True)
            wire = Wire(ours, self._reducer)
            try:
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=child_main,
                    args=(theirs, given, parts, worker_id, self._reducer, self._starter(), surroundings),
                    daemon=True,
                )
                start_process(process, self._method)
                try:
                    begun = None if self._method == "fork" else self._imported
                    child = Child(process, wire, payload, self.told, worker_id == 0, begun)
                except BaseException:  # no thread is to be had
                    process.kill()
                    process.join(QUIT_S)
                    raise
            except BaseException:
                wire.close()
                raise
            finally:
                theirs.close()
            self._count += 1
        self.startup.add(1, time.perf_counter() - begin_s)
        self._all[process.pid] = child
        return child

    def _imported(self, pid: int) -> None:
        self.startup.imported(pid, self._count)

    def _sent(self) -> Payload | None:
        """Return what new children are sent through their pipes, None where multiprocessing gives it to them."""
        if self._payload is None and self._is_sent:
            try:
                self._payload = Payload(self._given)
            except Exception:  # it is pickled for each child, or what prevents that is raised there
                self._is_sent = False
        return self._payload

    def _starter(self) -> int | None:
        """Return our process id, if children may end with the thread that starts them: the main one lives as long."""
        forks = self._method != "forkserver"  # there the server is the parent
        return os.getpid() if forks and in_main_thread() else None

    def call(self, child: Child, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float, int]:
        """Run the function on `item` in `child`.

        Returns:
            The result, the CPU seconds it took and the bytes that crossed the pipe.

        Raises:
            WorkerDied: the child ended first.
            Exception: what the function raised, with the child's traceback as its cause.
        """
        while not child.ready.wait(READY_S):
            if cancelled():
                raise WorkerDied("stopped while the stage was closed")
        task = child.wire.pack((item, self.told.value))
        try:
            if child.failed is not None:
                raise child.failed
            child.wire.write(task)
            ok, value, rest = child.wire.receive(child.awaited(cancelled))
        except (EOFError, ConnectionError) as error:
            child.usable = False
            if cancelled():
                raise WorkerDied("stopped while the stage was closed") from error
            child.process.join(QUIT_S)
            raise WorkerDied(exit_words(self._name, child.process.pid, child.process.exitcode)) from error
        except BaseException:
            # The answer, or the rest of it, is still in the pipe: the next one would get it.
            child.usable = False
            raise
        if ok:
            return value, rest, child.wire.received_bytes
        value.__cause__ = RemoteTraceback(*rest)
        try:
            raise value
        finally:
            del value  # its traceback has this frame, and whoever asked: they would stay till the collector comes

    def put(self, child: Child, surplus: bool = False) -> None:
        """Park a child for later use; one that is not usable any more is ended.

        Args:
            surplus: fewer are wanted than before: it ends if it is not used again soon, and gives its memory back.
        """
        with self._lock:
            if child.usable:
                self._idle.append((child, time.monotonic() + PARKED_S if surplus else float("inf")))
            # Asked only now: the garbage collector may have run `close` in this very thread, which found no child here.
            keep = child.usable and not (self._closed or (surplus and self.is_short))
            if not keep:
                self._idle = [one for one in self._idle if one[0] is not child]
            elif surplus and self._reaper is None:
                self._watch_idle()
        if not keep:
            self._end([child])

    def trim(self) -> None:
        """End the idle children, without waiting for it; those that start are ended once they could compute."""
        with self._lock:
            self._payload = None
            self._idle = [(child, 0.0) for child, _ in self._idle]
            self._stop_reaper()
            self._watch_idle(0.0)

    def _watch_idle(self, after_s: float = PARKED_S) -> None:
        self._reaper = threading.Timer(after_s, self._reap)
        self._reaper.daemon, self._reaper.name = True, "intune-reaper"
        try:
            begin(self._reaper)
        except RuntimeError:  # no thread is to be had: they stay parked
            self._reaper = None

    def _reap(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            ended = [child for child, until_s in self._idle if until_s <= now_s and child.ready.is_set()]
            self._idle = [
                (child, until_s if until_s > now_s else now_s + PARKED_S)
                for child, until_s in self._idle
                if child not in ended
            ]
            due_s = min((until_s for _, until_s in self._idle), default=float("inf"))
            self._reaper = None
            if due_s < float("inf") and not self._closed:
                self._watch_idle(due_s - now_s + 0.01)
        self._end(ended)

    def _stop_reaper(self) -> None:
        reaper, self._reaper = self._reaper, None
        # The garbage collector may run `close` in the reaper, inside the lock that `cancel` would wait for.
        if reaper is not None and reaper.ident != threading.get_ident():
            reaper.cancel()

    def worker_bytes(self) -> float:
        """Return what one child costs in private memory, in bytes; looked up at most every five seconds."""
        return self._memory.read(self.pids)

    def close(self) -> None:
        """End the idle children now and every other one when it is put back."""
        with self._lock:
            self._closed = True
            self._payload = None
            self._stop_reaper()
            idle, self._idle = self._idle, []
        self._end([child for child, _ in idle])

    def _end(self, children: list[Child]) -> None:
        if os.getpid() != self._process:
            return  # a process that the user has forked ends, and the workers are not its own
        for child in children:
            try:
                if child.lacks_payload:  # it runs nobody's code yet
                    child.process.kill()
                elif child.usable:
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
                self._all.pop(child.process.pid, None)
            if child.has_let_go():  # else its descriptor would be another one's while it is read from
                child.wire.close()
