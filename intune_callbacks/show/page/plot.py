"""Plots beneath each other in one figure of plotly's, whose time axes are one; what is at the pointer, plotly shows.

The figure is plain data. plotly reads markup in names and texts, so whatever a user may have named is escaped.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from intune_callbacks.show.page.columns import ADVISED, CHANGED, REFUSED, TAKEN_BACK, Column, Event, RunColumns
from intune_callbacks.words import ratio, span

__all__ = ["COLOURS", "DASHES", "SIGNS", "Drawing", "Plots", "Sign"]

Sign = tuple[str, str, str]
"""Colour, sign and label of one thing in a legend."""

# Characters of reasons at most; of a run with very many different ones each is cut. A choice: a quarter of a MB.
TEXTS, CUTS = 250_000, (400, 200, 120, 80, 60, 40, 20)
# Characters of a line beside the pointer, and of a name in a legend. A choice: what a small screen has room for.
FOLDED, LONGEST = 34, 60
# Of a point in time: milliseconds in a run of hours.
DIGITS_OF_TIME = 7
SEAM = "start of an epoch"
SIGNS = {CHANGED: "▲", TAKEN_BACK: "▽", REFUSED: "✕", ADVISED: "◇", SEAM: "╵"}
SYMBOLS = {
    CHANGED: "triangle-up",
    TAKEN_BACK: "triangle-down-open",
    REFUSED: "x-thin-open",
    ADVISED: "diamond-open",
    SEAM: "line-ns-open",
}
DASHES = {"solid": "━", "dash": "╍", "dot": "┅"}
# Of Okabe and Ito, which the colour-blind tell apart, a little darker. In the dark the style sheet inverts the plots
# and keeps their hues.
COLOURS = ("#0072b2", "#d98c00", "#009e73", "#b5588a", "#3fa0d8", "#d55e00", "#8f8200", "#55606b")
INK, MUTED, GRID = "#1b2126", "#5a6670", "#5a667030"
# Height of a plot, and from one to the next. A choice: several are seen at once, with room for title and axis.
PLOT_PX, GAP_PX = 124, 66
LAYOUT: dict[str, Any] = {
    "margin": {"l": 54, "r": 14, "t": 30, "b": 28},
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": MUTED},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "showlegend": False,
    "separators": ". ",
    "hovermode": "x unified",
    "hoverdistance": -1,
    "hoverlabel": {
        "bgcolor": "#ffffff",
        "bordercolor": "#b9c1c7",
        "align": "left",
        "namelength": -1,
        "font": {"color": INK},
    },
}
AXIS = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False}
TIME = {"showgrid": False, "tickangle": 0, "hoverformat": ".4~r"}
# SI prefixes for what is long only: 0.8 GB would be "800m".
VALUE = {"rangemode": "tozero", "nticks": 5, "fixedrange": True, "exponentformat": "SI", "minexponent": 4}
VALUE |= {"separatethousands": True}
TITLE = {"xref": "paper", "x": 0, "xshift": -46, "xanchor": "left", "y": 1, "yanchor": "bottom", "yshift": 6}
TITLE |= {"showarrow": False, "font": {"size": 13, "color": INK}}
HOVER = {"type": "scatter", "mode": "lines", "line": {"width": 0, "color": "rgba(0,0,0,0)"}}
HOVER |= {"hovertemplate": "step %{customdata}<br>%{text}<extra></extra>"}
MARK = {"type": "scatter", "mode": "markers", "cliponaxis": False, "hoverinfo": "skip"}


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure.

    Args:
        figure: ``data`` and ``layout`` for plotly; ``times``, the columns that ``x`` of the data names; ``hover``, what
            is said in every plot of the decision at the pointer.
        legend: colour, sign and label of what has a mark or is drawn in several plots.
        height_px: of the figure.
        notes: what is not drawn, a sentence each.
    """

    figure: dict[str, Any]
    legend: tuple[Sign, ...]
    height_px: int
    notes: tuple[str, ...] = ()


class Plots:
    """Plots beneath each other."""

    def __init__(self, end_s: float) -> None:
        self._unit_s, self._unit = span(end_s)
        self._end = end_s / self._unit_s or 1.0
        self._indices: dict[str, Sequence[int]] = {}
        self._titles: list[str] = []
        self._data: list[dict[str, Any]] = []
        self._layout: dict[str, Any] = dict(LAYOUT)
        self._figure: dict[str, Any] = {"data": self._data, "layout": self._layout, "times": {}}

    def times(self, name: str, at_s: Sequence[float | None], indices: Sequence[int]) -> None:
        """Keep the times of some entries of a column, given in seconds."""
        self._indices[name] = indices
        self._figure["times"][name] = self._scaled(at_s, indices)

    def _scaled(self, at_s: Sequence[float | None], indices: Iterable[int]) -> list[Any]:
        return [None if (at := at_s[i]) is None else _short(at / self._unit_s, DIGITS_OF_TIME) for i in indices]

    def line(
        self,
        name: str,
        colour: str,
        values: Column,
        at: str = "s",
        *,
        dash: str = "solid",
        steps: bool = False,
        filled: bool = False,
    ) -> dict[str, Any] | None:
        """Return a line, or None where there is nothing to draw.

        Args:
            name: at the pointer.
            values: of every entry of the column that the times were chosen of.
            at: which times.
            dash: one of `DASHES`.
            steps: True where a value holds until the next one.
            filled: down to zero, or to the line below.
        """
        drawn = [_short(values[index]) for index in self._indices[at]]
        if all(value is None for value in drawn):
            return None
        shape = {"color": colour, "width": 1.5, "dash": dash, "shape": "hv" if steps else "linear"}
        line = {"type": "scatter", "mode": "lines", "name": _escaped(name), "x": at, "y": drawn, "line": shape}
        return line | ({"fill": "tozeroy", "fillcolor": f"{colour}70"} if filled else {})

    def add(self, title: str, lines: Iterable[dict[str, Any] | None], *, share: bool = False, **how: Any) -> None:
        """Add a plot beneath the others, if one of its lines has a value.

        Args:
            title: what is drawn, with its unit.
            lines: what `line` gave.
            share: all values are shares 0..1.
            how: more of each line; those of a ``legendgroup`` are named in the legend, else beside the title.
        """
        drawn = [line for line in lines if line is not None]
        if not drawn:
            return
        n = str(len(self._titles) + 1) if self._titles else ""
        how = {"xaxis": f"x{n}", "yaxis": f"y{n}", "hovertemplate": "%{y:.1%}" if share else "%{y:,.4~r}"} | how
        self._data += [line | how for line in drawn]
        x = {"range": [0.0, self._end], "ticksuffix": f" {self._unit}", "anchor": f"y{n}"}
        self._layout[f"xaxis{n}"] = AXIS | TIME | x | ({"matches": "x"} if n else {})
        self._layout[f"yaxis{n}"] = AXIS | VALUE | ({"range": [0.0, 1.03], "tickformat": ".0%"} if share else {})
        signs = [f"<span style='color:{line['line']['color']}'>{DASHES[line['line']['dash']]}</span>" for line in drawn]
        named = [f"{sign} {line['name']}" for sign, line in zip(signs, drawn, strict=True)]
        is_alone = len(named) == 1 or "legendgroup" in how
        self._titles.append("   ".join([f"<b>{title}</b>", *(() if is_alone else named)]))

    def mark(self, columns: RunColumns, shown: Iterable[int], seams: Sequence[int], values: Column) -> list[Sign]:
        """Add marks to the last plot, and return their legend: for what happened on its line, for seams on its axis."""
        if not self._data:
            return []
        known = [index for index in shown if values[index] is not None]
        of_kind = {kind: [index for index in known if kind in columns.events[index].kinds] for kind in SYMBOLS}
        of_kind[SEAM] = list(seams)
        place = {key: self._data[-1][key] for key in ("xaxis", "yaxis")}
        for kind, indices in of_kind.items():
            if indices:
                marker = {"symbol": SYMBOLS[kind], "size": 9, "color": INK, "line": {"width": 1.6, "color": INK}}
                y = [0 if kind == SEAM else _short(values[index]) for index in indices]
                mark = {"name": kind, "x": self._scaled(columns.at_s, indices), "y": y, "marker": marker}
                self._data.append(MARK | mark | place)
        return [(INK, SIGNS[kind], kind) for kind, indices in of_kind.items() if indices]

    def hover(self, columns: RunColumns, indices: Sequence[int]) -> int | None:
        """Say these decisions at the pointer, in whichever plot it is; return where their texts were cut, if so."""
        events = [columns.events[index] for index in indices]
        texts = [text for event in events for text in event.texts]
        cut = next((n for n in CUTS if sum(min(len(text), n) for text in texts) <= TEXTS), CUTS[-1])
        self._figure["hover"] = HOVER | {
            "x": self._scaled(columns.at_s, indices),
            "customdata": [columns.steps[index] for index in indices],
            "text": [_hover_text(event, cut) for event in events],
        }
        return cut if any(len(text) > cut for text in texts) else None

    def drawing(self, legend: Iterable[Sign], notes: Iterable[str] = ()) -> Drawing | None:
        """Return all that was added; None where nothing was."""
        if not self._titles:
            return None
        count, step_px = len(self._titles), PLOT_PX + GAP_PX
        inner_px = count * step_px - GAP_PX
        for at in range(count):
            top_px = inner_px - at * step_px
            domain = [(top_px - PLOT_PX) / inner_px, top_px / inner_px]
            self._layout[f"yaxis{at + 1 if at else ''}"]["domain"] = domain
        refs = [f"y{at + 1 if at else ''} domain" for at in range(count)]
        titles = [TITLE | {"text": text, "yref": ref} for text, ref in zip(self._titles, refs, strict=True)]
        self._layout["annotations"] = titles
        self._layout["height"] = height_px = inner_px + LAYOUT["margin"]["t"] + LAYOUT["margin"]["b"]
        return Drawing(self._figure, tuple(legend), height_px, tuple(notes))


def _hover_text(event: Event, cut: int) -> str:
    parts = [f"{SIGNS[kind]} {kind}" for kind in event.kinds]
    for text in (text[: cut - 1] + "…" if len(text) > cut else text for text in event.texts if text):
        parts += [_escaped(line) for line in (textwrap.wrap(text, FOLDED) if len(text) > FOLDED else [text])]
    if event.kinds and event.effect is not None:
        parts.append(f"then {ratio(event.effect)} samples/s")
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """For plotly, which reads some markup and cuts no name: of a long one the begin."""
    return escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…", quote=False)


def _short(value: float | None, digits: int = 4) -> float | int | None:
    """A number with no more digits than a screen can show: each is a byte of the page."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")  # of the largest there is, infinity
    return None if math.isinf(short) else int(short) if short.is_integer() else short
