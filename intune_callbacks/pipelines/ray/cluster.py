"""A Ray cluster as the training process sees it: its machines, and the workers there that were asked for.

Ray itself runs in a process of its own (`bridge`). What is decided is decided here; when that process ends, whatever
the reason, there is no cluster any more, and nobody waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from intune_callbacks.errors import first_line, warn
from intune_callbacks.pipelines.base import begin
from intune_callbacks.pipelines.ray.driver import Driver
from intune_callbacks.pipelines.ray.given import Package
from intune_callbacks.pipelines.ray.members import Line, Machine, Members
from intune_callbacks.pipelines.workers.wire import Wire

__all__ = ["ENDING", "LEFT_OUT", "LOST_CLUSTER", "Cluster"]

TURN_S = 0.1
KEEP_S = 20.0  # a worker nobody needs may be needed again; after that its CPU is for others. A choice.
MOST_LOSSES = 4
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
ENDING = "its workers end, one after the other, and make nothing"
LEFT_OUT = "InTune leaves out {} of the Ray cluster: {}"
LOST_CLUSTER = "InTune: no workers on the Ray cluster {} any more, the training goes on with those of this machine: {}"


class Cluster(Members):
    """The workers of one loader on other machines; they outlive its iterators.

    Args:
        address: of the head, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self._count = self._version = 0
        self._sent: tuple[int, tuple[int, ...]] = (0, ())
        self._surplus_since_s: float | None = None
        self._retry_at_s, self._retry_s = 0.0, FIRST_RETRY_S
        self._driver: Driver | None = None
        self._closed = False
        self._sending = threading.Lock()

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

    def look(self, within_s: float) -> str:
        """Return what other machines there are, or why none can be had; then this is over.

        Args:
            within_s: seconds to wait at most.
        """
        until_s = time.monotonic() + within_s
        self.begin()
        with self.turn:
            while not (self.gone or self._seen_at_s) and time.monotonic() < until_s:
                self.turn.wait(TURN_S)
            cpus = sum(machine.cpus for machine in self._machines.values())
            free = sum(machine.free for machine in self._machines.values())
            many = len(self._machines)
            said = f"{many} other machine{'s' * (many != 1)}, {cpus:g} CPUs, {free:g} of them free"
            said = said if self._seen_at_s else self.gone or f"no answer in {within_s:g} s"
        self.close()
        return said

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

    def put(self, line: Line) -> None:
        """Give back what `take` returned."""
        with self.turn:
            line.is_taken = False
            if self._lines.get(line.key) is line:
                self._free.append(line)
                line.machine.losses = 0
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

    def lost(self, line: Line) -> None:
        """Note that a worker has ended with its item; where that goes on, its machine is not used any more."""
        with self.turn:
            machine = line.machine
            if line.begun_s > machine.lost_at_s:  # else it has ended with others
                machine.losses, machine.lost_at_s = machine.losses + 1, time.monotonic()
            is_hopeless = machine.losses >= MOST_LOSSES
        if is_hopeless:
            self.leave_out(machine, ENDING)

    def is_silent(self, machine: Machine) -> None:
        """Have all workers of a machine ended that does not answer."""
        with self.turn:
            lines = [line for line in self._lines.values() if line.machine is machine]
            self._retry_at_s = time.monotonic() + self._retry_s
            machine.silences += 1
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
                        self.turn.notify_all()
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
        elif kind == "has":
            if (line := self._lines.get(given[0])) is not None:
                line.version = given[1]
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
        line = self._lines[key] = Line(key, machine, wire, time.monotonic())
        machine.most = max(machine.most, sum(one.machine is machine for one in self._lines.values()))
        self._free.append(line)
        self.turn.notify_all()

    def _is_gone(self, key: int, why: str) -> None:
        if self._starting.pop(key, None) is not None:
            # It may be so each time: a module that is not there.
            self._retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = min(2.0 * self._retry_s, LAST_RETRY_S)
        elif (line := self._lines.get(key)) is not None:
            self.drop(line)

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
