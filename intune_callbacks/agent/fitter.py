"""Learn the fitted model from the observations of a live run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from intune_callbacks.agent.model import StageFit, demand_batches_per_s
from intune_callbacks.agent.per_batch import ItemsPerBatch
from intune_callbacks.types import Observation, StageRates

__all__ = ["Counts", "Fitter", "contention"]

FORGET, FORGET_IRREGULARITY = 0.9, 0.97
"""Weight an old reading keeps at each new one: some ten windows count, thirty for what few long items decide."""
CHANGED = 1.3
"""A stage whose service or CPU time moved by this factor, workers unchanged, does other work than before."""
CROWDED = 0.95
FEWEST_ITEMS = 3
DEMAND_WINDOWS = 5
"""Windows whose median is what the model takes: in one of them the machine may stall, or start workers."""
MOST_POINTS = 8
_CHANGED = math.log(CHANGED)


class Counts(NamedTuple):
    """The part of a `StageFit` that is counted, not fitted."""

    items_per_batch: float
    cv: float


@dataclass(slots=True)
class _Point:
    """Weighted mean service time at one number of workers."""

    weight: float
    service_s: float


@dataclass(slots=True)
class _StageMemory:
    items: float = 0.0
    cpu_s: float = 0.0
    # Irregularity: pooled mean and variance of the single service times, and the items they rest on.
    mean_s: float = 0.0
    variance: float = 0.0
    pooled_items: float = 0.0
    points: dict[int, _Point] = field(default_factory=dict)
    # Read while the CPUs were all in use: the undisturbed service time is somewhere between the two.
    crowded_least: _Point | None = None
    crowded_most: _Point | None = None

    @property
    def cv(self) -> float:
        return math.sqrt(self.variance) / self.mean_s if self.mean_s > 0.0 else 0.0


class Fitter:
    """Keeps (workers, service time, CPU time) readings of every stage and fits `StageFit` to them."""

    def __init__(self) -> None:
        self._stages: dict[str, _StageMemory] = {}
        self._per_batch = ItemsPerBatch()
        self._demands: deque[float] = deque(maxlen=DEMAND_WINDOWS)

    @property
    def demand(self) -> float:
        """Batches per second the model takes if data are always there; infinity while unknown.

        Of fewer windows than `DEMAND_WINDOWS` the fastest counts: beside workers that start two in a row may be slow.
        """
        if len(self._demands) < DEMAND_WINDOWS:
            return max(self._demands, default=math.inf)
        return median(self._demands)

    def learn(self, observation: Observation) -> None:
        """Take one window into the readings."""
        slowdown, is_crowded = contention(observation)
        current = observation.allocation
        if observation.batches:
            self._demands.append(demand_batches_per_s(observation))
        self._per_batch.learn(observation)
        for name, rates in observation.rates.items():
            if rates.items < 1 or rates.service_s <= 0.0 or name not in current:
                continue
            if not math.isfinite(rates.service_s + rates.service_cpu_s + rates.service_cv):
                continue  # of a broken counter or clock
            memory = self._stages.get(name)
            if memory is None:
                memory = self._stages[name] = _StageMemory()
            self._learn_costs(memory, rates)
            if is_crowded:
                # CPU seconds do not grow when CPUs are shared, waiting does not either: at most this is contention.
                least_s = max(rates.service_cpu_s, rates.service_s - (slowdown - 1.0) * rates.service_cpu_s)
                memory.crowded_least = _mean(memory.crowded_least, rates.items, least_s)
                memory.crowded_most = _mean(memory.crowded_most, rates.items, rates.service_s)
            else:
                self._learn_service(memory, rates.items, rates.service_s, current[name])

    def is_reliable(self, observation: Observation) -> bool:
        """Return True once every measured stage of `observation` has made enough items for a mean."""
        return bool(observation.rates) and all(
            name in self._stages and self._stages[name].items >= FEWEST_ITEMS for name in observation.rates
        )

    def fits(self) -> dict[str, StageFit]:
        """Return the fit of every stage that was read."""
        each = self._per_batch.of_stages()
        return {name: _fit(memory, each.get(name, 0.0)) for name, memory in self._stages.items() if memory.items > 0.0}

    def counts(self) -> dict[str, Counts]:
        """Return what was counted of every stage that was read: cheaper than `fits`."""
        each = self._per_batch.of_stages()
        return {name: Counts(each.get(name, 0.0), m.cv) for name, m in self._stages.items() if m.items > 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Return the readings as plain numbers."""
        return {
            "per_batch": self._per_batch.state_dict(),
            "stages": {
                name: {
                    "items": m.items,
                    "cpu_s": m.cpu_s,
                    "mean_s": m.mean_s,
                    "variance": m.variance,
                    "pooled_items": m.pooled_items,
                    "points": [[n, p.weight, p.service_s] for n, p in m.points.items()],
                    "crowded": [[p.weight, p.service_s] for p in (m.crowded_least, m.crowded_most) if p is not None],
                }
                for name, m in self._stages.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._per_batch.load_state_dict(state["per_batch"])
        self._stages = {}
        for name, m in state["stages"].items():
            memory = self._stages[name] = _StageMemory(
                items=float(m["items"]),
                cpu_s=float(m["cpu_s"]),
                mean_s=float(m["mean_s"]),
                variance=float(m["variance"]),
                pooled_items=float(m["pooled_items"]),
            )
            memory.points = {int(n): _Point(float(weight), float(service_s)) for n, weight, service_s in m["points"]}
            if m["crowded"]:
                memory.crowded_least, memory.crowded_most = (_Point(float(w), float(s)) for w, s in m["crowded"])

    @staticmethod
    def _learn_costs(memory: _StageMemory, rates: StageRates) -> None:
        if memory.items and _differs(memory.cpu_s, rates.service_cpu_s, memory.items, rates.items, memory):
            memory.points.clear()
            memory.crowded_least = memory.crowded_most = None
            memory.items = 0.0
        kept = FORGET * memory.items
        new = rates.items / (kept + rates.items)
        memory.items = kept + rates.items
        memory.cpu_s += new * (rates.service_cpu_s - memory.cpu_s)
        memory.pooled_items = FORGET_IRREGULARITY * memory.pooled_items + rates.items
        share = rates.items / memory.pooled_items
        # A few items show less than their variance.
        variance = (rates.service_cv * rates.service_s) ** 2 * rates.items / max(1, rates.items - 1)
        memory.variance += share * (variance - memory.variance)
        memory.mean_s += share * (rates.service_s - memory.mean_s)

    @staticmethod
    def _learn_service(memory: _StageMemory, items: int, service_s: float, workers: int) -> None:
        # Taken out and put back: the order of the dictionary is the order of reading, the oldest goes first.
        point = memory.points.pop(workers, None)
        if point is not None and _differs(point.service_s, service_s, point.weight, items, memory):
            memory.points.clear()
            point = None
        for other in memory.points.values():
            other.weight *= FORGET
        memory.points[workers] = _mean(point, items, service_s)
        while len(memory.points) > MOST_POINTS:
            del memory.points[next(iter(memory.points))]


def _mean(point: _Point | None, items: int, service_s: float) -> _Point:
    if point is None:
        return _Point(items, service_s)
    weight = FORGET * point.weight + items
    return _Point(weight, point.service_s + items / weight * (service_s - point.service_s))


def contention(observation: Observation) -> tuple[float, bool]:
    """Return how many times slower CPU work ran for lack of CPUs, and whether the CPUs were (nearly) all in use.

    When every CPU is busy all stages are slowed by the same factor. Two things bound it: busy workers per CPU, and the
    smallest wall / CPU ratio of a stage (the one that waits least for anything else).
    """
    rates, room_s = observation.rates.values(), observation.elapsed_s * observation.resources.cpus
    if sum([r.items * r.service_cpu_s for r in rates]) < CROWDED * room_s:
        return 1.0, False
    worked = [r for r in rates if r.items and r.service_cpu_s > 0.0]
    if not worked or room_s <= 0.0 or sum(r.items * r.service_cpu_s for r in worked) < CROWDED * room_s:
        return 1.0, False
    busy_per_cpu = sum(r.items * r.service_s for r in rates) / room_s
    return max(1.0, min(busy_per_cpu, *(r.service_s / r.service_cpu_s for r in worked))), True


def _differs(before_s: float, now_s: float, items_before: float, items_now: float, memory: _StageMemory) -> bool:
    """True when two mean times differ by `CHANGED` and by more than their noise."""
    if before_s <= 0.0 or now_s <= 0.0 or 1.0 / CHANGED < now_s / before_s < CHANGED:
        return False
    moved = abs(math.log(now_s) - math.log(before_s))
    if not moved > _CHANGED:
        return False
    noise = memory.cv * math.sqrt(1.0 / max(1.0, items_before) + 1.0 / max(1.0, items_now))
    return moved > max(_CHANGED, 3.0 * noise)


def _fit(memory: _StageMemory, items_per_batch: float) -> StageFit:
    points = sorted(memory.points.items())
    least, most = memory.crowded_least, memory.crowded_most
    if not points and least is not None:
        points = [(1, least)]
    total = sum(p.weight for _, p in points)
    mean_s = sum(p.weight * p.service_s for _, p in points) / total
    work_s, serial = mean_s, 0.0
    if len(points) > 1:
        mean_n = sum(p.weight * n for n, p in points) / total
        spread = sum(p.weight * (n - mean_n) ** 2 for n, p in points)
        slope = sum(p.weight * (n - mean_n) * (p.service_s - mean_s) for n, p in points) / spread
        alone_s = mean_s - slope * (mean_n - 1.0)
        noise = 2.0 * memory.cv * math.sqrt(sum(1.0 / max(1.0, p.weight) for _, p in points))
        growth = slope * (points[-1][0] - points[0][0]) / mean_s
        # Work that is all serial grows with the number of workers and costs nothing without them: cut there.
        if growth > max(0.1, noise):
            work_s = max(alone_s, memory.cpu_s, slope)
            serial = min(1.0, slope / work_s)
    if serial == 0.0 and least is not None and most is not None:
        work_s = min(max(work_s, least.service_s), most.service_s)
    return StageFit(items_per_batch, max(work_s, memory.cpu_s), memory.cpu_s, serial, memory.cv)
