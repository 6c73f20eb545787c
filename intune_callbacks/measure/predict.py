"""How long a batch would take with other numbers, from what was measured with the present ones; and the best numbers.

Everything here errs on the careful side. What the workers of the limiting stage do not explain of its time is taken to
stay, whatever their number; each further worker hinders the others a little; CPUs and the model are limits; of a
computed gain 70 % are promised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from intune_callbacks.measure.measured import Measured
from intune_callbacks.types import Allocation, Stage

__all__ = [
    "LEAST_GAIN",
    "OWN_PROCESSES",
    "WAITS",
    "Advice",
    "advise",
    "is_started_anew",
    "limiting",
    "promised",
    "step_s",
]

LEAST_GAIN = 1.05
"""A smaller factor is neither promised nor advised. A choice: windows differ by about as much."""
PROMISED = 0.7
"""Part of a computed gain that is promised. A choice: on pipelines with formulas of their own pasted advice has to
bring half of its promise at least (`tests/test_monitor_cause.py`)."""
WAITS = 0.05
"""Below this share of data wait the training gets what it can take: 5 % is the most that more input could bring."""
SERIAL = 0.03
"""Share of an item that only one worker can do at a time, as long as nothing else was measured. A choice on the careful
side: 32 workers are taken to do the work of 17."""
IRREGULAR = 0.65
"""What several workers lose to items of irregular length, which those behind them have to wait for, for each unit of
their variation. 32 ordered workers with a window as wide and a variation of 0.8 reach 65 % of what they could."""
HANDOFF_S, STARTUP_S = 0.001, 0.1
"""Seconds a batch costs the training loop when a worker made it, and a worker takes to start. A choice on the careful
side: half of the first in docs/adr/0015-a-net-under-every-policy.md, a tenth of the second for a fork."""
PROCESSES_PER_CPU, FEWEST_PROCESSES = 4, 8
"""Most workers that are processes, for each CPU and in all: more overlap more waits, but each has its memory and its
start. A choice."""
GROWTH = 256
"""Most workers that are added in a prediction: as many threads as any adapter allows."""
NEARLY = 1.03
"""Factor on the best predicted time within which fewer workers are preferred. A choice: a prediction is no better."""
MEMORY_FRAC = 0.8
"""Share of the memory limit advice may fill. A choice below the guard's, for nobody watches what was pasted."""
OWN_PROCESSES = "DataLoader("
"""How the knob of a stage begins whose workers are processes of PyTorch."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What the user would do better to write.

    Args:
        allocation: stage name -> value, for those that change; a window grows with its workers.
        persistent: stages whose workers had better live on from one epoch to the next.
        gain: the promised factor on the throughput; 1.0 where nothing is to be changed.
    """

    allocation: Allocation = field(default_factory=dict)
    persistent: tuple[str, ...] = ()
    gain: float = 1.0


def advise(
    seen: Measured,
    most: Mapping[str, int] | None = None,
    *,
    cpus: float | None = None,
    share: float = 1.0,
    may_persist: bool = True,
    changes: bool = False,
) -> Advice:
    """Return the smallest numbers that come within 3 % of the best predicted ones, never below the present ones.

    Args:
        most: stage name -> what it may have at most, where its own limit says too little: files, shards.
        cpus: as if there were so many; by default what there is.
        share: of the run's wall time the part that was measured; the rest stays as it is.
        may_persist: whether workers may live on from one epoch to the next.
        changes: whether the dataset changes between epochs, so that not even the first workers of a stage may.
    """
    now = {stage.name: stage.current for stage in seen.workers}
    may_live_on = may_persist and not changes
    persistent = tuple(stage.name for stage in seen.workers if may_live_on and is_started_anew(stage))
    tried = [dict(now)]
    for _ in range(GROWTH):
        grown = _grown(seen, tried[-1], most or {}, cpus)
        if grown is None:
            break
        tried.append(grown)
    begun = [() if changes else _begun(seen, one) for one in tried]
    times_s = [
        step_s(seen, one, cpus=cpus, persistent=(*persistent, *first)) for one, first in zip(tried, begun, strict=True)
    ]
    chosen = next(one for one, time_s in zip(tried, times_s, strict=True) if time_s <= NEARLY * min(times_s))
    first = begun[tried.index(chosen)]
    if step_s(seen, chosen, cpus=cpus, persistent=first) <= NEARLY * min(times_s):
        persistent = ()
    persistent = (*persistent, *first)
    gain = promised(step_s(seen) / step_s(seen, chosen, cpus=cpus, persistent=persistent), share)
    if gain < LEAST_GAIN:
        return Advice()
    return Advice(_with_windows(seen, {name: n for name, n in chosen.items() if n != now[name]}), persistent, gain)


def promised(gain: float, share: float = 1.0) -> float:
    """Return what may be promised of a computed factor.

    Args:
        share: of the run's wall time the part it acts on.
    """
    careful = 1.0 + PROMISED * (max(gain, 1.0) - 1.0)
    return 1.0 / (1.0 - share + share / careful)


def limiting(seen: Measured) -> Stage | None:
    """Return the worker stage that takes longest for a batch; the verdict's where it names one."""
    if seen.stage is not None:
        return next((stage for stage in seen.workers if stage.name == seen.stage), None)
    able = [stage for stage in seen.workers if _raw_s(seen, stage) > 0.0]
    return max(able, key=lambda stage: _raw_s(seen, stage), default=None)


def step_s(
    seen: Measured,
    allocation: Mapping[str, int] | None = None,
    *,
    cpus: float | None = None,
    persistent: Collection[str] = (),
) -> float:
    """Return the predicted seconds of a batch, starts of epochs included.

    Args:
        allocation: stage name -> workers; stages left out stay as they are.
        cpus: as if there were so many.
        persistent: stages whose workers live on from one epoch to the next.
    """
    now = {stage.name: stage.current for stage in seen.workers}
    then = now | dict(allocation or {})
    wait_s = seen.period_s - seen.model_s
    model_s = seen.model_s
    if any(n == 0 for n in now.values()):
        # Computed in the training loop: one after the other as it is, at the same time with workers.
        if any(n == 0 for n in then.values()):
            return seen.period_s + seen.seam_s
        model_s += HANDOFF_S
    elif wait_s < WAITS * seen.period_s:
        return seen.period_s + _seam_s(seen, then, persistent)
    if limiting(seen) is None:  # for what it waits is not known: it goes on waiting
        return seen.period_s + _seam_s(seen, then, persistent)
    needed = _needed_s(seen, then, cpus)
    return max(model_s, *needed.values()) + _seam_s(seen, then, persistent)


def _needed_s(seen: Measured, then: Mapping[str, int], cpus: float | None) -> dict[str, float]:
    """Seconds of a batch that each stage, and under an empty name the CPUs, would need."""
    limit, needed = limiting(seen), {}
    for stage in seen.workers:
        raw_s, cv = _raw_s(seen, stage), seen.rates[stage.name].service_cv if stage.name in seen.rates else 0.0
        if stage == limit:
            now_s, stays_s = raw_s, seen.period_s - raw_s if stage.current else 0.0
        else:
            now_s, stays_s = min(seen.period_s, raw_s * max(1, stage.current) / _useful(stage.current, cv)), 0.0
        needed[stage.name] = stays_s + now_s * _useful(stage.current, cv) / _useful(then[stage.name], cv)
    had = seen.cpus_had
    if needed and had > 0.0:
        needed[""] = min(seen.period_s * had, seen.cpu_s) / (seen.cpus_for(then) if cpus is None else cpus)
    return needed


def _useful(workers: int, cv: float) -> float:
    """How many workers on regular items, that never hinder each other, do the same."""
    if workers <= 1:
        return 1.0
    return workers / (1.0 + SERIAL * (workers - 1)) / (1.0 + IRREGULAR * cv)


def _raw_s(seen: Measured, stage: Stage) -> float:
    """Seconds of a batch that the stage's workers explain; no more than it takes."""
    if stage.current == 0:
        return seen.period_s - seen.model_s
    rate = seen.rates.get(stage.name)
    return 0.0 if rate is None else min(seen.period_s, rate.items_per_batch * rate.service_s / stage.current)


def _seam_s(seen: Measured, then: Mapping[str, int], persistent: Collection[str]) -> float:
    """Seconds at the start of an epoch, for each of its batches; what starts once in a run is spread over all of it."""
    starts = {stage.name: stage.startup_s * stage.current for stage in seen.workers}
    total_s = sum(starts.values())
    now_s = min(seen.seam_s, total_s / seen.epoch_batches if seen.epoch_batches else seen.seam_s) if total_s else 0.0
    seam_s = seen.seam_s - now_s
    for stage in seen.workers:
        if stage.current == 0:
            # Once, and then they live on; the run is at least as long as what was measured.
            seam_s += STARTUP_S * then[stage.name] / max(seen.batches, seen.epoch_batches or 1)
        elif stage.startup_s and stage.name not in persistent:
            seam_s += now_s * starts[stage.name] / total_s * then[stage.name] / stage.current
        elif seen.run_batches:
            # What those that live on now have taken is in what was measured.
            once_s = stage.startup_s * then[stage.name] + stage.once_s * (then[stage.name] - stage.current)
            seam_s += once_s / seen.run_batches
    return seam_s


def _grown(seen: Measured, at: Allocation, most: Mapping[str, int], cpus: float | None) -> Allocation | None:
    """One worker more where it is needed most; None where that brings nothing or is not there to be had."""
    needed = _needed_s(seen, at, cpus)
    floor_s = max(seen.model_s, needed.pop("", 0.0))
    slowest = max(needed, key=lambda name: needed[name], default="")
    if not slowest or seen.period_s - seen.model_s < WAITS * seen.period_s:
        return None
    if needed[slowest] <= floor_s and at[slowest]:
        return None
    stage = next(stage for stage in seen.workers if stage.name == slowest)
    grown = at | {slowest: at[slowest] + 1}
    had = seen.cpus_for(grown) if cpus is None else cpus
    if grown[slowest] > _highest(seen, stage, most, had) or not _has_room(seen, grown):
        return None
    return grown


def _with_windows(seen: Measured, allocation: Allocation) -> Allocation:
    """As many results per worker as there are now, in each window that belongs to workers that change."""
    wide = dict(allocation)
    for stage in seen.stages:
        owner = next((one for one in seen.workers if one.name == stage.window_of), None)
        if owner is not None and owner.name in allocation:
            wanted = math.ceil(stage.current * allocation[owner.name] / max(1, owner.current))
            wide[stage.name] = max(stage.current, min(stage.high, wanted))
    return wide


def _highest(seen: Measured, stage: Stage, most: Mapping[str, int], cpus: float) -> int:
    rate = seen.rates.get(stage.name)
    highest = min(stage.high, most.get(stage.name, stage.high))
    if rate is not None and rate.service_s > 0.0:
        # What is not known to wait is taken to compute.
        highest = min(highest, round(cpus * rate.service_s / (rate.service_cpu_s or rate.service_s)))
    if rate is not None and seen.epoch_batches and rate.items_per_batch > 0.0:  # an epoch has no more for them
        highest = min(highest, math.ceil(seen.epoch_batches * rate.items_per_batch))
    if stage.knob.startswith(OWN_PROCESSES) or (rate is not None and rate.worker_bytes):
        highest = min(highest, max(FEWEST_PROCESSES, round(PROCESSES_PER_CPU * cpus)))
    return max(highest, stage.current)


def _has_room(seen: Measured, then: Mapping[str, int]) -> bool:
    extra = 0.0
    for stage in seen.workers:
        rate = seen.rates.get(stage.name)
        if rate is not None:
            # Two results in progress or finished for each worker.
            extra += (then[stage.name] - stage.current) * (rate.worker_bytes + 2.0 * rate.item_bytes)
    free_bytes = MEMORY_FRAC * seen.memory_limit_bytes - seen.memory_used_bytes
    return not extra or not seen.memory_limit_bytes or extra <= free_bytes


def is_started_anew(stage: Stage) -> bool:
    """Return whether a stage has worker processes of PyTorch's that each epoch starts."""
    return stage.startup_s > 0.0 and stage.current > 0 and stage.knob.startswith(OWN_PROCESSES)


def _begun(seen: Measured, then: Mapping[str, int]) -> tuple[str, ...]:
    """The stages that get their first workers: written with `persistent_workers`."""
    return tuple(s.name for s in seen.workers if not s.current and then[s.name] and s.knob.startswith(OWN_PROCESSES))
