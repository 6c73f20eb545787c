"""A machine with any number of CPUs, emulated on a small one: a stage's cost is sleep held under a counting semaphore.

Real frameworks, real threads and the real tuner run on it; only the computing is replaced. What it leaves out: caches,
memory bandwidth, NUMA and turbo; a CPU is given first come, first served and kept until the call is done, there is no
time slicing. Sleep overshoots by about 0.1 ms, so calls should take 20 ms or more and stay under 1000 a second;
`Usage.sleep_inflation` says what the host really did.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from dataclasses import dataclass

from intune_callbacks.types import Clock, Resources

__all__ = ["SHAPES", "SHARES", "Usage", "VirtualMachine", "VirtualProbe", "irregular", "water_fill"]

SHARES = {"disk": 0.14, "shuffle": 0.117, "udf": 0.423, "batch": 0.28, "prefetch": 0.04}
"""Share of one batch's CPU work per stage, from Fig. 3 of the InTune paper (RecSys 2023, arXiv 2308.08500)."""
SHAPES = {
    "criteo": SHARES,
    "wide": {"disk": 0.12, "extract": 0.18, "udf": 0.44, "shuffle": 0.06, "batch": 0.17, "prefetch": 0.03},
    "3 stages": {"disk": 0.304, "batch": 0.609, "prefetch": 0.087},
    "4 stages": {"disk": 0.243, "shuffle": 0.203, "batch": 0.485, "prefetch": 0.069},
    "6 stages": {"disk": 0.11, "shuffle": 0.09, "udf": 0.33, "cross": 0.22, "batch": 0.22, "prefetch": 0.03},
    "7 stages": {
        "disk": 0.10, "filter": 0.09, "shuffle": 0.08, "udf": 0.30, "cross": 0.20, "batch": 0.20, "prefetch": 0.03
    },
}  # fmt: skip
"""Pipelines: each stage's share of the CPU work. `criteo` is measured (above), 3 and 4 stages are its parts. The others
are ours: `wide` stands for dozens of sparse features that are looked up, 6 and 7 stages have another UDF."""

MEMORY_LIMIT_BYTES = 256 << 30
MEMORY_USED_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Usage:
    """Monotonic counters of a machine; take differences.

    Args:
        at_s: wall clock of the reading, seconds.
        cpu_s: CPU seconds the machine could have given.
        busy_s: CPU seconds that were taken, up to this moment.
        held_s: CPU seconds of the finished calls.
        asked_s: CPU seconds those had asked for; `held_s` is longer where the host's sleep overshot.
        calls: finished calls of `compute`.
    """

    at_s: float
    cpu_s: float
    busy_s: float
    held_s: float
    asked_s: float
    calls: int

    def since(self, before: Usage) -> Usage:
        """Return what was used between `before` and this reading."""
        return Usage(
            self.at_s - before.at_s,
            self.cpu_s - before.cpu_s,
            self.busy_s - before.busy_s,
            self.held_s - before.held_s,
            self.asked_s - before.asked_s,
            self.calls - before.calls,
        )

    @property
    def utilisation(self) -> float:
        """Share of the machine that was busy, 0..1; more only while a shrunken machine ends calls it had begun."""
        return self.busy_s / self.cpu_s if self.cpu_s > 0 else 0.0

    @property
    def sleep_inflation(self) -> float:
        """How much longer the host slept than it was told to; 1.0 is exact."""
        return self.held_s / self.asked_s if self.asked_s > 0 else 1.0


class VirtualMachine:
    """`cpus` virtual CPUs that can be added or taken away while stages compute on them.

    Args:
        cpus: number of virtual CPUs, >= 1.
        memory_limit_bytes: what `probe` reports as the machine's memory.
        memory_used_bytes: what `probe` reports as in use.
    """

    def __init__(
        self, cpus: int, memory_limit_bytes: int = MEMORY_LIMIT_BYTES, memory_used_bytes: int = MEMORY_USED_BYTES
    ) -> None:
        self.memory_limit_bytes, self.memory_used_bytes = memory_limit_bytes, memory_used_bytes
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._mine = threading.local()
        self._cpus, self._running = _at_least_one(cpus), 0
        self._counted_s, self._cpu_s, self._busy_s = time.perf_counter(), 0.0, 0.0
        self._held_s = self._asked_s = 0.0
        self._calls = 0
        self._stage_s: dict[str, float] = {}
        self.cost: dict[str, float] = {}
        """How many times as much CPU a stage takes as it asks for."""
        self.wait: dict[str, float] = {}
        """How many times that a stage waits after it, without a CPU, as for storage."""
        self.hidden = 0
        """CPUs that a neighbour takes: the probe still shows them."""

    @property
    def cpus(self) -> int:
        """Virtual CPUs now."""
        return self._cpus

    @property
    def clock(self) -> Clock:
        """The real wall clock with the virtual CPU clock: what adapters and tuner are given."""
        return Clock(wall=time.perf_counter, cpu=self.thread_time)

    def compute(self, stage: str, seconds: float) -> None:
        """Hold one virtual CPU for `seconds`, waiting first come, first served for one to be free."""
        asked, seconds = seconds, seconds * self.cost.get(stage, 1.0)
        self._acquire()
        begin = time.perf_counter()
        time.sleep(seconds)
        held = time.perf_counter() - begin
        self._mine.cpu_s = self.thread_time() + held
        with self._lock:
            self._count()
            self._running -= 1
            self._held_s += held
            self._asked_s += seconds
            self._calls += 1
            self._stage_s[stage] = self._stage_s.get(stage, 0.0) + seconds
            self._admit()
        if wait := self.wait.get(stage):
            time.sleep(wait * asked)

    def resize(self, cpus: int) -> None:
        """Change the number of virtual CPUs; calls that hold one finish first."""
        with self._lock:
            self._count()
            self._cpus = _at_least_one(cpus)
            self._admit()

    def thread_time(self) -> float:
        """Return the virtual CPU seconds the calling thread has held so far."""
        return float(getattr(self._mine, "cpu_s", 0.0))

    def usage(self) -> Usage:
        """Return the machine's counters."""
        with self._lock:
            self._count()
            return Usage(self._counted_s, self._cpu_s, self._busy_s, self._held_s, self._asked_s, self._calls)

    def stage_seconds(self) -> dict[str, float]:
        """Return the CPU seconds asked for by each stage so far."""
        with self._lock:
            return dict(self._stage_s)

    def probe(self) -> VirtualProbe:
        """Return the probe that shows this machine to a tuner."""
        return VirtualProbe(self)

    def _acquire(self) -> None:
        with self._lock:
            if self._running < self._cpus and not self._waiting:
                self._count()
                self._running += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        # The one who frees a CPU hands it over, already counted as running.
        turn.acquire()

    def _count(self) -> None:
        """Add the stretch since the last change to the counters (lock held)."""
        now = time.perf_counter()
        self._cpu_s += self._cpus * (now - self._counted_s)
        self._busy_s += self._running * (now - self._counted_s)
        self._counted_s = now

    def _admit(self) -> None:
        while self._waiting and self._running < self._cpus:
            self._running += 1
            self._waiting.popleft().release()


class VirtualProbe:
    """Resources of a `VirtualMachine`, read anew each time."""

    def __init__(self, machine: VirtualMachine) -> None:
        self._machine = machine

    def read(self) -> Resources:
        """Return the machine's CPUs and memory now."""
        machine = self._machine
        return Resources(float(machine.cpus + machine.hidden), machine.memory_limit_bytes, machine.memory_used_bytes)


def irregular(seed: int, index: int, sigma: float) -> float:
    """Return the factor on the cost of item `index`: lognormal with mean 1, the same whichever worker computes it.

    Args:
        seed: of the whole run.
        index: position of the item in the data.
        sigma: standard deviation of the logarithm; 0 makes all items equal.
    """
    if sigma == 0.0:
        return 1.0
    return math.exp(random.Random((seed << 40) ^ index).gauss(-sigma * sigma / 2, sigma))


def water_fill(cpus: int, costs: dict[str, float]) -> dict[str, int]:
    """Return the best split of `cpus` workers: one each, then always one more where the throughput is lowest.

    Args:
        cpus: workers to hand out; every stage gets at least one.
        costs: stage -> CPU seconds per batch.
    """
    workers = dict.fromkeys(costs, 1)
    while sum(workers.values()) < cpus:
        slowest = min(costs, key=lambda stage: workers[stage] / costs[stage])
        workers[slowest] += 1
    return workers


def _at_least_one(cpus: int) -> int:
    if cpus < 1:
        raise ValueError(f"cpus={cpus!r}: a virtual machine needs at least 1 CPU")
    return cpus
