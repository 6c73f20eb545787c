"""Run what a figure needs, keep it in a file, and write the table and the picture that are made of it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.output import table, versions
from benchmarks.wild.table import markdown

__all__ = ["Figure", "Options", "Run", "Task", "make", "picture"]

Run = dict[str, Any]
"""The key of a task and what it returned."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much is run.

    Args:
        seeds: of the repeats.
        quick: seconds in place of minutes: shows that it works.
        jobs: emulated machines side by side.
        given: what one sub-command alone is given, by name.
    """

    seeds: Sequence[int]
    quick: bool = False
    jobs: int = 3
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """One run.

    Args:
        key: what tells it apart; its parts are columns of the table.
        call: a function of a module, called with `args`; returns JSON.
        args: its arguments.
        alone: it takes the real CPUs, so that nothing may run beside it.
    """

    key: dict[str, Any]
    call: Callable[..., Run]
    args: tuple[Any, ...] = ()
    alone: bool = False


class Figure(Protocol):
    """A module of this package: one figure or table of the evaluation."""

    TITLE: str

    def tasks(self, options: Options) -> list[Task]:
        """Return what has to be run."""

    def rows(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Return the table."""

    def draw(self, runs: Sequence[Run], figure: Any) -> None:
        """Draw into a figure of matplotlib."""


def make(name: str, figure: Figure, options: Options, folder: Path) -> list[dict[str, Any]]:
    """Run what is not in the file yet, and write ``NAME.json``, ``NAME.md`` and ``NAME.png``.

    Args:
        name: of the figure.
        figure: what to run, and what to make of it.
        options: how much.
        folder: where the files are.

    Returns:
        The rows of the table.
    """
    path = folder / f"{name}{'-quick' if options.quick else ''}.json"
    runs: list[Run] = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    tasks = figure.tasks(options)
    wanted = [task for task in tasks if not any(task.key.items() <= run.items() for run in runs)]
    for run in _done(wanted, options.jobs):
        runs.append(run)
        print(f"{name}: {', '.join(str(value) for value in run.values() if isinstance(value, str | int))}", flush=True)
        _write(path, name, runs)
    rows = figure.rows(runs)
    print(f"\n{figure.TITLE}\n{table(rows)}\n", flush=True)
    path.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
    picture(path.with_suffix(".png"), figure, runs)
    return rows


def _done(tasks: Sequence[Task], jobs: int) -> Iterator[Run]:
    """Yield the runs, those that need the machine alone last and one by one; each has a fresh process."""
    for group, workers in (
        ([t for t in tasks if not t.alone], jobs),
        ([t for t in tasks if t.alone], 1),
    ):
        if group:
            with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
                yield from pool.imap_unordered(_run, group)


def _run(task: Task) -> Run:
    return task.key | task.call(*task.args)


def _write(path: Path, name: str, runs: Sequence[Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"benchmark": f"paper {name}", "versions": versions(), "machine": _machine(), "runs": runs}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(whole, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def _machine() -> dict[str, Any]:
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {"cpu": model, "cpus": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9, 1)}


def picture(path: Path, figure: Figure, runs: Sequence[Run]) -> None:
    """Write the picture of a figure; without matplotlib a line says how to get it.

    Args:
        path: of the PNG.
        figure: what draws.
        runs: what is drawn.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ModuleNotFoundError:
        print(f"{path.name}: no picture without matplotlib: pip install matplotlib", flush=True)
        return
    canvas = Canvas(figsize=(9.0, 5.0), layout="constrained")
    figure.draw(runs, canvas)
    canvas.savefig(path, dpi=120)
