"""What callbacks log; the keys are listed in `InTuneCallback`."""

from __future__ import annotations

from collections.abc import Sequence

from intune_callbacks.decide.reward import worth
from intune_callbacks.types import Observation, Stage

__all__ = ["metrics", "stage_metrics"]


def metrics(seen: Observation) -> dict[str, float]:
    """Return what is logged at a decision."""
    resources = seen.resources
    cpu_shares = {name: rates.service_cpu_s / (rates.service_s or 1.0) for name, rates in seen.rates.items()}
    logged = {
        "intune/throughput_samples_per_s": seen.samples_per_s,
        "intune/wait_frac": seen.wait_frac,
        "intune/rss_frac": resources.memory_used_bytes / max(1, resources.memory_limit_bytes),
        "intune/reward": worth(seen.batches_per_s, seen.stages, cpu_shares, resources),
    }
    if seen.exposed_wait_frac is not None:
        logged["intune/exposed_wait_frac"] = seen.exposed_wait_frac
    logged |= stage_metrics(seen.stages)
    for name, rates in seen.rates.items():
        logged[f"intune/queue_fill/{name}"] = rates.queue_fill
    return logged


def stage_metrics(stages: Sequence[Stage]) -> dict[str, float]:
    """Return what is logged of the stages' values."""
    logged = {}
    for stage in stages:
        kind = "workers" if stage.unit == "workers" else "window"
        logged[f"intune/{kind}/{stage.window_of or stage.name}"] = float(stage.current)
        if stage.delivering is not None:
            logged[f"intune/delivering/{stage.name}"] = float(stage.delivering)
    return logged
