"""Turn monotonic counters into what happened between two decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.types import Observation, PipelineStats, Resources, Stage, StageRates, StageStats

__all__ = ["Window", "rates"]

LENT_WINDOWS = 10
"""Windows whose largest loan counts. A choice: what one of them measured too high is paid back by workers that share a
CPU, and a number that moves with each window would move workers."""
_NOTHING = PipelineStats(at_s=0.0, delivered=0, stages={})
COUNTED = ("items", "busy_s", "busy_s2", "cpu_s", "starved_s", "blocked_s", "held_s")


def rates(before: PipelineStats, after: PipelineStats, stages: Sequence[Stage]) -> dict[str, StageRates]:
    """Return what each worker stage did between two readings of the counters.

    A counter that went down was started anew (a rebuilt pipeline): then `after` alone is what happened.

    Args:
        stages: the pipeline's stages; those without counters (windows, buffers) are left out.

    Returns:
        Stage name -> rates. Every number is finite; a ratio of nothing to nothing is 0.0.
    """
    batches = after.delivered - before.delivered
    if batches < 0:
        batches = after.delivered
    elapsed_s = after.at_s - before.at_s
    return {
        stage.name: _stage_rates(before.stages.get(stage.name), after.stages[stage.name], batches, elapsed_s)
        for stage in stages
        if stage.name in after.stages
    }


def _stage_rates(before: StageStats | None, after: StageStats, batches: int, elapsed_s: float) -> StageRates:
    done, stored = (after, after.queued) if before is None else _difference(before, after)
    service_s = _ratio(done.busy_s, done.items)
    # Population variance: mean of the squares minus the square of the mean; rounding may take it below 0.
    variance = max(_ratio(done.busy_s2, done.items) - service_s * service_s, 0.0)
    worker_s = done.busy_s + done.starved_s + done.blocked_s
    return StageRates(
        items=done.items,
        items_per_batch=_ratio(done.items, batches),
        service_s=service_s,
        service_cpu_s=_ratio(done.cpu_s, done.items),
        service_cv=_ratio(math.sqrt(variance), service_s),
        busy_frac=_ratio(done.busy_s, worker_s),
        starved_frac=_ratio(done.starved_s, worker_s),
        blocked_frac=_ratio(done.blocked_s, worker_s),
        queue_fill=min(_ratio(after.queued, after.capacity), 1.0),
        item_bytes=after.item_bytes,
        worker_bytes=after.worker_bytes,
        stored=stored,
        held_frac=min(_ratio(done.held_s, elapsed_s), 1.0),
    )


def _difference(before: StageStats, after: StageStats) -> tuple[StageStats, int]:
    """Return what was done between two readings, and the results queued since."""
    done: dict[str, Any] = {name: getattr(after, name) - getattr(before, name) for name in COUNTED}
    if min(done.values()) < 0:
        return after, after.queued
    return replace(after, **done), after.queued - before.queued


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


class Window:
    """Remembers the last reading and gives the observation since then.

    All arguments are monotonic totals since the start of the run; the first window starts at zero, or where
    `restart` put it.
    """

    def __init__(self) -> None:
        self._length: tuple[int | None, int | None] = (None, None)
        self._epochs_left: int | None = None
        self._totals = StepTotals()
        self._samples = 0
        self._stats = _NOTHING
        self._exposed_wait_s = 0.0
        self._lent: deque[float] = deque(maxlen=LENT_WINDOWS)

    def expect(self, epoch_batches: int | None, batches: int | None, epochs_left: int | None = None) -> None:
        """Learn how long the run is going to be.

        Args:
            epoch_batches: batches of one epoch; None takes those of the last one.
            batches: of the whole run; None while unknown, then it has so many as the epochs left bring.
            epochs_left: the one that begins included; None where nobody knows.
        """
        self._length, self._epochs_left = (epoch_batches, batches), epochs_left

    def restart(
        self, totals: StepTotals, samples: int, stats: PipelineStats, exposed_wait_s: float | None = None
    ) -> None:
        """Begin the window here: what came before (warm-up, another pipeline) is not judged; arguments as `observe`."""
        self._totals, self._samples, self._stats = totals, samples, stats
        self._exposed_wait_s = exposed_wait_s or 0.0

    def rebase(self, stats: PipelineStats) -> None:
        """Go on with the counters of another pipeline, which begins now; time and samples go on."""
        self._stats = stats

    def observe(
        self,
        totals: StepTotals,
        samples: int,
        stats: PipelineStats,
        stages: Sequence[Stage],
        resources: Resources,
        exposed_wait_s: float | None = None,
    ) -> Observation:
        """Close the window, begin the next one, and return what happened in it.

        Args:
            samples: samples delivered since the start of the run.
            exposed_wait_s: total seconds the GPU idled for want of data; None without a GPU.

        Returns:
            The observation; its `elapsed_s` is wait plus model time, pauses taken out.
        """
        steps, wait_s, model_s, seam_s = _steps_between(self._totals, totals)
        epoch_batches, batches = self._length
        if batches is not None and totals.steps > batches:
            # The length was no end: a sampler that goes on for ever may say one (MMEngine's `InfiniteSampler`).
            epoch_batches = batches = None
        if epoch_batches is not None and totals.epoch_steps <= totals.epoch_batches:
            # Loops that leave their loader early (`islice`, a `break`) do so in each epoch; 0 is no whole one yet.
            epoch_batches = min(epoch_batches, totals.epoch_batches or epoch_batches)
        epoch_batches = epoch_batches or totals.epoch_batches or None
        if batches is None and self._epochs_left is not None and totals.epoch_batches:
            left = self._epochs_left * totals.epoch_batches - totals.epoch_steps
            batches = totals.steps + left if left > 0 else None
        # Each window gets its batches' share of the start of an epoch: else one with a start in it would look slow, and
        # one without too fast.
        share_s = totals.epoch_start_s * steps / epoch_batches if epoch_batches is not None else seam_s
        wait_s = max(wait_s - seam_s, 0.0) + share_s
        elapsed_s = wait_s + model_s
        step_s = _ratio(elapsed_s, steps)
        remaining_s = None if batches is None else max(0, batches - totals.steps) * step_s
        if batches is None and epoch_batches is not None and epoch_batches > totals.epoch_steps:
            # Nobody knows how many epochs: this one goes on to its end, and the run for as long again as it has lasted.
            remaining_s = max((epoch_batches - totals.epoch_steps) * step_s, totals.wall_s)
        new_samples = samples - self._samples if samples >= self._samples else samples
        stage_rates: Mapping[str, StageRates] = rates(self._stats, stats, stages)
        exposed_frac = None
        if exposed_wait_s is not None:
            exposed_s = exposed_wait_s - self._exposed_wait_s
            exposed_frac = min(_ratio(exposed_s if exposed_s >= 0 else exposed_wait_s, elapsed_s), 1.0)
        self.restart(totals, samples, stats, exposed_wait_s)
        self._lent.append(_lent_cpus(stage_rates.values(), steps, model_s, resources))
        return Observation(
            step=totals.steps,
            at_s=stats.at_s,
            elapsed_s=elapsed_s,
            batches=steps,
            samples=new_samples,
            batches_per_s=_ratio(steps, elapsed_s),
            samples_per_s=_ratio(new_samples, elapsed_s),
            wait_frac=_ratio(wait_s, elapsed_s),
            model_s=_ratio(model_s, steps),
            stages=tuple(stages),
            rates=stage_rates,
            resources=resources,
            latency_s=_ratio(wait_s, steps),
            exposed_wait_frac=exposed_frac,
            seam_s=share_s,
            epoch_batches=epoch_batches,
            remaining_s=remaining_s,
            lent_cpus=min(max(self._lent), resources.trainer_cpus),
        )


def _lent_cpus(rates: Iterable[StageRates], steps: int, model_s: float, resources: Resources) -> float:
    """Return how many CPUs of the training loop are free at the pace that all CPUs together allow.

    A batch takes `work_s` CPU seconds of the input and at most `trained_s` of the loop, so `pace` is their largest.
    """
    trained_s = resources.trainer_cpus * _ratio(model_s, steps)
    work_s = _ratio(sum(r.items * r.service_cpu_s for r in rates), steps)
    if not (trained_s > 0.0 and work_s < math.inf):
        return 0.0
    pace = (resources.cpus + resources.trainer_cpus) / (work_s + trained_s)
    return max(0.0, resources.trainer_cpus - pace * trained_s)


def _steps_between(before: StepTotals, after: StepTotals) -> tuple[int, float, float, float]:
    if after.wall_s < before.wall_s or after.steps < before.steps:  # another timer
        before = StepTotals()
    return (
        after.steps - before.steps,
        after.wait_s - before.wait_s,
        after.model_s - before.model_s,
        after.seam_s - before.seam_s,
    )
