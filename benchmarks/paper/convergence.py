"""How long it takes from an even split: seconds and decisions to 90, 95 and 99 % of the best, as a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.live_loop import Case
from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import grouped
from benchmarks.paper.trace import trace

__all__ = ["TITLE", "draw", "rows", "tasks"]

TITLE = "Convergence: seconds and decisions from an even split to a part of the limit (all CPUs busy), 10 runs a seed"
SYSTEMS = ("InTune (dqn)", "InTune (model-jump)", "hill climb")
CPUS, WORK_S, SIGMA = 32, 0.5, 0.8
RUNS_PER_SEED, SECONDS = 10, 90.0
PARTS = ("90", "95", "99")


def tasks(options: Options) -> list[Task]:
    """Return the runs: each has irregular batches of its own."""
    cpus, work_s, seconds, count = (4, 0.1, 6.0, 2) if options.quick else (CPUS, WORK_S, SECONDS, RUNS_PER_SEED)
    return [
        Task(
            {"framework": framework, "system": system, "seed": seed, "run": run},
            trace,
            (framework, system, Case(framework, cpus, work_s, SIGMA, 1000 * seed + run), 0.0, seconds),
        )
        for seed in options.seeds
        for run in range(count)
        for framework in ("tf.data", "torch")
        for system in SYSTEMS
    ]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the median and the slowest tenth; a run that never got there counts as infinitely long."""
    found = []
    for key, group in grouped(runs, "framework", "system").items():
        for part in PARTS:
            row = key | {"of the limit": f"{part} %"}
            for unit in ("seconds", "decisions"):
                taken = [_number(run[f"{unit}_to"][part]) for run in group]
                for name, share in (("median", 0.5), ("90 % of runs", 0.9)):
                    value = float(np.quantile(taken, share, method="higher"))
                    row[f"{unit}, {name}"] = round(value, 1) if np.isfinite(value) else "never"
            row["never"] = sum(run["seconds_to"][part] is None for run in group)
            found.append(row | {"runs": len(group)})
    return found


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw the share of runs that got there, over time."""
    figure.set_size_inches(12, 4)
    for axes, part in zip(figure.subplots(1, len(PARTS)), PARTS, strict=True):
        for key, group in grouped(runs, "framework", "system").items():
            taken = sorted(_number(run["seconds_to"][part]) for run in group)
            share = np.arange(1, len(taken) + 1) / len(taken)
            axes.step(taken, share, where="post", label=f"{key['system']}, {key['framework']}")
        axes.set(title=f"{part} % of the limit", xlabel="seconds", ylabel="share of runs", ylim=(0, 1.05))
        axes.legend(fontsize=7)
