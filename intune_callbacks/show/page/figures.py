"""What is drawn of a run over time, and of several runs in the same plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intune_callbacks.record.report import Report
from intune_callbacks.show.page.columns import Column, RunColumns, averaged, thin
from intune_callbacks.show.page.plot import DASHES, Figure, Plot, colour, marks, seams

__all__ = ["Drawing", "draw", "draw_together"]

# Points per line, marks, values of all lines, and means at most: what keeps the page small, and quick to open.
POINTS, MARKS, VALUES, MEANS = 2000, 1500, 60_000, 150
COLOURS_APART = 8


@dataclass(frozen=True, slots=True)
class Drawing:
    """The plots of one time axis.

    Args:
        figures: in order.
        columns: what the figures refer to, by name.
        kept: the decisions that can be hovered over, ascending; their times are the column ``t``.
        marked: how many of the eventful ones have a mark.
        unit: of the time axis.
    """

    figures: tuple[Figure, ...]
    columns: dict[str, list[Any]]
    kept: tuple[int, ...]
    marked: int
    unit: str


def draw(course: RunColumns, report: Report) -> Drawing:
    """Return the plots of a run.

    Args:
        course: of at least one decision.
        report: of the same run.
    """
    machine, eventful = course.machine, course.eventful
    speed, wait, used = (machine[name] for name in ("samples_per_s", "wait_frac", "memory_used_bytes"))
    kept = thin([speed, wait, used], eventful, POINTS)
    lines = len(course.allocation) + len(course.busy) + len(course.fill) + 4
    # With very many stages or changes the plots below the first two make do with fewer points.
    some = kept
    if len(kept) * lines > VALUES:
        some = thin([speed, wait, *course.allocation.values()], (), VALUES // lines)
    columns: dict[str, list[Any]] = {}
    plot = Plot(columns, course.at_s[-1])
    for name, indices in (("t", kept), ("s", some)):
        plot.times(name, [course.at_s[index] for index in indices])
    shown = eventful
    if len(eventful) > MARKS:
        shown = [eventful[index] for index in thin([[speed[index] for index in eventful]], (), MARKS)]
    blocked = plot.line("wait_frac", "the loop waits for a batch", "--c5", wait, kept, time="t")
    idle = plot.line("exposed", "the GPU waits for one", "--c3", machine["exposed_wait_frac"], kept, time="t")
    starts = course.seams
    if len(starts) > MARKS:
        starts = [starts[index] for index in thin([[machine["seam_s"][index] for index in starts]], (), MARKS)]
    over_speed = marks(columns, course, shown, "samples_per_s", speed, plot)
    over_wait = marks(columns, course, shown, "wait_frac", wait, plot)
    figures = [
        *plot.figure(
            "throughput",
            "Throughput, samples/s",
            [plot.line("samples_per_s", "throughput", "--c0", speed, kept, time="t")],
            [*over_speed, *seams(columns, course, starts, plot)],
            wide=True,
        ),
        *plot.figure("wait", "Data wait, share of the time", [blocked, idle], over_wait, share=True, wide=True),
        *_stages(plot, course, report, some),
        *_machine(plot, course, report.memory.soft_limit_frac, some),
    ]
    return Drawing(tuple(figures), columns, tuple(kept), len(shown), plot.unit)


def draw_together(courses: Mapping[str, RunColumns]) -> Drawing:
    """Return throughput and data wait of several ranks or runs, all in the same two plots.

    Args:
        courses: label -> course; an empty course is left out.
    """
    known = {label: course for label, course in courses.items() if len(course)}
    end_s = max((course.at_s[-1] for course in known.values()), default=0.0)
    columns: dict[str, list[Any]] = {}
    plot = Plot(columns, end_s)
    speeds, waits = [], []
    for at, (label, course) in enumerate(known.items()):
        speed, wait = course.machine["samples_per_s"], course.machine["wait_frac"]
        kept = thin([speed, wait], (), max(200, POINTS // len(known)))
        time = f"t{at}"
        plot.times(time, [course.at_s[index] for index in kept])
        speeds.append(plot.line(f"samples_per_s{at}", label, colour(at), speed, kept, time=time))
        waits.append(plot.line(f"wait_frac{at}", label, colour(at), wait, kept, time=time))
    figures = [
        *plot.figure("together-throughput", "Throughput, samples/s", speeds),
        *plot.figure("together-wait", "Data wait, share of the time", waits, share=True),
    ]
    return Drawing(tuple(figures), columns, (), 0, plot.unit)


def _stages(plot: Plot, course: RunColumns, report: Report, some: Sequence[int]) -> list[Figure]:
    workers = [stage.name for stage in report.stages if stage.unit == "workers"] or list(course.busy)
    window_of = {stage.name: stage.window_of for stage in report.stages}
    paint = {name: colour(index) for index, name in enumerate(workers)}
    buffers = [name for name in course.allocation if name not in paint]

    def lines(kind: str, columns: Mapping[str, Column], names: Sequence[str], **how: Any) -> list[Any]:
        return [
            plot.line(
                f"{kind}{index}",
                name,
                paint.get(window_of.get(name) or name, colour(len(paint) + index)),
                columns[name],
                dash=list(DASHES)[index // COLOURS_APART % len(DASHES)],
                **how,
            )
            for index, name in enumerate(names)
            if name in columns
        ]

    # Shares jump between two decisions; peaks would fill the plot, so means are drawn.
    at_s, *shares = averaged([course.at_s, *course.busy.values(), *course.fill.values()], MEANS)
    plot.times("a", at_s)
    busy = dict(zip(course.busy, shares[: len(course.busy)], strict=True))
    fill = dict(zip(course.fill, shares[len(course.busy) :], strict=True))
    means = {"time": "a", "kept": range(len(at_s))}
    of = "mean share" if len(course) > MEANS else "share"
    steps = {"kept": some, "steps": True}
    stacked = lines("w", course.allocation, workers, area="stacked", **steps)
    return [
        *plot.figure("workers", "Workers per stage, stacked", stacked, wide=True),
        *plot.figure("windows", "Windows and depths, items", lines("b", course.allocation, buffers, **steps)),
        *plot.figure("busy", f"Busy, {of} of the workers' time", lines("u", busy, workers, **means), share=True),
        *plot.figure("fill", f"Queue fill, {of} of the window", lines("q", fill, workers, **means), share=True),
    ]


def _machine(plot: Plot, course: RunColumns, soft: float | None, some: Sequence[int]) -> list[Figure]:
    used, limit = course.machine["memory_used_bytes"], course.machine["memory_limit_bytes"]
    soft_limit: Column = [value * soft if value is not None and soft is not None else None for value in limit]
    return [
        *plot.figure(
            "memory",
            "Memory, GB",
            [
                plot.line("memory", "in use", "--c0", used, some, scale=1e-9, area="below"),
                plot.line("soft", "soft limit", "--c1", soft_limit, some, scale=1e-9, dash="dash", steps=True),
                plot.line("limit", "limit", "--c5", limit, some, scale=1e-9, steps=True),
            ],
        ),
        *plot.figure(
            "cpus",
            "CPUs for the input pipeline",
            [plot.line("cpus", "CPUs", "--c2", course.machine["cpus"], some, steps=True, area="below")],
        ),
        *plot.figure(
            "gpu",
            "GPU, share of the time busy",
            [plot.line("gpu", "GPU", "--c3", course.machine["gpu_utilisation"], some)],
            share=True,
        ),
    ]
