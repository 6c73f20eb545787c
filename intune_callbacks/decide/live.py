"""One live pipeline as the agent looks at it: an `Observation` becomes a `View` of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from intune_callbacks.decide.view import View
from intune_callbacks.measure.counts import Counts
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.types import Observation, Stage, StageRates

__all__ = ["awake", "slots_of", "view_of"]

LEAST_NOISE = 0.05
"""Least relative error of a window until its own spread is known. A choice: that of some ten batches in a second."""
CROWDED = 0.95
"""Share of the CPUs in use from which on they may be what stages wait for. A choice: clocks differ by a few percent."""
MOST_WHOLE = 2
"""Larger ratios of items and batches are used as counted: there one more or less in a window makes no difference."""
LARGEST = 1e9
"""No unit, rate or time of a real pipeline is larger."""
_NO_RATES = StageRates(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_OF_SLOT = (
    "value", "low", "high", "weight", "work_s", "cpu_share", "cv", "work_noise", "busy", "fill", "window",
    "unit_memory", "item_memory",
)  # fmt: skip
_OF_PIPELINE = ("rate", "demand", "cpus", "budget", "memory", "noise")


def awake(observation: Observation) -> Observation:
    """Return the observation with one worker where there is none: one that computes inside the training loop.

    Policies know stages of one worker and more; that no worker at all may be better is not theirs to find.
    """
    stages = tuple(
        s if s.kind == "memory" or s.low > 0 else replace(s, low=1, high=max(1, s.high), current=max(1, s.current))
        for s in observation.stages
    )
    return replace(observation, stages=stages)


def slots_of(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages that are slots: worker stages and free-standing buffers; windows go with their workers."""
    return [s for s in stages if s.kind != "memory" or (s.window_of is None and s.unit == "items")]


def view_of(
    observation: Observation,
    weight: Mapping[str, float],
    counts: Mapping[str, Counts],
    demand: float,
    expected_s: Mapping[str, float],
) -> View:
    """Return one live pipeline as a `View` of one row.

    Args:
        weight: worker stage -> CPUs one busy worker takes.
        counts: worker stage -> items per batch and irregularity over more than this one window.
        demand: batches per second the model would take if data were always there.
        expected_s: worker stage -> worker seconds per batch known from windows in which CPUs were free.
    """
    slots, rates, resources = slots_of(observation.stages), observation.rates, observation.resources
    windows = {s.window_of: s.current for s in observation.stages if s.window_of is not None}
    limit = float(max(1, resources.memory_limit_bytes))
    largest = max([r.item_bytes for r in rates.values()], default=0.0)
    # A buffer nobody measures is taken to be as full as the window before it.
    fullest = max([r.queue_fill for r in rates.values()], default=0.0)
    slowdown = _slowdown(observation)
    mask, buffer = [], []
    by_slot: list[float] = []
    for s in slots:
        r, known, is_buffer = rates.get(s.name, _NO_RATES), counts.get(s.name), s.kind == "memory"
        work_s = 0.0
        if known is not None and r is not _NO_RATES:
            each = _whole(known.items_per_batch)
            work_s = each * r.service_s
            if slowdown is not None:
                # Where all CPUs are in use part of the time is waiting for one: the own cost lies between the bounds.
                least_s = each * max(r.service_cpu_s, r.service_s - (slowdown - 1.0) * r.service_cpu_s)
                work_s = min(max(expected_s.get(s.name, least_s), least_s), work_s)
        mask.append(is_buffer or work_s > 0.0)
        buffer.append(is_buffer)
        by_slot += (
            s.current,
            s.low,
            s.high,
            0.0 if is_buffer else weight.get(s.name, 1.0),
            work_s,
            1.0 if r.service_s <= 0 else min(1.0, r.service_cpu_s / r.service_s),
            0.0 if known is None else known.cv,
            0.0 if known is None else known.cv / max(1, r.items) ** 0.5,
            r.busy_frac,
            fullest if r is _NO_RATES else r.queue_fill,
            windows.get(s.name, 0.0),
            largest if is_buffer else r.worker_bytes,
            r.item_bytes,
        )
    is_worker = [there and not free for there, free in zip(mask, buffer, strict=True)]
    whole = [
        observation.batches_per_s,
        demand,
        resources.cpus + resources.remote_cpus,
        _budget(observation.cpus, [(s.current, weight.get(s.name, 1.0)) for s in compress(slots, is_worker)]),
        resources.memory_used_bytes / limit,
        max(LEAST_NOISE, *[r.service_cv / max(1, r.items) ** 0.5 for r in rates.values()]),
    ]
    numbers = np.array(_finite(by_slot)).reshape(1, len(slots), len(_OF_SLOT))
    numbers[..., -2:] /= limit
    return View(
        mask=np.array([mask], bool),
        is_buffer=np.array([buffer], bool),
        **{name: numbers[..., i] for i, name in enumerate(_OF_SLOT)},
        **{name: np.array([number]) for name, number in zip(_OF_PIPELINE, _finite(whole), strict=True)},
        alive=np.ones(1, bool),
    )


def _budget(cpus: float, workers: Sequence[tuple[int, float]]) -> float:
    """Return how many CPUs busy workers may occupy: `busy_limit`, with less to round up where a worker takes less.

    More is only what is in use already: the training loop needs the CPUs a stage of workers that mostly wait does not.

    Args:
        workers: number, and CPUs each takes, by stage.
    """
    most = busy_limit(cpus, len(workers))
    least = most - sum(1.0 - each for _, each in workers)
    return min(most, max(least, sum(number * each for number, each in workers)))


def _whole(items_per_batch: float) -> float:
    """Return the whole number of items per batch, or of batches per item, that is within a fifth of what was counted.

    Counts of a short window are off by what buffers took or gave.
    """
    if items_per_batch <= 0.0:
        return items_per_batch
    large = max(items_per_batch, 1.0 / items_per_batch)
    whole = round(large)
    if whole > MOST_WHOLE or abs(large / whole - 1.0) > 0.2:
        return items_per_batch
    return float(whole) if items_per_batch >= 1.0 else 1.0 / whole


def _finite(values: Sequence[float]) -> list[float]:
    """Return numbers the agent can compute with, whatever a broken counter or clock gave."""
    return [float(x) if 0.0 <= x <= LARGEST else LARGEST if x > LARGEST else 0.0 for x in values]


def _slowdown(observation: Observation) -> float | None:
    """Return how many times slower CPU work ran for lack of CPUs; None where not (nearly) all CPUs were in use.

    When every CPU is busy all stages are slowed by the same factor. Two things bound it: busy workers per CPU, and the
    smallest wall / CPU ratio of a stage (the one that waits least for anything else).
    """
    rates, cpu_s = observation.rates.values(), observation.elapsed_s * observation.cpus
    worked = [r for r in rates if r.items and r.service_cpu_s > 0.0]
    if not worked or cpu_s <= 0.0 or sum(r.items * r.service_cpu_s for r in worked) < CROWDED * cpu_s:
        return None
    busy_per_cpu = sum(r.items * r.service_s for r in rates) / cpu_s
    return max(1.0, min(busy_per_cpu, *(r.service_s / r.service_cpu_s for r in worked)))
