"""Workers here first, and beside them those on other machines: what a `ProcessPool` is to an engine, over both.

A slot, which is what a thread of the engine holds, is tied to no worker: for each item it takes a free one, here if
there is one. So an item that was lost with its machine is done again by another one, and when there is no cluster any
more all slots go on with the workers here.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from intune_callbacks.errors import WorkerDied, first_line, warn
from intune_callbacks.pipelines.ray.cluster import Cluster
from intune_callbacks.pipelines.ray.given import Package, image
from intune_callbacks.pipelines.ray.members import Line, Machine, Slot
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.pipelines.workers.wire import Reducer
from intune_callbacks.pipelines.workers.worker import READY_S, Child

__all__ = ["DIFFERS", "RANDOM", "MixedPool"]

LOOK_S = 0.5  # every wait is bounded: so often a thread looks whether its item is still wanted
MOST_LOST = 2
"""Workers elsewhere that an item may be lost with; then it is done here. A choice: what kills its worker should not
kill many."""
GRACE_S = 5.0  # as for a worker process: who is not wanted any more may still end its item
LEAST_PATIENCE_S, PATIENCE = 8.0, 4.0
"""A worker elsewhere that takes longer, and so many times longer than any item has, is not waited for. A choice."""
DIFFERS = "an item made there is not what it is when it is made here"
RANDOM = (
    "InTune: an item made twice on this machine is another one each time, so whether other machines make the same ones "
    "cannot be told; draw random numbers from random, numpy.random or torch, which are seeded for each batch"
)
STOPPED = "stopped while the stage was closed"
LOST = object()


class MixedPool:
    """What a `ProcessPool` offers, over its children and the workers of a cluster.

    Args:
        local: the pool of this machine.
        cluster: of other machines.
        given: function, start of a worker and reducer, as the children have them.
        again: what `start.again` is called with in a worker that goes on with this iterator.
        own: the user's number of workers, who are here in any case.
    """

    def __init__(
        self, local: ProcessPool, cluster: Cluster, given: tuple[Any, Any, Reducer], again: Sequence[int], own: int
    ) -> None:
        self.local, self._cluster, self._given, self._epoch, self._own = local, cluster, given, again, own
        self._turn = cluster.turn
        self._free: list[Child] = []
        self._queue: list[tuple[object, bool]] = []
        self._slots, self._here, self._version = 0, 0, -1
        self.startup = local.startup

    # -- what an engine asks of a pool ---------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children alive."""
        return self.local.pids

    @property
    def processes(self) -> list[Any]:
        """The children, of multiprocessing."""
        return self.local.processes

    @property
    def idle(self) -> int:
        """Workers that can be had without starting a process, or sending the dataset."""
        return self.local.idle if self._slots < self.most_here else int(self._version >= 0)

    @property
    def starting(self) -> int:
        """Children that cannot compute yet."""
        return self.local.starting

    @property
    def is_short(self) -> bool:
        """Whether no more children can be had."""
        return self.local.is_short

    @is_short.setter
    def is_short(self, value: bool) -> None:
        self.local.is_short = value

    @property
    def most_here(self) -> int:
        """Workers here before there are any elsewhere."""
        return self._cluster.most_here(self._own)

    def prepare(self, count: int) -> bool:
        """Have idle children, as `ProcessPool.prepare`."""
        return self.local.prepare(min(count, self.most_here))

    def get(self) -> Slot:
        """Return a slot; where it is for a worker here that is missing, that is started.

        Raises:
            OSError: no process could be started.
        """
        with self._turn:
            self._slots += 1
            missing = min(self._slots, self.most_here) - self._here
        try:
            for _ in range(missing):
                child = self.local.get()
                with self._turn:
                    self._here += 1
                    self._free.append(child)
        except BaseException:
            with self._turn:
                self._slots -= 1
            raise
        self._ask()
        return Slot()

    def _ask(self) -> None:
        """Ask the cluster for what is wanted beyond the workers here, and give it the dataset first."""
        beyond = self._slots - self.most_here
        if beyond > 0 and self._version < 0 and not self._cluster.gone:
            try:
                self._version = self._cluster.give(Package(self._given, self._given[2]), pickle.dumps(self._epoch))
            except Exception as error:
                self._cluster.lose(f"the dataset cannot be sent there: {first_line(error)}")
        self._cluster.want(max(0, beyond))

    def put(self, slot: Slot, surplus: bool = False) -> None:
        """Take a slot back, as `ProcessPool.put` does a child; what is elsewhere is kept for the next iterator."""
        with self._turn:
            self._slots -= 1
        self._rest(surplus)
        if surplus:
            self._ask()

    def _rest(self, surplus: bool = False) -> None:
        """Park the children that no slot needs."""
        with self._turn:
            many = min(len(self._free), max(0, self._here - min(self._slots, self.most_here)))
            rest, self._free = self._free[:many], self._free[many:]
            self._here -= many
        for child in rest:
            self.local.put(child, surplus)

    def worker_bytes(self) -> float:
        """Return what one more worker costs in private memory here, in bytes."""
        return self.local.worker_bytes() if self._slots < self.most_here else 0.0

    def trim(self) -> None:
        """End the idle children."""
        self.local.trim()

    def close(self) -> None:
        """End the children; the workers elsewhere are the cluster's to end."""
        self.local.close()
        self._rest()

    # -- one item ------------------------------------------------------------------------------------------------

    def call(self, slot: Slot, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float, int]:
        """Do an item, as `ProcessPool.call`; where what other machines make of it fails, here."""
        for lost in range(MOST_LOST + 1):
            worker: Any = self._lease(cancelled, lost == MOST_LOST)
            if not isinstance(worker, Line):
                break
            answer = self._done_there(worker, item, cancelled)
            if answer is LOST:
                continue
            ok, value, cpu_s, size = answer
            if ok and worker.machine.is_good:
                return value, cpu_s, size
            return self._compared(slot, worker.machine, value if ok else None, ok or value, item, cancelled)
        return self._done_here(slot, worker, item, cancelled)

    def _lease(self, cancelled: Callable[[], bool], only_here: bool) -> Child | Line:
        """Return a free worker when there is one: who has waited longest is first, and workers here are."""
        me = (object(), only_here)
        with self._turn:
            self._queue.append(me)
            try:
                while not cancelled():
                    before = self._queue[: self._queue.index(me)]
                    child = next((one for one in self._free if one.ready.is_set()), None)
                    if child is not None and not before:
                        self._free.remove(child)
                        return child
                    if not only_here and all(needs_child for _, needs_child in before):
                        known = self._version >= 0 and self.local.told.is_known.is_set()
                        line = self._cluster.take(self._version) if known else None
                        if line is not None:
                            return line
                    self._turn.wait(LOOK_S if child is not None or not self._free else READY_S)
            finally:
                self._queue.remove(me)
                self._turn.notify_all()
        raise WorkerDied(STOPPED)

    def _done_here(self, slot: Slot, child: Child, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float, int]:
        begin_s = time.monotonic()
        try:
            value, cpu_s, size = self.local.call(child, item, cancelled)
            self._cluster.worked(time.monotonic() - begin_s, cpu_s)
            return value, cpu_s, size
        finally:
            with self._turn:
                if child.usable:
                    self._free.append(child)
                else:
                    self._here -= 1
                    slot.usable = False  # its thread ends, and the training starts another child with the next
                self._turn.notify_all()
            if not child.usable:
                self.local.put(child)
            else:
                self._rest()

    def _done_there(self, line: Line, item: Any, cancelled: Callable[[], bool]) -> Any:
        """Return the answer of a worker elsewhere and its size, `LOST` where none comes."""
        cluster, begin_s = self._cluster, time.monotonic()
        until_s = begin_s + max(LEAST_PATIENCE_S, PATIENCE * cluster.longest_s) * 2.0**line.machine.silences
        is_left = False

        def may_come() -> bool:
            nonlocal until_s, is_left
            if not is_left and cancelled():
                is_left, until_s = True, min(until_s, time.monotonic() + GRACE_S)
            return not cluster.gone and time.monotonic() < until_s

        try:
            line.wire.send((self._version, pickle.dumps((item, self.local.told.value))))
            answer = line.wire.receive(may_come)
            if not isinstance(answer[0], bool):
                raise EOFError
        except (EOFError, OSError):
            if time.monotonic() >= until_s and not is_left:
                cluster.is_silent(line.machine)
            elif not is_left:
                cluster.lost(line)
            cluster.drop(line)
            cluster.put(line)
            if is_left:
                raise WorkerDied(STOPPED) from None
            return LOST
        except Exception as error:  # one side's message means nothing to the other
            cluster.put(line)
            return False, error, 0.0, 0
        size = line.wire.received_bytes
        cluster.worked(time.monotonic() - begin_s)
        cluster.put(line)
        return *answer, size

    def _compared(
        self, slot: Slot, machine: Machine, theirs: Any, failed: Any, item: Any, cancelled: Callable[[], bool]
    ) -> tuple[Any, float, int]:
        """Return an item as it is made here, and judge the machine that has made it, or could not.

        Args:
            failed: what was raised there, True where nothing was.
        """
        try:
            made = self._again(slot, item, cancelled)
        except BaseException:  # of the user's code, which raises here, too
            with self._turn:
                machine.is_tried = machine.is_good
            raise
        if failed is not True:
            self._cluster.leave_out(machine, first_line(failed))
        elif self._are_same(theirs, made[0]) or self._is_random(slot, made[0], item, cancelled):
            with self._turn:
                machine.is_good = True
                self._turn.notify_all()
        else:
            self._cluster.leave_out(machine, DIFFERS)
        return made

    def _again(self, slot: Slot, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float, int]:
        worker: Any = self._lease(cancelled, only_here=True)
        return self._done_here(slot, worker, item, cancelled)

    def _is_random(self, slot: Slot, made: Any, item: Any, cancelled: Callable[[], bool]) -> bool:
        if self._are_same(self._again(slot, item, cancelled)[0], made):
            return False
        warn(RANDOM)
        return True

    def _are_same(self, one: Any, other: Any) -> bool:
        return image(one, self._given[2]) == image(other, self._given[2])
