"""The machines of a cluster, and the workers on them, as far as this process knows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass

from intune_callbacks.pipelines.base import busy_limit, cpus_allowed
from intune_callbacks.pipelines.workers.wire import Wire

__all__ = ["Line", "Machine", "Members", "Slot"]

SEEN_S = 1.0  # so long after its start an actor's CPU is missing in what the cluster says is free
START_S = 30.0  # a worker that is not there after this is not counted on. A choice: on a busy machine one takes 20 s.
SOME_ITEMS, KEPT = 20, 0.98  # a share is that of so many items, and is forgotten by so much each time
LEAST_SHARE = 0.2  # of a CPU that a worker here is taken to keep busy


@dataclass
class Machine:
    """One node of the cluster.

    Args:
        name: its address.
        cpus: it has, and how many nobody had taken.
        is_good: a result of it was the same as here.
        is_tried: its first result is on its way, or being compared.
        why_not: why it is left out, empty where it is not.
        most: workers it had at once.
        losses: workers that ended, one after the other and without an item between them; and when the last one did.
        silences: how often it did not answer in time; it gets twice as long each time.
    """

    name: str
    cpus: float = 0.0
    free: float = 0.0
    is_good: bool = False
    is_tried: bool = False
    why_not: str = ""
    most: int = 0
    losses: int = 0
    lost_at_s: float = 0.0
    silences: int = 0


@dataclass(eq=False)
class Line:
    """One worker on another machine, and this side's end of the way to it."""

    key: int
    machine: Machine
    wire: Wire
    begun_s: float = 0.0
    is_taken: bool = False
    version: int = -1  # of what it has taken to do

    def end(self) -> None:
        """Let the way go; while somebody reads it, that is for them to do."""
        self.wire.shut()
        if not self.is_taken:
            self.wire.close()


class Slot:
    """The right of one thread to one worker at a time.

    Attributes:
        usable: False once a worker process here has ended.
    """

    def __init__(self) -> None:
        self.usable, self.ready = True, threading.Event()
        self.ready.set()


class Members:
    """What there is.

    Args:
        ranks: that share it.

    Attributes:
        turn: held by who looks at lines, and notified when one is there.
        gone: why there is no cluster any more, empty while there may be one.
        local_cpus: of this machine, for the workers here.
        longest_s: that any item has taken.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.turn = threading.Condition(threading.RLock())
        self.gone, self.local_cpus, self.longest_s = "", float(cpus_allowed()), 0.0
        self._share = 0.0  # of a CPU that a worker here keeps busy, 0.0 while nobody knows
        self._items, self._cpu_s, self._wall_s = 0, 0.0, 0.0
        self._ranks = ranks
        self._machines: dict[str, Machine] = {}
        self._starting: dict[int, float] = {}
        self._lines: dict[int, Line] = {}
        self._free: list[Line] = []
        self._wanted = 0
        self._seen_at_s = self._raised_s = 0.0

    @property
    def cpus(self) -> float:
        """CPUs of other machines that this rank can have."""
        if self.gone:
            return 0.0
        with self.turn:
            used = [machine for machine in self._machines.values() if machine.cpus >= 1.0 and not machine.why_not]
            shares = {id(machine): float(max(1, machine.cpus // self._ranks)) for machine in used}
            ours = Counter(id(line.machine) for line in self._lines.values())
            # Those that are being started have their CPUs already, nobody knows on which machine.
            free = float(sum(begun_s < self._seen_at_s - SEEN_S for begun_s in self._starting.values()))
            free += sum(min(shares[id(machine)], machine.free + ours[id(machine)]) for machine in used)
            return min(free, sum(shares.values()))

    @property
    def ready(self) -> int:
        """Workers there that can compute: they have taken what is to be done, or did so for an earlier iterator."""
        with self.turn:
            return sum(line.version >= 0 for line in self._lines.values())

    @property
    def is_growing(self) -> bool:
        """True while workers that were asked for may still come."""
        with self.turn:
            is_late = time.monotonic() - self._raised_s > START_S
            return not is_late and self.ready < min(self._wanted, int(self.cpus))

    def most_here(self, own: int) -> int:
        """Return how many workers there are on this machine before there are any elsewhere: they keep its CPUs busy.

        Args:
            own: the user's number.
        """
        share = max(LEAST_SHARE, self._share) if self._share else 1.0
        return max(1, own, int(busy_limit(self.local_cpus, 1) / share))

    def worked(self, wall_s: float, cpu_s: float | None = None) -> None:
        """Note what an item has taken.

        Args:
            cpu_s: of a worker here.
        """
        with self.turn:
            self.longest_s = max(self.longest_s, wall_s)
            if cpu_s is None:
                return
            self._items, self._cpu_s, self._wall_s = self._items + 1, self._cpu_s + cpu_s, self._wall_s + wall_s
            if self._items >= SOME_ITEMS:
                # The largest of late: on a crowded machine the present share is too low.
                now = min(1.0, self._cpu_s / self._wall_s) if self._wall_s > 0.0 else 1.0
                self._share = max(now, KEPT * self._share)
                self._items, self._cpu_s, self._wall_s = 0, 0.0, 0.0

    @property
    def machines(self) -> list[tuple[str, int]]:
        """The machines at work, by name, and the workers on each."""
        with self.turn:
            ours = Counter(id(line.machine) for line in self._lines.values())
            return [(one.name, ours[id(one)]) for one in self._machines.values() if ours[id(one)]]

    @property
    def machines_seen(self) -> int:
        """How many machines there are beside this one."""
        return len(self._machines)

    @property
    def sentences(self) -> list[str]:
        """What the card says of them: where workers were, what is left out, and why there are none any more."""
        with self.turn:
            known = list(self._machines.values())
        worked = [f"{one.most} on {one.name}" for one in known if one.most]
        said = [f"workers on other machines, at most: {', '.join(worked)}"] if worked else []
        return said + [f"{one.name} of the Ray cluster is left out: {one.why_not}" for one in known if one.why_not]

    @property
    def left_out(self) -> list[Machine]:
        """The machines that are not used."""
        with self.turn:
            return [machine for machine in self._machines.values() if machine.why_not]

    def take(self, version: int) -> Line | None:
        """Return a worker for one item (turn held), None where none is free; of a new machine only one at a time.

        Args:
            version: of what is to be done; who has not taken that yet would have the item wait.
        """
        for place in range(len(self._free) - 1, -1, -1):
            machine = self._free[place].machine
            if self._free[place].version != version:
                continue
            if machine.is_good or not (machine.is_tried or machine.why_not):
                machine.is_tried = True
                line = self._free.pop(place)
                line.is_taken = True
                return line
        return None

    def _look_at(self, machines: dict[str, tuple[str, float, float]]) -> None:
        self._seen_at_s = time.monotonic()
        for key, (name, cpus, free) in machines.items():
            machine = self._machines.setdefault(key, Machine(name))
            machine.name, machine.cpus, machine.free = name, cpus, free
        for key, machine in self._machines.items():
            if key not in machines:
                machine.cpus = machine.free = 0.0
