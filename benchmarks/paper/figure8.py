"""Longer pipelines, larger machines and larger batches, as multiples of AUTOTUNE (paper, figure 8)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.live_loop import Case
from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import bars, grouped, spread
from benchmarks.paper.trace import mean, trace

__all__ = ["TITLE", "draw", "rows", "tasks"]

TITLE = "Figure 8: stages, CPUs and batch size; throughput as multiples of AUTOTUNE"
SYSTEMS = ("AUTOTUNE", "AUTOTUNE unordered", "even split", "Plumber LP", "N in every stage", "InTune (dqn)")
SHAPES = {3: "3 stages", 4: "4 stages", 5: "criteo", 6: "6 stages", 7: "7 stages"}
SIGMA, ROWS_PER_CPU_S, PAPER_BATCH = 0.8, 4096, 24_096
SETTLE_S, FINAL_S = 60.0, 30.0


def tasks(options: Options) -> list[Task]:
    """Return a run for each study, point, system and seed."""
    settle_s, final_s = (4.0, 3.0) if options.quick else (SETTLE_S, FINAL_S)
    return [
        Task(
            {"study": study, "point": point, "system": system, "seed": seed},
            trace,
            ("tf.data", system, case, settle_s, final_s),
        )
        for seed in options.seeds
        for study, points in _points(options.quick, seed).items()
        for point, case in points.items()
        for system in SYSTEMS
    ]


def _points(quick: bool, seed: int) -> dict[str, dict[int, Case]]:
    if quick:
        few = {stages: Case("tfdata", 4, 0.2, SIGMA, seed, shape=SHAPES[stages]) for stages in (3, 7)}
        return {"stages": few, "CPUs": {cpus: Case("tfdata", cpus, 0.2, SIGMA, seed) for cpus in (4, 8)}}
    return {
        "stages": {stages: Case("tfdata", 128, 2.0, SIGMA, seed, shape=shape) for stages, shape in SHAPES.items()},
        # As in live_tfdata: 64 batches a second at most.
        "CPUs": {n: Case("tfdata", n, max(0.5, n / 64), SIGMA, seed) for n in (8, 16, 32, 64, 128)},
        # The noise of single rows evens out in a larger batch.
        "rows of a batch": {
            rows: Case("tfdata", 32, rows / ROWS_PER_CPU_S, min(1.0, SIGMA * (PAPER_BATCH / rows) ** 0.5), seed)
            for rows in (2**11, 2**12, 2**13, 2**14, 2**15, 2**16)
        },
    }


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for each point and system."""
    base = {
        (run["study"], run["point"], run["seed"]): mean(run, of="rate") for run in runs if run["system"] == "AUTOTUNE"
    }
    return [
        key
        | spread("x AUTOTUNE", _times(group, base))
        | spread("of the limit", [mean(run) for run in group])
        | {"seeds": len(group)}
        for key, group in grouped(runs, "study", "point", "system").items()
    ]


def _times(runs: Sequence[Run], base: dict[tuple[str, int, int], float]) -> list[float]:
    return [mean(run, of="rate") / base[run["study"], run["point"], run["seed"]] for run in runs]


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw one field for each study."""
    studies = list(grouped(runs, "study").items())
    figure.set_size_inches(4.5 * len(studies), 4)
    for axes, (key, group) in zip(figure.subplots(1, len(studies), squeeze=False)[0], studies, strict=True):
        points = sorted({run["point"] for run in group})
        of: dict[tuple[str, int], list[float]] = {}
        for run in group:
            of.setdefault((run["system"], run["point"]), []).append(mean(run))
        values = {name: [fmean(of.get((name, point), [float("nan")])) for point in points] for name in SYSTEMS}
        bars(axes, points, values, "of the limit")
        axes.set_xlabel(key["study"])
