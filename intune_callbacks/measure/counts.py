"""What is counted of a live run: items per batch, irregularity, batches the model takes, CPUs a busy worker takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from intune_callbacks.types import Observation, StageRates

__all__ = ["Counts", "CpuShares", "ItemsPerBatch", "StageCounts"]

FORGET, FORGET_IRREGULARITY = 0.9, 0.97
"""Weight an old reading keeps at each new one: some ten windows count, thirty for what few long items decide.
A choice."""
CHANGED = math.log(1.3)
"""A stage whose CPU time per item moved by so much, in log units, does other work than before. A choice: caches and the
CPU's clock change it by less."""
FEWEST_ITEMS = 3
"""Items of every stage before it is judged. A choice: with fewer one odd item decides, and more are waited for."""
DEMAND_WINDOWS = 5
"""Windows whose median is what the model takes: in two of them the machine may stall, or start workers."""
WINDOWS = 120
"""Windows the items per batch are counted over. A choice: two minutes, so that what queues hold hardly matters."""
FILLING, REPLACED_BY = 2, 4
"""The first windows fill buffers that nobody counts: they stand in until there are so many others. A choice."""
REMEMBERED_WINDOWS = 20
"""Windows whose largest share of a CPU counts. A choice: contention is over within them, other work lasts longer."""
ENOUGH_WINDOWS = 3
"""Windows without new workers from which on those with new ones are left out: docs/adr/0001-cpu-budget-is-use.md."""


class ItemsPerBatch:
    """Counts items per batch over the last windows.

    Items made and batches delivered in a short window say little: behind one slow item a stage makes hundreds; later
    they are delivered while it makes none. So what *left* the queue of a stage is set against what the next stage made
    of it, stage by stage down to the batches: then only the few items being computed are missing.
    """

    def __init__(self) -> None:
        self._windows: deque[tuple[int, dict[str, tuple[int, int]]]] = deque()
        self._filling = FILLING
        self._batches = 0
        # Stage -> items made, and items that left its queue, in the order of the stages.
        self._made: dict[str, tuple[int, int]] = {}

    def learn(self, observation: Observation) -> None:
        """Take one window."""
        made = {name: (rates.items, rates.items - rates.stored) for name, rates in observation.rates.items()}
        self._add(observation.batches, made)
        if self._filling and len(self._windows) == FILLING + REPLACED_BY:
            for _ in range(self._filling):
                self._forget()
            self._filling = 0
        elif len(self._windows) > WINDOWS:
            self._forget()

    def of_stages(self) -> dict[str, float]:
        """Return stage -> items per batch, 0.0 where none was made."""
        found, each, consumed = {}, 1.0, self._batches
        for name, (items, left) in reversed(self._made.items()):
            if items <= 0 or consumed <= 0:
                found[name] = 0.0
                continue
            found[name] = each = each * (left if left > 0 else items) / consumed
            consumed = items
        return found

    def state_dict(self) -> list[Any]:
        """Return the windows as plain numbers."""
        return [[batches, {name: list(counts) for name, counts in made.items()}] for batches, made in self._windows]

    def load_state_dict(self, state: Iterable[tuple[int, Mapping[str, tuple[int, int]]]]) -> None:
        """Take back what `state_dict` gave."""
        self._windows.clear()
        self._made.clear()
        self._batches = 0
        for batches, made in state:
            self._add(int(batches), {str(name): (int(items), int(left)) for name, (items, left) in made.items()})
        self._filling = FILLING if len(self._windows) < FILLING + REPLACED_BY else 0

    def _add(self, batches: int, made: dict[str, tuple[int, int]]) -> None:
        self._windows.append((batches, made))
        self._count(1, batches, made)

    def _forget(self) -> None:
        self._count(-1, *self._windows.popleft())

    def _count(self, sign: int, batches: int, made: Mapping[str, tuple[int, int]]) -> None:
        self._batches += sign * batches
        for name, (items, left) in made.items():
            before = self._made.get(name, (0, 0))
            self._made[name] = before[0] + sign * items, before[1] + sign * left


class Counts(NamedTuple):
    """Items of one stage for one batch, and the coefficient of variation of their service times."""

    items_per_batch: float
    cv: float


@dataclass(slots=True)
class _Stage:
    items: float = 0.0
    cpu_s: float = 0.0
    # Irregularity: pooled mean and variance of the single service times, and the items they rest on.
    mean_s: float = 0.0
    variance: float = 0.0
    pooled_items: float = 0.0

    @property
    def cv(self) -> float:
        return math.sqrt(self.variance) / self.mean_s if self.mean_s > 0.0 else 0.0

    def learn(self, rates: StageRates) -> None:
        if self.items and _differs(self, rates):
            self.items = 0.0
        self.items = FORGET * self.items + rates.items
        self.cpu_s += rates.items / self.items * (rates.service_cpu_s - self.cpu_s)
        self.pooled_items = FORGET_IRREGULARITY * self.pooled_items + rates.items
        share = rates.items / self.pooled_items
        # A few items show less than their variance.
        variance = (rates.service_cv * rates.service_s) ** 2 * rates.items / max(1, rates.items - 1)
        self.variance += share * (variance - self.variance)
        self.mean_s += share * (rates.service_s - self.mean_s)


class StageCounts:
    """Keeps what was counted of every stage, and the model's demand."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stage] = {}
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
        """Take one window into the counts."""
        current = observation.allocation
        if observation.batches:
            self._demands.append(_demand_batches_per_s(observation))
        self._per_batch.learn(observation)
        for name, rates in observation.rates.items():
            if rates.items < 1 or rates.service_s <= 0.0 or name not in current:
                continue
            if not math.isfinite(rates.service_s + rates.service_cpu_s + rates.service_cv):
                continue  # of a broken counter or clock
            self._stages.setdefault(name, _Stage()).learn(rates)

    def is_reliable(self, observation: Observation) -> bool:
        """Return True once every measured stage of `observation` has made enough items for a mean."""
        return bool(observation.rates) and all(
            name in self._stages and self._stages[name].items >= FEWEST_ITEMS for name in observation.rates
        )

    def of_stages(self) -> dict[str, Counts]:
        """Return the counts of every stage that was read."""
        each = self._per_batch.of_stages()
        return {name: Counts(each.get(name, 0.0), s.cv) for name, s in self._stages.items() if s.items > 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        return {
            "per_batch": self._per_batch.state_dict(),
            "stages": {name: asdict(stage) for name, stage in self._stages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._per_batch.load_state_dict(state["per_batch"])
        self._stages = {
            name: _Stage(**{key: float(stage[key]) for key in _Stage.__slots__})
            for name, stage in state["stages"].items()
        }


class CpuShares:
    """CPU seconds of workers over the seconds they were busy, by stage: the largest share of the last 20 windows.

    The largest, because workers that wait for a CPU take less than they could use. A window in which workers have just
    started, their memory new and their libraries cold, shows up to three times as much as all later ones; it counts
    as long as there are fewer than three others.
    """

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}
        self._warm: dict[str, deque[float]] = {}
        self._cold: dict[str, deque[float]] = {}

    def learn(self, seen: Observation) -> None:
        """Remember the shares of one window."""
        workers = seen.allocation
        for name, r in seen.rates.items():
            if r.items and r.service_s > 0.0:
                has_new = workers.get(name, 0) > self._workers.get(name, 0)
                shares = (self._cold if has_new else self._warm).setdefault(name, deque(maxlen=REMEMBERED_WINDOWS))
                shares.append(min(1.0, r.service_cpu_s / r.service_s))
        self._workers = dict(workers)

    def known(self) -> dict[str, float]:
        """Return stage name -> CPUs one busy worker occupies, 0..1, of all stages that were measured."""
        return {name: self.of(name) for name in self._cold | self._warm}

    def of(self, name: str) -> float:
        """Return the CPUs one busy worker of a stage occupies, 0..1; a whole one until it was measured."""
        warm, cold = self._warm.get(name, ()), self._cold.get(name, ())
        return max(warm if len(warm) >= ENOUGH_WINDOWS else (*warm, *cold), default=1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares seen, by stage: of workers that had just started, and of all others."""
        return {
            "cold": {name: list(shares) for name, shares in self._cold.items()},
            "warm": {name: list(shares) for name, shares in self._warm.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: this is no such state.
        """
        self._cold, self._warm = (
            {str(name): deque(map(float, shares), maxlen=REMEMBERED_WINDOWS) for name, shares in state[part].items()}
            for part in ("cold", "warm")
        )


def _demand_batches_per_s(observation: Observation) -> float:
    """Batches a second the model would take if data were always there; infinity if unknown."""
    model_s = observation.model_s
    if observation.exposed_wait_frac is not None:
        # On a GPU what was lost for want of data is its idle time.
        lost = min(observation.exposed_wait_frac, observation.wait_frac)
        model_s = max(model_s, observation.elapsed_s / observation.batches * (1.0 - lost))
    return 1.0 / model_s if model_s > 1e-9 else math.inf


def _differs(stage: _Stage, now: StageRates) -> bool:
    """True when the CPU times of an item differ by `CHANGED` and by more than their noise."""
    if stage.cpu_s <= 0.0 or now.service_cpu_s <= 0.0:
        return False
    moved = abs(math.log(now.service_cpu_s) - math.log(stage.cpu_s))
    noise = stage.cv * math.sqrt(1.0 / max(1.0, stage.items) + 1.0 / max(1, now.items))
    return moved > max(CHANGED, 3.0 * noise)
