"""One plot in plotly's terms, as plain data that names its columns and colours instead of holding them.

A string that begins with ``@`` names a column and one that begins with ``--`` a colour of the style sheet, so that each
column is on the page once and the colours follow the theme. Names of stages are never among plotly's own texts, which
it would read as markup: the legend and the tooltip belong to the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from intune_callbacks.show.page.columns import ADVISED, CHANGED, REFUSED, TAKEN_BACK, Column, RunColumns
from intune_callbacks.words import span

__all__ = ["DASHES", "SIGNS", "Figure", "Plot", "colour", "marks", "seams", "shortened"]

COLOURS = 8
SIGNS = {
    CHANGED: ("triangle-up", "▲"),
    TAKEN_BACK: ("triangle-down-open", "▽"),
    REFUSED: ("x-thin-open", "✕"),
    ADVISED: ("diamond-open", "◇"),
}
SEAM = "start of an epoch"
ALL_SIGNS = {**SIGNS, SEAM: ("line-ns-open", "╵")}
DASHES = {"solid": "━", "dash": "╍", "dot": "┅"}
WIDE_PX, NARROW_PX = 250, 210
DIGITS_OF_TIME = 7
LONG = 10_000
MARGIN = {"l": 52, "r": 14, "t": 10, "b": 28}


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot.

    Args:
        key: unique on the page.
        title: what is drawn, with its unit.
        legend: colour, sign and label of each thing drawn.
        spec: ``data`` and ``layout`` for plotly.
        wide: True where it takes a whole row.
    """

    key: str
    title: str
    legend: tuple[tuple[str, str, str], ...]
    spec: dict[str, Any]
    wide: bool = False


def colour(number: int) -> str:
    """Return the colour of the style sheet for the n-th of several lines."""
    return f"--c{number % COLOURS}"


def shortened(value: float | None, digits: int = 4) -> float | int | None:
    """Return a number with no more digits than a screen can show: each is a byte of the page."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) else short


class Plot:
    """Makes the plots of one time axis.

    Args:
        columns: where the values of what is drawn are put, by name.
        end_s: of the time axis, seconds.
    """

    def __init__(self, columns: dict[str, list[Any]], end_s: float) -> None:
        self._columns = columns
        self.unit_s, self.unit = span(end_s)
        self._end = end_s / self.unit_s or 1.0

    def times(self, name: str, at_s: Iterable[float | None]) -> None:
        """Put a column of times there, given in seconds."""
        scaled = (None if value is None else value / self.unit_s for value in at_s)
        self._columns[name] = [shortened(value, DIGITS_OF_TIME) for value in scaled]

    def line(
        self,
        name: str,
        label: str,
        paint: str,
        values: Column,
        kept: Sequence[int],
        *,
        time: str = "s",
        scale: float = 1.0,
        dash: str = "solid",
        steps: bool = False,
        area: str | None = None,
    ) -> dict[str, Any] | None:
        """Return a line, or None where there is nothing to draw.

        Args:
            name: of its column.
            label: in legend and tooltip.
            paint: its colour.
            values: of every decision.
            kept: which of them to draw.
            time: name of the column of their times.
            scale: factor from the values to what is drawn.
            dash: one of `DASHES`.
            steps: True where a value holds until the next one.
            area: ``stacked`` upon the line before, ``below`` to fill down to zero, None for a line only.
        """
        if all(values[index] is None for index in kept):
            return None
        self._columns[name] = [shortened(v * scale if (v := values[index]) is not None else None) for index in kept]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "x": f"@{time}",
            "y": f"@{name}",
            "line": {"color": paint, "width": 1.5, "dash": dash, "shape": "hv" if steps else "linear"},
            "hoverinfo": "none",
            "meta": {"label": label},
        }
        if area is not None:
            trace["fillcolor"] = paint.replace("--c", "--f")
            trace |= {"stackgroup": "all"} if area == "stacked" else {"fill": "tozeroy"}
        return trace

    def figure(
        self,
        key: str,
        title: str,
        lines: Sequence[dict[str, Any] | None],
        above: Sequence[dict[str, Any]] = (),
        *,
        share: bool = False,
        wide: bool = False,
    ) -> list[Figure]:
        """Return the plot of these lines and the marks above them; nothing where no line has a value.

        Args:
            key: unique on the page.
            title: what is drawn, with its unit.
            lines: what `line` gave.
            above: what `marks` gave.
            share: True where all values are shares 0..1.
            wide: True where it takes a whole row.
        """
        drawn = [line for line in lines if line is not None]
        if not drawn:
            return []
        rule = {
            "gridcolor": "--line",
            "linecolor": "--line",
            "zeroline": False,
            "fixedrange": True,
            "automargin": False,
        }
        x = rule | {
            "ticksuffix": f" {self.unit}",
            "range": [0.0, self._end],
            "fixedrange": False,
            "showgrid": False,
            "tickangle": 0,
        }
        y = rule | {"rangemode": "tozero", "nticks": 6}
        if share:
            y |= {"range": [0.0, 1.03], "tickformat": ".0%"}
        else:
            # SI prefixes for what is long only: 0.8 GB would be "800m".
            y["tickformat"] = "~s" if self._highest(drawn) >= LONG else ",~r"
        layout = {
            "height": WIDE_PX if wide else NARROW_PX,
            "margin": MARGIN,
            "showlegend": False,
            "separators": ". ",
            "hovermode": "x",
            "hoverdistance": -1,
            "paper_bgcolor": "--surface",
            "plot_bgcolor": "--surface",
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": "--muted"},
            "xaxis": x | {"showspikes": True, "spikemode": "across", "spikethickness": 1, "spikecolor": "--muted"},
            "yaxis": y,
        }
        legend = [(t["line"]["color"], DASHES[t["line"]["dash"]], t["meta"]["label"]) for t in drawn]
        legend += [("--ink", ALL_SIGNS[t["meta"]["label"]][1], t["meta"]["label"]) for t in above]
        return [Figure(key, title, tuple(legend), {"data": [*drawn, *above], "layout": layout}, wide)]

    def _highest(self, drawn: Sequence[dict[str, Any]]) -> float:
        tops = [max((v for v in self._columns[line["y"][1:]] if v is not None), default=0.0) for line in drawn]
        return sum(tops) if any("stackgroup" in line for line in drawn) else max(tops)


def marks(
    columns: dict[str, list[Any]], course: RunColumns, shown: Sequence[int], name: str, values: Column, plot: Plot
) -> list[dict[str, Any]]:
    """Return a trace of marks for each kind of thing that happened.

    Args:
        columns: where their values are put.
        course: whose events are marked.
        shown: which decisions get a mark.
        name: of the line they stand on.
        values: of that line, for every decision.
        plot: whose time axis it is.
    """
    traces = []
    for number, kind in enumerate(SIGNS):
        of_kind = [index for index in shown if kind in course.events[index].kinds and values[index] is not None]
        if of_kind:
            plot.times(f"m{number}.{name}.t", [course.at_s[index] for index in of_kind])
            columns[f"m{number}.{name}"] = [shortened(values[index]) for index in of_kind]
            traces.append(_marked(f"m{number}.{name}", kind))
    return traces


def seams(columns: dict[str, list[Any]], course: RunColumns, shown: Sequence[int], plot: Plot) -> list[dict[str, Any]]:
    """Return a trace of marks on the axis for the windows in which an epoch began; none where none did.

    Args:
        columns: where their values are put.
        course: whose windows are marked.
        shown: which of them get a mark.
        plot: whose time axis it is.
    """
    if not shown:
        return []
    plot.times("seam.t", [course.at_s[index] for index in shown])
    columns["seam"] = [0] * len(shown)
    return [_marked("seam", SEAM)]


def _marked(name: str, kind: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": f"@{name}.t",
        "y": f"@{name}",
        "marker": {
            "symbol": ALL_SIGNS[kind][0],
            "size": 9,
            "color": "--ink",
            "line": {"width": 1.6, "color": "--ink"},
        },
        "cliponaxis": False,
        "hoverinfo": "none",
        "meta": {"label": kind},
    }
