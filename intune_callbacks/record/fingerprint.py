"""What has to be the same in two runs for what one found to be worth starting the other from."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from intune_callbacks.types import Resources

__all__ = ["differences", "fingerprint", "versions"]

OF_STAGE = ("kind", "unit", "sequential", "window_of")
SAME_CPUS, SAME_MEMORY = 0.01, 0.1
"""Machines count as the same where CPUs and memory limit differ by no more than this share. A choice: quotas are
rounded, and what the system keeps of the memory varies."""
GB = 1e9
PACKAGES = ("numpy", "torch", "pytorch_lightning", "lightning", "torchdata", "tensorflow", "keras", "jax")


def fingerprint(
    stages: Iterable[Mapping[str, Any]],
    *,
    batch_size: int,
    machine: Resources,
    policy: str,
    ranks: int,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return what has to be the same for an allocation to be worth starting from, in plain JSON types.

    Args:
        stages: the fields of each `Stage`.
        machine: whose CPUs and memory limit count.
        ranks: how many train together.
        versions: library -> version; the first two numbers count.
    """
    return {
        "batch_size": batch_size,
        "cpus": machine.cpus,
        "memory_limit_bytes": machine.memory_limit_bytes,
        "policy": policy,
        "ranks": ranks,
        "versions": {name: ".".join(text.split(".")[:2]) for name, text in versions.items()},
        "stages": {stage["name"]: {key: stage[key] for key in OF_STAGE} for stage in stages},
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one phrase for each item in which two fingerprints differ, with both values; empty if they fit.

    Args:
        then: of the run that was saved.
        now: of this run. A library that only one of both had imported is no difference.
    """
    found: list[str] = []
    before, after = then["stages"], now["stages"]
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in after or name not in before:
            found.append(f"stage {name!r} only {'there' if name in before else 'here'}")
            continue
        for key in OF_STAGE:
            if before[name][key] != after[name][key]:
                found.append(f"{key} of stage {name!r}: {before[name][key]} there, {after[name][key]} here")
    if then["batch_size"] != now["batch_size"]:
        found.append(f"batch size: {then['batch_size']} there, {now['batch_size']} here")
    if _apart(then["cpus"], now["cpus"], SAME_CPUS):
        found.append(f"CPUs: {then['cpus']:.4g} there, {now['cpus']:.4g} here")
    limits = then["memory_limit_bytes"], now["memory_limit_bytes"]
    if _apart(*limits, SAME_MEMORY):
        found.append(f"memory limit: {limits[0] / GB:.4g} GB there, {limits[1] / GB:.4g} GB here")
    for library in then["versions"]:
        versions = then["versions"][library], now["versions"].get(library)
        if versions[1] is not None and versions[0] != versions[1]:
            found.append(f"{library}: {versions[0]} there, {versions[1]} here")
    for key in ("policy", "ranks"):
        if then[key] != now[key]:
            found.append(f"{key}: {then[key]} there, {now[key]} here")
    return found


def _apart(then: float, now: float, share: float) -> bool:
    return abs(then - now) > share * max(abs(then), abs(now))


def versions() -> dict[str, str]:
    """Versions of what is in use; a framework nobody imported is not imported for that."""
    found = {"python": platform.python_version()}
    found["intune_callbacks"] = str(sys.modules["intune_callbacks"].__dict__["__version__"])
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found
