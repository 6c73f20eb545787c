"""A machine that grows and shrinks under the running pipeline: 32, 64, 128, 64, 32 virtual CPUs (paper, figure 7)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.live_loop import Case
from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import COLOURS, grouped, lines, spread
from benchmarks.paper.trace import Event, mean, trace

__all__ = ["TITLE", "draw", "rows", "tasks"]

TITLE = "Figure 7: throughput while the machine grows and shrinks, as multiples of Unoptimized"
CPUS = (32, 64, 128, 64, 32)
WORK_S, SIGMA = 1.0, 0.8
SETTLE_S, PHASE_S = 40.0, 40.0
MODEL_CPUS = 96
"""The model of `model` takes what so many CPUs could give at best."""
SHAPES = ("criteo", "wide")
TF_SYSTEMS = (
    "Unoptimized",
    "AUTOTUNE",
    "AUTOTUNE unordered",
    "AUTOTUNE relaunched",
    "AUTOTUNE relaunched unordered",
    "Plumber LP relaunched",
    "even split relaunched",
    "N in every stage relaunched",
    "hill climb",
    "InTune (model-jump)",
    "InTune (dqn)",
)
SYSTEMS = {"tf.data": TF_SYSTEMS, "torch": tuple(name for name in TF_SYSTEMS if "AUTOTUNE" not in name)}


def tasks(options: Options) -> list[Task]:
    """Return a run for each framework, pipeline, system and seed."""
    cpus = (4, 8, 4) if options.quick else CPUS
    settle_s, phase_s, work_s = (3.0, 4.0, 0.2) if options.quick else (SETTLE_S, PHASE_S, WORK_S)
    events = [Event(number * phase_s, "cpus", count) for number, count in enumerate(cpus) if number]
    return [
        Task(
            {"framework": framework, "pipeline": shape, "system": system, "seed": seed, "phase_s": phase_s},
            trace,
            (
                framework,
                system,
                Case(framework, cpus[0], work_s, SIGMA, seed, shape=shape),
                settle_s,
                len(cpus) * phase_s,
                events,
            ),
        )
        for seed, (framework, systems), shape in product(options.seeds, SYSTEMS.items(), SHAPES)
        for system in systems
    ]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row per system: mean over the seeds, smallest and largest of them."""
    found = []
    slowest = {
        (run["framework"], run["pipeline"], run["seed"]): mean(run, of="rate")
        for run in runs
        if run["system"] == "Unoptimized"
    }
    order = {system: place for place, system in enumerate(TF_SYSTEMS)}
    ordered = sorted(runs, key=lambda run: (run["framework"], run["pipeline"], order[run["system"]]))
    for key, group in grouped(ordered, "framework", "pipeline", "system").items():
        times = [mean(r, of="rate") / slowest[r["framework"], r["pipeline"], r["seed"]] for r in group]
        found.append(
            key
            | spread("x Unoptimized", times)
            | spread("of the limit", [_phases(run) for run in group])
            | spread("CPUs busy", [mean(run, of="utilisation") for run in group])
            | spread("model busy", [_model_busy(run) for run in group])
            | {"seeds": len(group)}
        )
    return found


def _phases(run: Run) -> float:
    """Return the mean over the phases, of which each counts the same."""
    begins = np.arange(0.0, run["at_s"][-1] - run["phase_s"] / 2, run["phase_s"])
    return fmean(mean(run, begin_s, begin_s + run["phase_s"]) for begin_s in begins)


def _model_busy(run: Run) -> float:
    fastest = max(limit / cpus for limit, cpus in zip(run["limit"], run["cpus"], strict=True)) * MODEL_CPUS
    return mean(run | {"model": [min(1.0, rate / fastest) for rate in run["batches_per_s"]]}, of="model")


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw throughput over time, a field for each framework and pipeline."""
    fields = list(grouped(runs, "framework", "pipeline").values())
    figure.set_size_inches(13, 3.5 * len(fields))
    axes = figure.subplots(len(fields), 2, squeeze=False)
    for (speed, busy), group in zip(axes, fields, strict=True):
        unit = [mean(run, of="rate") for run in group if run["system"] == "Unoptimized"]
        speed.set_title(f"{group[0]['framework']}, {group[0]['pipeline']}: throughput / Unoptimized", fontsize=10)
        busy.set_title("CPUs busy", fontsize=10)
        for key, same in grouped(group, "system").items():
            colour = COLOURS[TF_SYSTEMS.index(key["system"])]
            lines(speed, same, "batches_per_s", key["system"], colour, 1.0 / (sum(unit) / len(unit)))
            lines(busy, same, "utilisation", key["system"], colour)
        busy.set_ylim(0, 1.05)
        for field in (speed, busy):
            field.set_xlabel("seconds")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
