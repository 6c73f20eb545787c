"""What is drawn of a run over time, and of several runs in the same plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from intune_callbacks.record.history import HISTORY
from intune_callbacks.record.report import Report
from intune_callbacks.show.page.columns import Column, RunColumns, averaged, thin
from intune_callbacks.show.page.plot import COLOURS, DASHES, Drawing, Plots, Sign

__all__ = ["draw", "draw_together"]

# Points per line, marks, values of all lines, and means at most. A choice: more than a screen has pixels for makes the
# page large, and slow to open.
POINTS, MARKS, VALUES, MEANS = 2000, 1500, 60_000, 150


def draw(columns: RunColumns, report: Report) -> Drawing | None:
    """Return what is drawn of a run; None where nothing was measured."""
    machine, eventful = columns.machine, columns.eventful
    speed, wait, used = (machine[name] for name in ("samples_per_s", "wait_frac", "memory_used_bytes"))
    shown = _some(eventful, speed)
    chosen = some = thin([speed, wait, used], shown, POINTS)
    lines = len(columns.allocation) + len(columns.busy) + len(columns.fill) + 4
    if len(chosen) * lines > VALUES:
        # With very many stages or changes the plots below the first two make do with fewer points.
        some = thin([speed, wait, *columns.allocation.values()], (), VALUES // lines)
    plots = Plots(max(columns.at_s, default=0.0))
    plots.times("t", columns.at_s, chosen)
    plots.times("s", columns.at_s, some)
    plots.add("Throughput, samples/s", [plots.line("throughput", COLOURS[0], speed, "t")])
    legend = plots.mark(columns, shown, _some(columns.seams, machine["seam_s"]), speed)
    waits = ("the loop waits", COLOURS[5], wait), ("the GPU waits", COLOURS[3], machine["exposed_wait_frac"])
    plots.add("Data wait", [plots.line(*one, "t") for one in waits], share=True)
    plots.mark(columns, shown, (), wait)
    legend += _stages(plots, columns, report)
    _machine(plots, columns, report.memory.soft_limit_frac)
    described = sorted({*chosen, *eventful})
    cut = plots.hover(columns, described)
    return plots.drawing(legend, _left_out(columns, len(described), len(shown), cut))


def draw_together(runs: Mapping[str, RunColumns]) -> Drawing | None:
    """Return throughput and data wait of several ranks or runs, by label, in two plots; None where there is nothing."""
    known = [(label, columns) for label, columns in runs.items() if len(columns)]
    plots = Plots(max((columns.at_s[-1] for _, columns in known), default=0.0))
    for title, key in (("Throughput, samples/s", "samples_per_s"), ("Data wait", "wait_frac")):
        lines = []
        for at, (label, columns) in enumerate(known):
            drawn = [columns.machine["samples_per_s"], columns.machine["wait_frac"]]
            plots.times(f"t{at}", columns.at_s, thin(drawn, (), max(200, POINTS // len(known))))
            lines.append(plots.line(label, COLOURS[at % len(COLOURS)], columns.machine[key], f"t{at}"))
        plots.add(title, lines, share=key == "wait_frac", legendgroup="runs")
    return plots.drawing((COLOURS[at % len(COLOURS)], DASHES["solid"], label) for at, (label, _) in enumerate(known))


def _stages(plots: Plots, columns: RunColumns, report: Report) -> list[Sign]:
    """Add the plots of the stages, each in its colour, a window in that of its workers; return their legend."""
    workers = [stage.name for stage in report.stages if stage.unit == "workers"] or list(columns.busy)
    window_of = {stage.name: stage.window_of for stage in report.stages if stage.window_of in workers}
    others = [name for name in columns.allocation if name not in workers]
    own = [*workers, *(name for name in others if name not in window_of)]
    look: dict[str, Any] = {
        name: {"colour": COLOURS[at % len(COLOURS)], "dash": [*DASHES][at // len(COLOURS) % len(DASHES)]}
        for at, name in enumerate(own)
    }

    def add(title: str, values: Mapping[str, Column], names: list[str], how: dict[str, Any], **more: Any) -> None:
        known = [(name, look[window_of.get(name) or name]) for name in names if name in values]
        lines = [plots.line(name, values=values[name], **style, **how) for name, style in known]
        plots.add(title, lines, legendgroup="stages", **more)

    stacked = {"steps": True, "filled": True}
    add("Workers, stacked", columns.allocation, workers, stacked, stackgroup="all", fill="tonexty")
    add("Windows and depths, items", columns.allocation, others, {"steps": True})
    # Shares jump between two decisions; peaks would fill the plot, so means are drawn.
    at_s, *shares = averaged([columns.at_s, *columns.busy.values(), *columns.fill.values()], MEANS)
    plots.times("a", at_s, range(len(at_s)))
    busy = dict(zip(columns.busy, shares[: len(columns.busy)], strict=True))
    fill = dict(zip(columns.fill, shares[len(columns.busy) :], strict=True))
    of = "mean share" if len(columns) > MEANS else "share"
    add(f"Busy, {of} of the workers' time", busy, workers, {"at": "a"}, share=True)
    add(f"Queue fill, {of} of the window", fill, workers, {"at": "a"}, share=True)
    drawn = {*columns.allocation, *columns.busy, *columns.fill}
    return [(look[name]["colour"], DASHES[look[name]["dash"]], name) for name in own if name in drawn]


def _machine(plots: Plots, columns: RunColumns, soft: float | None) -> None:
    machine = columns.machine
    used, limit = (
        [value * 1e-9 if value is not None else None for value in machine[key]]
        for key in ("memory_used_bytes", "memory_limit_bytes")
    )
    soft_limit = [value * soft if value is not None and soft is not None else None for value in limit]
    memory = [
        plots.line("in use", COLOURS[0], used, filled=True),
        plots.line("soft limit", COLOURS[1], soft_limit, dash="dash", steps=True),
        plots.line("limit", COLOURS[5], limit, steps=True),
    ]
    plots.add("Memory, GB", memory)
    plots.add("CPUs for the input", [plots.line("CPUs", COLOURS[2], machine["cpus"], steps=True, filled=True)])
    plots.add("GPU, share of the time busy", [plots.line("GPU", COLOURS[3], machine["gpu_utilisation"])], share=True)


def _left_out(columns: RunColumns, described: int, marked: int, cut: int | None) -> Iterator[str]:
    if described < len(columns):
        yield (
            f"{described} of {len(columns)} decisions are drawn or told: each in which something was changed, taken "
            f"back, refused or advised, and of the others the peaks; {HISTORY} has them all"
        )
    if marked < len(columns.eventful):
        yield f"{marked} of {len(columns.eventful)} marks are drawn; the others are found by hovering"
    if cut is not None:
        yield f"reasons longer than {cut} characters are cut here; {HISTORY} has them whole"


def _some(indices: Sequence[int], values: Column) -> Sequence[int]:
    """As many as can have a mark, the peaks among them."""
    if len(indices) <= MARKS:
        return indices
    return [indices[at] for at in thin([[values[index] for index in indices]], (), MARKS)]
