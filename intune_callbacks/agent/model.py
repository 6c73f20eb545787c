"""The fitted model of a pipeline: what each stage costs, and the allocation that follows from it in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from intune_callbacks.agent.ordering import in_order_efficiency, window_for
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.types import Allocation, Observation, Stage

__all__ = [
    "DEMAND_MARGIN",
    "Plan",
    "StageFit",
    "demand_batches_per_s",
    "is_input_bound",
    "over_budget",
    "plan",
    "predict",
    "waiting",
]

DEMAND_MARGIN = 1.25
"""Supply planned above what the model asks for, so that irregular batches do not reach the trainer."""
IRREGULAR_SLACK = 0.25
"""Workers added where service times vary: 1.25 x the exact number was best on an emulated 32..128 CPUs."""
BURSTS = 0.15
"""Capacity lost where neighbouring stages deliver and take in bursts."""
INPUT_BOUND_WAIT = 0.03
"""Below this share of waiting there is nothing worth a change."""


def waiting(observation: Observation) -> float:
    """Return the share of the window lost for want of data: the GPU's idle share if known, else the loop's wait."""
    exposed = observation.exposed_wait_frac
    return observation.wait_frac if exposed is None else min(exposed, observation.wait_frac)


def is_input_bound(observation: Observation) -> bool:
    """Return True when more supply would make the training faster."""
    return waiting(observation) >= INPUT_BOUND_WAIT


def demand_batches_per_s(observation: Observation) -> float:
    """Return how many batches a second the model would take if data were always there; infinity if unknown."""
    if not observation.batches:
        return math.inf
    model_s = observation.model_s
    if observation.exposed_wait_frac is not None:
        model_s = max(model_s, observation.elapsed_s / observation.batches * (1.0 - waiting(observation)))
    return 1.0 / model_s if model_s > 1e-9 else math.inf


@dataclass(frozen=True, slots=True)
class StageFit:
    """What one worker stage costs: ``service_s(n) = work_s * (1 + serial * (n - 1))``.

    The form is the contention term of the Universal Scalability Law (N. Gunther, "Guerrilla Capacity Planning", 2007).

    Args:
        items_per_batch: results made for one delivered batch.
        work_s: wall seconds of one item with a single worker and free CPUs.
        cpu_s: CPU seconds of `work_s`; the rest is waiting, which needs a worker but no CPU.
        serial: the part of the work that only one worker can do at a time (a lock, the GIL), 0..1.
        cv: coefficient of variation of the service times.
    """

    items_per_batch: float
    work_s: float
    cpu_s: float
    serial: float = 0.0
    cv: float = 0.0

    @property
    def cpu_per_batch_s(self) -> float:
        """CPU seconds this stage needs for one delivered batch."""
        return self.items_per_batch * self.cpu_s

    @property
    def cpu_share(self) -> float:
        """CPUs one busy worker occupies, 0..1."""
        return min(1.0, self.cpu_s / self.work_s) if self.work_s > 0 else 1.0

    def capacity(self, workers: int, window: int | None = None) -> float:
        """Return the batches per second `workers` can feed, in a window of `window` results (None: wide enough)."""
        batch_s = self.items_per_batch * self.work_s * (1.0 + self.serial * (workers - 1))
        if batch_s <= 0.0:
            return math.inf
        if window is None:
            return workers / batch_s
        usable = min(workers, window)
        return usable / batch_s * in_order_efficiency(usable, window, self.cv)

    def workers_for(self, rate: float) -> float:
        """Return the (fractional) number of workers that feeds `rate` batches per second; infinity if none does."""
        load = rate * self.items_per_batch * self.work_s
        if load <= 1.0:
            return load
        left = 1.0 - load * self.serial
        return load * (1.0 - self.serial) / left if left > 0.0 else math.inf

    def useful_workers(self, low: int, high: int) -> int:
        """Return the largest number in low..high where one more still pays: 1 % more, or 10 % of its fair share."""
        workers = low
        while workers < high:
            gain = self.capacity(workers + 1) / self.capacity(workers) - 1.0 if self.serial > 0.0 else 1.0
            if gain < 0.01 and gain * workers < 0.1:
                break
            workers += 1
        return workers


@dataclass(frozen=True, slots=True)
class Plan:
    """An allocation and what the model expects of it.

    Args:
        allocation: stage name -> value, for the stages the model knows.
        rate: expected batches per second.
        limit: what stops it from being faster: ``the CPUs``, ``the model`` or ``stage 'name'``.
    """

    allocation: Allocation
    rate: float
    limit: str


def plan(fits: Mapping[str, StageFit], stages: Sequence[Stage], cpus: float, demand: float) -> Plan:
    """Return the allocation of the largest rate that CPUs, model and stages allow, with just enough workers for it.

    The rate X is bounded by ``X * sum(cpu_per_batch_s) <= cpus`` (a worker that waits for I/O occupies no CPU), by
    `DEMAND_MARGIN` times what the model takes, and by what each stage can reach with all its useful workers; then each
    stage gets ``ceil(X * worker seconds per batch)``. Without serial parts this is the closed form of the linear
    program of Plumber (Kuchnik et al., MLSys 2022).

    Args:
        fits: worker stage name -> its fit.
        stages: the pipeline's stages.
        cpus: CPUs the pipeline may use.
        demand: batches per second the model would take.
    """
    known = [stage for stage in stages if stage.name in fits]
    useful = {s.name: fits[s.name].useful_workers(s.low, max(s.low, _reach(s))) for s in known}
    limits = {f"stage {s.name!r}": fits[s.name].capacity(useful[s.name]) for s in known}
    limits["the model"] = demand * DEMAND_MARGIN
    cpu_per_batch_s = sum(fits[s.name].cpu_per_batch_s for s in known)
    limits["the CPUs"] = cpus / cpu_per_batch_s if cpu_per_batch_s > 0.0 else math.inf
    limit = min(limits, key=lambda name: limits[name])
    rate = limits[limit]
    exact = {s.name: min(fits[s.name].workers_for(rate), useful[s.name]) for s in known}
    workers = {s.name: max(s.low, math.ceil(exact[s.name] - 1e-6)) for s in known}
    _add_slack(workers, exact, useful, fits, cpus)
    allocation = workers | _buffers(workers, fits, stages)
    return Plan(allocation, min(rate, predict(fits, stages, allocation, cpus, demand)), limit)


def predict(
    fits: Mapping[str, StageFit], stages: Sequence[Stage], allocation: Mapping[str, int], cpus: float, demand: float
) -> float:
    """Return the batches per second the model expects of `allocation`, never more than the model's demand takes.

    Where work is irregular, a stage among others gives less than its capacity: it is at times starved and at times
    blocked by its neighbours (a stage with 1.005 x the workers it needed on 32 emulated CPUs: .87 of the rate).
    """
    windows = {s.window_of: allocation.get(s.name, s.current) for s in stages if s.window_of is not None}
    known = [s for s in stages if s.name in fits]
    rates = [fits[s.name].capacity(allocation.get(s.name, s.current), windows.get(s.name)) for s in known]
    if len(known) > 1:
        bursts = 1.0 + BURSTS * min(1.0, max(fits[s.name].cv for s in known))
        rates = [rate / bursts for rate in rates]
    cpu_per_batch_s = sum(fits[s.name].cpu_per_batch_s for s in known)
    if cpu_per_batch_s > 0.0:
        rates.append(cpus / cpu_per_batch_s)
    return min([*rates, demand * DEMAND_MARGIN])


def over_budget(fits: Mapping[str, StageFit], stages: Sequence[Stage], cpus: float) -> bool:
    """Return True when the workers, all busy, would occupy more CPUs than `busy_limit` grants."""
    known = [s for s in stages if s.name in fits and s.current > s.low]
    busy = sum(s.current * fits[s.name].cpu_share for s in stages if s.name in fits)
    return bool(known) and busy > busy_limit(cpus, len(fits))


def _reach(stage: Stage) -> int:
    """The most workers a single plan asks for: what only waits has no CPU bound, so do not extrapolate blindly."""
    return min(stage.high, max(16, 4 * stage.current))


def _add_slack(
    workers: Allocation, exact: Mapping[str, float], useful: Allocation, fits: Mapping[str, StageFit], cpus: float
) -> None:
    """Where work is irregular give all stages some workers more, tightest stage first, within `busy_limit`.

    One irregular stage is enough for all: what it delivers in bursts, its neighbours have to take in bursts.
    """
    slack = 1.0 + IRREGULAR_SLACK * min(1.0, max((fits[name].cv for name in workers), default=0.0))
    wanted = {name: min(useful[name], math.ceil(exact[name] * slack - 1e-6)) for name in workers}
    # Shares are measured: plan with a tenth more, or noise alone would have the guard refuse the last worker.
    share = {name: min(1.0, 1.1 * fits[name].cpu_share) for name in workers}
    room = busy_limit(cpus, len(workers)) - sum(n * share[name] for name, n in workers.items())
    while able := [name for name in workers if workers[name] < wanted[name] and share[name] <= room]:
        tightest = min(able, key=lambda name: workers[name] / exact[name])
        workers[tightest] += 1
        room -= share[tightest]


def _buffers(workers: Allocation, fits: Mapping[str, StageFit], stages: Sequence[Stage]) -> Allocation:
    """Windows in proportion to workers and irregularity, prefetch depths small (2..8 results)."""
    sizes: Allocation = {}
    roughest = max((fit.cv for fit in fits.values()), default=0.0)
    for stage in stages:
        if stage.unit != "items":
            continue
        if stage.window_of in workers:
            size = window_for(workers[stage.window_of], fits[stage.window_of].cv)
        elif stage.window_of is None and stage.kind == "memory":
            size = round(min(8.0, 2.0 + 4.0 * roughest))
        else:
            continue
        sizes[stage.name] = min(max(size, stage.low), stage.high)
    return sizes
