"""Large batches in a memory cgroup: how many runs of each system are killed, and how fast the others are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks import memory_tfdata
from benchmarks.memory_tfdata import SYSTEMS
from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import bars, grouped, spread

__all__ = ["TITLE", "draw", "rows", "tasks"]

TITLE = "Memory: killed runs in a cgroup of 4 GiB, and throughput of the others, of what such memory allows"
CPUS, BATCHES_MB, RUNS_PER_SEED = 32, (8, 16, 32, 64, 128), 4
TIMES_S = (30.0, 15.0)


def tasks(options: Options) -> list[Task]:
    """Return some runs for each system, batch size and seed: with three seeds and five sizes 60 of a system."""
    sizes, count, times = ((64,), 1, (4.0, 4.0)) if options.quick else (BATCHES_MB, RUNS_PER_SEED, TIMES_S)
    return [
        Task(
            {"system": system, "batch_mb": size, "seed": seed, "run": run},
            memory_tfdata.measure,
            (system, CPUS, size, times, 1000 * seed + run),
            alone=True,
        )
        for seed, run, size, system in product(options.seeds, range(count), sizes, SYSTEMS)
    ]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for each system and batch size, and one for all sizes."""
    groups = [*grouped(runs, "system", "batch_mb").items()]
    groups += [(key | {"batch_mb": "all"}, group) for key, group in grouped(runs, "system").items()]
    return [
        key
        | {"killed": sum(run["killed"] for run in group), "failed": sum("error" in run for run in group)}
        | spread("of what memory allows", _alive(group, "fraction_of_allowed"))
        | spread("peak, GB", _alive(group, "peak_gb"))
        | {"runs": len(group), "cgroup": all(run["cgroup"] for run in group)}
        for key, group in groups
    ]


def _alive(runs: Sequence[Run], name: str) -> list[float]:
    return [run[name] for run in runs if name in run]


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw the share killed by batch size."""
    sizes = sorted({run["batch_mb"] for run in runs})
    systems = {key["system"]: group for key, group in grouped(runs, "system").items()}
    killed = {
        name: [_share([run["killed"] for run in group if run["batch_mb"] == size]) for size in sizes]
        for name, group in systems.items()
    }
    axes = figure.subplots()
    bars(axes, [f"{size} MiB" for size in sizes], killed, "share of runs killed")
    axes.set_xlabel("batch")


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")
