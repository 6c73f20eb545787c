"""What changes under way: a UDF that costs twice as much, a neighbour that takes half the CPUs, storage that stalls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.live_loop import Case
from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import COLOURS, grouped, lines, spread
from benchmarks.paper.trace import Event, mean, trace

__all__ = ["TITLE", "draw", "rows", "tasks"]

TITLE = "Drift: share of what all CPUs that are there could do, before, during and after a change"
SYSTEMS = (
    "AUTOTUNE",
    "AUTOTUNE unordered",
    "Plumber LP",
    "even split",
    "hill climb",
    "InTune (model-jump)",
    "InTune (dqn)",
)
CPUS, WORK_S, SIGMA = 32, 0.5, 0.8
SETTLE_S, PHASE_S = 60.0, 60.0
PHASES = ("before", "during", "after")


def tasks(options: Options) -> list[Task]:
    """Return a run for each change, system and seed; the change is undone for the last third."""
    cpus, work_s, settle_s, phase_s = (4, 0.1, 3.0, 3.0) if options.quick else (CPUS, WORK_S, SETTLE_S, PHASE_S)
    changes = {
        "the UDF costs twice as much": ("cost udf", 2.0, 1.0),
        "a neighbour takes half the CPUs": ("taken", cpus / 2, 0.0),
        "storage is ten times slower": ("wait disk", 9.0, 0.0),
    }
    return [
        Task(
            {"change": change, "system": system, "seed": seed, "phase_s": phase_s},
            trace,
            (
                "tf.data",
                system,
                Case("tfdata", cpus, work_s, SIGMA, seed),
                settle_s,
                3 * phase_s,
                [Event(phase_s, kind, value), Event(2 * phase_s, kind, back)],
            ),
        )
        for seed in options.seeds
        for change, (kind, value, back) in changes.items()
        for system in SYSTEMS
    ]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for each change and system."""
    found = []
    for key, group in grouped(runs, "change", "system").items():
        row = dict(key)
        for number, phase in enumerate(PHASES):
            row |= spread(phase, [mean(run, number * run["phase_s"], (number + 1) * run["phase_s"]) for run in group])
        found.append(row | {"seeds": len(group)})
    return found


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw one field for each change."""
    changes = list(grouped(runs, "change").items())
    figure.set_size_inches(5 * len(changes), 4)
    for axes, (key, group) in zip(figure.subplots(1, len(changes), squeeze=False)[0], changes, strict=True):
        for number, (system, same) in enumerate(grouped(group, "system").items()):
            lines(axes, [run | {"part": _part(run)} for run in same], "part", system["system"], COLOURS[number])
        axes.set(title=key["change"], xlabel="seconds", ylabel="of the limit", ylim=(0, 1.2))
        axes.legend(fontsize=7)


def _part(run: Run) -> list[float]:
    return [rate / limit for rate, limit in zip(run["batches_per_s"], run["limit"], strict=True)]
