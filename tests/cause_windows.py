"""Windows of measurements made by hand, for the causes to be found in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import GB

from intune_callbacks.measure.measured import Measured, measured
from intune_callbacks.types import Observation, Resources, Stage, StageRates

LOADER, ITERABLE = (
    "DataLoader(num_workers={})",
    "DataLoader(num_workers={})  # was 2; the samples' order follows the workers",
)
MAP, INTERLEAVE = ".map(decode, num_parallel_calls={})", ".interleave(..., num_parallel_calls={})"


def rate(service_s: float, cpu_s: float, busy: float = 0.99, items: float = 1.0, **more: float) -> StageRates:
    starved, blocked = more.pop("starved", 1.0 - busy), more.pop("blocked", 0.0)
    return StageRates(50, items, service_s, cpu_s, 0.1, busy, starved, blocked, 0.1, 1e5, more.pop("worker_bytes", 0.0))


def stage(name: str, current: int, high: int = 64, **more: Any) -> Stage:
    return Stage(name, more.pop("kind", "cpu"), "workers", 1, high, current, **more)


def window(
    *stages: tuple[Stage, StageRates],
    period_s: float = 0.010,
    wait: float = 0.9,
    cpus: float = 8.0,
    seam_s: float = 0.0,
    epoch: int | None = 100,
    memory: tuple[int, int] = (64 * GB, 1 * GB),
    idle: float | None = None,
) -> Measured:
    """What ten windows of ten batches of 32 had in common; `seam_s` is of all the windows together."""
    running_s = 10 * period_s
    seen = Observation(
        *(100, 100.0, running_s + seam_s / 10, 10, 320, 0.0, 0.0, 0.0, (1 - wait) * period_s),
        stages=tuple(s for s, _ in stages),
        rates={s.name: r for s, r in stages},
        resources=Resources(cpus, *memory, cpus_idle=idle),
        seam_s=seam_s / 10,
        epoch_batches=epoch,
    )
    seen = replace(seen, wait_frac=(wait * running_s + seen.seam_s) / seen.elapsed_s)
    found = measured([seen] * 10)
    assert found is not None
    assert (found.period_s, found.wait_frac) == (pytest.approx(period_s), pytest.approx(wait))
    return found
