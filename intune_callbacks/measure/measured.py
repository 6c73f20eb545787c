"""Several windows as one: the medians that a cause and an advice are computed from, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from intune_callbacks.measure.verdict import settle
from intune_callbacks.types import Observation, Stage, StageRates

__all__ = ["LONG_WAIT_S", "READS", "Measured", "measured"]

LEAST_NOISE = 0.02
"""The least standard error of a median, as a share of it. A choice: two windows may agree by chance."""
READS = 0.1
"""An item that computes for less than this share of its time waits for reads, however crowded the CPUs are. A choice:
with ten times as many busy threads as CPUs each still gets its tenth."""
LONG_WAIT_S = 0.02
"""What waits so long waits for more than a CPU that others have. A choice: twice the turn of a thread."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What some windows of one allocation have in common.

    Starts of epochs are taken out of everything but `seam_s`. Where a GPU's idle time is known, it is the wait.

    Args:
        batches: of all windows.
        period_s: seconds from one batch to the next.
        model_s: seconds of a batch that are not wait.
        seam_s: seconds at the start of an epoch, spread over its batches.
        samples: samples of a batch.
        epoch_batches: batches of an epoch; None while unknown or without end.
        noise: standard error of the throughput, as a share of it.
        verdict: the word for these windows.
        stage: the worker stage that limits; None when unknown or when the input is not the bottleneck.
        cpus: CPUs the input pipeline may use.
        cpus_idle: CPUs nobody used; None where that is not known.
        memory_limit_bytes: of the container or machine.
        memory_used_bytes: at the end of the last window.
        stages: as in the last window.
        rates: worker stage -> the medians of its rates.
        unevenly: share of the time waited, where that is far more than in most windows; else 0.
        run_batches: of the whole run, which has to earn back what is started once in it; 0 while unknown.
    """

    batches: int
    period_s: float
    model_s: float
    seam_s: float
    samples: float
    epoch_batches: int | None
    noise: float
    verdict: str
    stage: str | None
    cpus: float
    cpus_idle: float | None
    memory_limit_bytes: int
    memory_used_bytes: int
    stages: tuple[Stage, ...]
    rates: Mapping[str, StageRates]
    unevenly: float = 0.0
    run_batches: int = 0

    @property
    def wait_frac(self) -> float:
        """Share of the time the training waits while it runs, 0..1."""
        return 1.0 - self.model_s / self.period_s

    @property
    def workers(self) -> tuple[Stage, ...]:
        """The stages that hold workers, in pipeline order."""
        return tuple(stage for stage in self.stages if stage.kind != "memory")

    @property
    def cpu_s(self) -> float:
        """CPU seconds the input takes for a batch."""
        return sum(r.items_per_batch * r.service_cpu_s for r in self.rates.values())

    @property
    def cpus_busy(self) -> float:
        """CPUs the input pipeline has in use on average; what is made while an epoch begins does not make it more."""
        return max(min(self.cpu_s / self.period_s, self.cpus), self.cpu_s / (self.period_s + self.seam_s))

    @property
    def cpus_had(self) -> float:
        """CPUs the input pipeline can have: what it may use, without what others on the machine use."""
        return self.cpus_for({stage.name: stage.current for stage in self.workers})

    def cpus_for(self, workers: Mapping[str, int]) -> float:
        """Return the CPUs that so many workers can have: what is idle too, or their share of what is not."""
        if self.cpus_idle is None:
            return self.cpus
        known = {name: self.rates[name] for name in workers if name in self.rates}
        waiting = sum(workers[name] for name, r in known.items() if r.service_s - r.service_cpu_s > LONG_WAIT_S)
        return min(self.cpus, max(self.cpus_busy + self.cpus_idle, READS * waiting))


def measured(observations: Sequence[Observation], waited: float | None = None) -> Measured | None:
    """Return what windows of one allocation have in common, None where nothing ran; arguments as for `settle`."""
    ran = [o for o in observations if o.batches > 0 and o.elapsed_s > o.seam_s]
    if not ran:
        return None
    last, judged = ran[-1], settle(ran, waited)
    idle = [o.resources.cpus_idle for o in ran if o.resources.cpus_idle is not None]
    on_gpu = all(o.exposed_wait_frac is not None for o in ran)
    periods_s = [(o.elapsed_s - o.seam_s) / o.batches for o in ran]
    period_s = median(periods_s)
    batches = sum(o.batches for o in ran)
    return Measured(
        batches=batches,
        period_s=period_s,
        model_s=period_s * (1.0 - median(_wait_frac(o, on_gpu) for o in ran)),
        seam_s=sum(o.seam_s for o in ran) / batches,
        samples=sum(o.samples for o in ran) / batches,
        epoch_batches=last.epoch_batches,
        noise=_noise(periods_s),
        verdict=judged.kind,
        stage=judged.stage,
        cpus=_finite(last.cpus),
        cpus_idle=median(idle) if idle else None,
        memory_limit_bytes=last.resources.memory_limit_bytes,
        memory_used_bytes=last.resources.memory_used_bytes,
        stages=last.stages,
        rates={name: _middle([o.rates[name] for o in ran if name in o.rates]) for name in last.rates},
        unevenly=judged.unevenly,
    )


def _wait_frac(seen: Observation, on_gpu: bool) -> float:
    """The share of a window's time, without starts of epochs, in which the model had nothing to do."""
    share = seen.exposed_wait_frac if on_gpu and seen.exposed_wait_frac is not None else seen.wait_frac
    waited_s = share * seen.elapsed_s - seen.seam_s
    return min(max(_finite(waited_s) / (seen.elapsed_s - seen.seam_s), 0.0), 0.999)


def _middle(found: Sequence[StageRates]) -> StageRates:
    values: dict[str, Any] = {
        field.name: median(_finite(getattr(rate, field.name)) for rate in found) for field in fields(StageRates)
    }
    return StageRates(**{**values, "items": round(values["items"])})


def _noise(periods_s: Sequence[float]) -> float:
    """Of the median of so many windows; a single one is known to a tenth."""
    if len(periods_s) < 2:
        return 0.1
    middle = median(periods_s)
    deviation = 1.4826 * median(abs(period_s - middle) for period_s in periods_s)
    return max(LEAST_NOISE, 1.25 * deviation / middle / math.sqrt(len(periods_s)))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
