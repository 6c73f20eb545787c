"""Figures that another benchmark of this folder measures: its rows, once for each seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import bars, grouped, spread

__all__ = ["CACHE", "COST", "PEERS", "Wrapped"]

ROOT = Path(__file__).parents[2]
LONGEST_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark and what is shown of its rows.

    Args:
        module: of `benchmarks`.
        given: its arguments; ``--quick`` is added in a quick run.
        names: columns that tell its rows apart.
        values: columns whose mean and spread are shown; the first one is drawn.
    """

    module: str
    given: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[str, ...]


@dataclass
class Wrapped:
    """A figure made of other benchmarks.

    Args:
        TITLE: of the figure.
        parts: what is run.
    """

    TITLE: str
    parts: tuple[Part, ...]

    def tasks(self, options: Options) -> list[Task]:
        """Return a run of each benchmark and seed."""
        more = ("--quick",) if options.quick else ()
        return [
            Task({"benchmark": part.module, "seed": seed}, _rows, (part.module, (*part.given, *more), seed), alone=True)
            for seed in options.seeds
            for part in self.parts
        ]

    def rows(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Return one row for each row of the benchmarks: mean and spread over the seeds."""
        return [
            key | row for part in self.parts for key, values in self._values(runs, part) for row in [_columns(values)]
        ]

    def _values(self, runs: Sequence[Run], part: Part) -> list[tuple[dict[str, Any], dict[str, list[float | None]]]]:
        rows = [row for run in runs if run["benchmark"] == part.module for row in run["rows"]]
        named = [{name: row.get(name) for name in part.names} | row for row in rows]
        return [
            (key, {name: [row.get(name) for row in group if name in row] for name in part.values})
            for key, group in grouped(named, *part.names).items()
        ]

    def draw(self, runs: Sequence[Run], figure: Any) -> None:
        """Draw the first value of each benchmark."""
        figure.set_size_inches(10, 4 * len(self.parts))
        for axes, part in zip(figure.subplots(len(self.parts), 1, squeeze=False)[:, 0], self.parts, strict=True):
            found = [
                (", ".join(str(value) for value in key.values()), fmean(numbers))
                for key, values in self._values(runs, part)
                if (numbers := [value for value in values[part.values[0]] if value is not None])
            ]
            bars(axes, [label for label, _ in found], {part.module: [value for _, value in found]}, part.values[0])
            axes.tick_params(axis="x", rotation=90)


def _columns(values: dict[str, list[float | None]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, numbers in values.items():
        row |= spread(name, numbers) if numbers else {}
    return row


def _rows(module: str, given: Sequence[str], seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", *given, "--seed", str(seed), "--json", str(path)]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=LONGEST_S, check=False,
        )  # fmt: skip
        if not path.exists():
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-2000:]}")
        return {"rows": json.loads(path.read_text(encoding="utf-8"))["rows"]}


COST = Wrapped(
    "What InTune costs: CPU milliseconds of a decision, and whole fits where nothing is to be gained (1.0 is as fast)",
    (
        Part("decision", (), ("stages", "phase"), ("with_guard_ms", "decide_ms", "p95_ms")),
        Part("never_slower", (), ("kind", "framework"), ("wall_ratio", "cpu_ratio")),
    ),
)
CACHE = Wrapped(
    "A cache of decoded samples: later epochs as multiples of the best static size",
    (Part("cache", (), ("system", "decode_ms", "fits", "ranks", "kind"), ("of_best", "used_mb")),),
)
PEERS = Wrapped(
    "Peers: rows/s of Criteo text and Parquet, by library and threads",
    (
        Part(
            "criteo", (), ("system", "format", "threads"), ("rows_per_s", "cpu_us_per_row", "peak_rss_mb")
        ),
    ),
)  # fmt: skip
