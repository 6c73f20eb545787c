"""A Ray cluster as the training process sees it: its machines, and the workers there that were asked for.

Ray itself runs in a process of its own (`bridge`). What is decided is decided here; when that process ends, whatever
the reason, there is no cluster any more, and nobody waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from intune_callbacks.errors import first_line, warn
from intune_callbacks.pipelines.base import begin, busy_limit, cpus_allowed
from intune_callbacks.pipelines.ray.driver import Driver
from intune_callbacks.pipelines.ray.given import Package
from intune_callbacks.pipelines.workers.wire import Wire

__all__ = ["LEFT_OUT", "LOST_CLUSTER", "Cluster", "Line", "Machine"]

TURN_S = 0.1
KEEP_S = 20.0  # a worker nobody needs may be needed again; after that its CPU is for others. A choice.
SEEN_S = 1.0  # so long after its start an actor's CPU is missing in what the cluster says is free
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
START_S = 30.0  # a worker that is not there after this is not counted on. A choice: on a busy machine one takes 20 s.
LEAST_SHARE = 0.2  # of a CPU that a worker here is taken to keep busy
LEFT_OUT = "InTune leaves out {} of the Ray cluster: {}"
LOST_CLUSTER = "InTune: no workers on the Ray cluster {} any more, the training goes on with those of this machine: {}"


@dataclass
class Machine:
    """One node of the cluster.

    Args:
        name: its address.
        cpus: it has, and how many nobody had taken.
        is_good: a result of it was the same as here.
        is_tried: its first result is on its way, or being compared.
        why_not: why it is left out, empty where it is not.
    """

    name: str
    cpus: float = 0.0
    free: float = 0.0
    is_good: bool = False
    is_tried: bool = False
    why_not: str = ""


@dataclass(eq=False)
class Line:
    """One worker on another machine, and this side's end of the way to it."""

    key: int
    machine: Machine
    wire: Wire
    is_taken: bool = False

    def end(self) -> None:
        """Let the way go; while somebody reads it, that is for them to do."""
        self.wire.shut()
        if not self.is_taken:
            self.wire.close()


class Cluster:
    """The workers of one loader on other machines; they outlive its iterators.

    Args:
        address: of the head, ``host:port``.

    Attributes:
        turn: held by who looks at lines, and notified when one is there.
        gone: why there is no cluster any more, empty while there may be one.
        local_cpus: of this machine, for the workers here.
        longest_s: that any item has taken.
        share: of a CPU that a worker here keeps busy: CPU seconds and wall seconds.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.turn = threading.Condition(threading.RLock())
        self.gone, self.local_cpus, self.longest_s, self.share = "", float(cpus_allowed()), 0.0, [0.0, 0.0]
        self._sent: tuple[int, tuple[int, ...]] = (0, ())
        self._ranks = 1
        self._machines: dict[str, Machine] = {}
        self._starting: dict[int, float] = {}
        self._lines: dict[int, Line] = {}
        self._free: list[Line] = []
        self._wanted = self._count = self._version = 0
        self._surplus_since_s: float | None = None
        self._retry_at_s, self._retry_s, self._seen_at_s, self._raised_s = 0.0, FIRST_RETRY_S, 0.0, 0.0
        self._driver: Driver | None = None
        self._closed = False
        self._sending = threading.Lock()

    # -- what there is -------------------------------------------------------------------------------------------

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
        """Workers there that can compute."""
        with self.turn:
            return len(self._lines)

    @property
    def is_growing(self) -> bool:
        """True while workers that were asked for may still come."""
        with self.turn:
            is_late = time.monotonic() - self._raised_s > START_S
            return not is_late and len(self._lines) < min(self._wanted, int(self.cpus))

    def most_here(self, own: int) -> int:
        """Return how many workers there are on this machine before there are any elsewhere: they keep its CPUs busy.

        Args:
            own: the user's number.
        """
        cpu_s, wall_s = self.share
        share = min(1.0, max(LEAST_SHARE, cpu_s / wall_s)) if wall_s > 0.0 else 1.0
        return max(1, own, int(busy_limit(self.local_cpus, 1) / share))

    @property
    def machines(self) -> list[tuple[str, int]]:
        """The machines at work, by name, and the workers on each."""
        with self.turn:
            ours = Counter(id(line.machine) for line in self._lines.values())
            return [(one.name, ours[id(one)]) for one in self._machines.values() if ours[id(one)]]

    @property
    def left_out(self) -> list[Machine]:
        """The machines that are not used."""
        with self.turn:
            return [machine for machine in self._machines.values() if machine.why_not]

    # -- begin and end -------------------------------------------------------------------------------------------

    def begin(self, ranks: int = 1) -> None:
        """Start the bridge, if it was not; never raises.

        Args:
            ranks: that share the cluster.
        """
        if self._driver is not None or self._closed or self.gone:
            return
        self._ranks = max(1, ranks)
        try:
            self._driver = Driver(self.address)
            begin(threading.Thread(target=self._follow, args=(self._driver,), daemon=True, name="intune-ray"))
        except Exception as error:
            self.lose(first_line(error))

    def close(self) -> None:
        """End all workers there; takes some seconds at most."""
        with self.turn:
            self._closed, driver, self._driver = True, self._driver, None
            self.gone = self.gone or "the training is over"
            self._drop_all()
        if driver is not None:
            driver.end()

    def lose(self, why: str) -> None:
        """Note that there is no cluster any more, and say so once."""
        with self.turn:
            if self.gone:
                return
            self.gone = why
            self._drop_all()
            driver, self._driver = self._driver, None
        if driver is not None:
            driver.kill()
        warn(LOST_CLUSTER.format(self.address, why))

    def _drop_all(self) -> None:
        for line in self._lines.values():
            line.end()
        self._lines, self._free, self._starting = {}, [], {}
        self.turn.notify_all()

    # -- workers -------------------------------------------------------------------------------------------------

    def want(self, count: int) -> None:
        """Have so many workers there, as far as there is room; they come and go beside the training."""
        with self.turn:
            if count > self._wanted:
                self._raised_s = time.monotonic()
            self._wanted = count

    def take(self) -> Line | None:
        """Return a worker for one item (turn held), None where none is free; of a new machine only one at a time."""
        for place in range(len(self._free) - 1, -1, -1):
            machine = self._free[place].machine
            if machine.is_good or not (machine.is_tried or machine.why_not):
                machine.is_tried = True
                line = self._free.pop(place)
                line.is_taken = True
                return line
        return None

    def put(self, line: Line) -> None:
        """Give back what `take` returned."""
        with self.turn:
            line.is_taken = False
            if self._lines.get(line.key) is line:
                self._free.append(line)
            else:
                line.end()
            self.turn.notify_all()

    def drop(self, line: Line) -> None:
        """Have a worker ended: it is gone, or its answer is not waited for."""
        with self.turn:
            if self._lines.pop(line.key, None) is not None:
                self._send("end", line.key)
            self._free = [one for one in self._free if one is not line]
            line.machine.is_tried = line.machine.is_good
            line.end()
            self.turn.notify_all()

    def is_silent(self, machine: Machine) -> None:
        """Have all workers of a machine ended that does not answer."""
        with self.turn:
            lines = [line for line in self._lines.values() if line.machine is machine]
            self._retry_at_s = time.monotonic() + self._retry_s
        for line in lines:
            self.drop(line)

    def leave_out(self, machine: Machine, why: str) -> None:
        """Use a machine no more, and say so."""
        with self.turn:
            if machine.why_not:
                return
            machine.why_not = why
            for key, known in self._machines.items():
                if known is machine:
                    self._send("leave", key)
        self.is_silent(machine)
        warn(LEFT_OUT.format(machine.name, why))

    def give(self, package: Package, again: bytes) -> int:
        """Return the number by which workers are told to do what is in a package, which is sent beside the training.

        Args:
            again: what belongs to one iterator, pickled.
        """
        with self.turn:
            self._version += 1
            version = self._version
        begin(threading.Thread(target=self._give, args=(version, package, again), daemon=True, name="intune-given"))
        return version

    def _give(self, version: int, package: Package, again: bytes) -> None:
        try:
            with self._sending:
                key = package.key()
                if self._sent[1] != key:
                    descriptor = package.file()
                    try:
                        self._send("package", version, package.sizes, descriptors=(descriptor,))
                    finally:
                        os.close(descriptor)
                    self._sent = version, key
                self._send("version", version, self._sent[0], again)
        except Exception as error:
            self.lose(first_line(error))

    def _send(self, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        driver = self._driver
        if driver is not None:
            driver.send(*message, descriptors=descriptors)

    # -- what the bridge tells -----------------------------------------------------------------------------------

    def _follow(self, driver: Driver) -> None:
        why = ""
        try:
            while not (self.gone or why):
                found = driver.receive(TURN_S)
                with self.turn:
                    if found is not None and not self.gone:
                        why = self._told(*found)
                    self._tend()
        except EOFError:
            why = f"Ray's driver ended with exit code {driver.exit_code(TURN_S)}"
        except Exception as error:
            why = first_line(error)
        self.lose(why)

    def _told(self, message: tuple[Any, ...], descriptors: list[int]) -> str:
        """Take note of one message (turn held); return why there is no cluster, if it says so."""
        kind, *given = message
        if kind == "failed":
            return str(given[0])
        if kind == "ready":
            self._is_ready(*given, *descriptors)
        elif kind == "gone":
            self._is_gone(*given)
        else:
            self._look_at(given[0])
        return ""

    def _is_ready(self, key: int, node: str, descriptor: int) -> None:
        machine = self._machines.setdefault(node, Machine(node[:8]))
        wire = Wire(Connection(descriptor), None)
        if self._starting.pop(key, None) is None or machine.why_not:
            wire.close()
            self._send("end", key)
            return
        self._retry_s = FIRST_RETRY_S
        line = self._lines[key] = Line(key, machine, wire)
        self._free.append(line)
        self.turn.notify_all()

    def _is_gone(self, key: int, why: str) -> None:
        if self._starting.pop(key, None) is not None:
            # It may be so each time: a module that is not there.
            self._retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = min(2.0 * self._retry_s, LAST_RETRY_S)
        elif (line := self._lines.get(key)) is not None:
            self.drop(line)

    def _look_at(self, machines: dict[str, tuple[str, float, float]]) -> None:
        self._seen_at_s = time.monotonic()
        for key, (name, cpus, free) in machines.items():
            machine = self._machines.setdefault(key, Machine(name))
            machine.name, machine.cpus, machine.free = name, cpus, free
        for key, machine in self._machines.items():
            if key not in machines:
                machine.cpus = machine.free = 0.0

    def _tend(self) -> None:
        """Start what is missing and end what nobody has needed for a while (turn held)."""
        now_s, target = time.monotonic(), min(self._wanted, int(self.cpus))
        surplus = len(self._starting) + len(self._lines) - target
        if surplus < 0 and now_s >= self._retry_at_s:
            for _ in range(-surplus):
                self._count += 1
                self._starting[self._count] = now_s
                self._send("start", self._count)
        if surplus <= 0:
            self._surplus_since_s = None
        elif self._surplus_since_s is None:
            self._surplus_since_s = now_s
        elif now_s - self._surplus_since_s > KEEP_S:
            for line in self._free[:surplus]:
                self.drop(line)
            for key in list(self._starting)[: max(0, len(self._starting) + len(self._lines) - target)]:
                del self._starting[key]
                self._send("end", key)
