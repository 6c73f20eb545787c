"""Means, spreads and lines over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

__all__ = ["COLOURS", "bars", "grouped", "lines", "spread"]

COLOURS = (
    *("#999999", "#e69f00", "#f3cf80", "#b35900", "#d9a373", "#009e73"),
    *("#cc79a7", "#8c564b", "#56b4e9", "#6a3d9a", "#0033cc"),
)
SMOOTH_S = 5


def grouped(runs: Sequence[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """Return the runs that are the same in `names`, by a key that is a mapping of these, in order of first appearance.

    Args:
        runs: what to sort.
        names: of the key's parts.
    """
    found: dict[Any, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(_Key((name, run[name]) for name in names), []).append(run)
    return found


class _Key(dict[str, Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def spread(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Return a column: the mean, and smallest and largest where there are several; never where one was not reached.

    Args:
        name: of the column.
        values: one for each seed.
    """
    reached = [value for value in values if value is not None]
    if not reached:
        return {name: "never"}
    text = f"{fmean(reached):.3g}"
    if len(reached) > 1:
        text += f" ({min(reached):.3g} to {max(reached):.3g})"
    return {name: text if len(reached) == len(values) else f"{text}, never in {len(values) - len(reached)}"}


def lines(axes: Any, runs: Sequence[dict[str, Any]], of: str, label: str, colour: str, times: float = 1.0) -> None:
    """Draw a series of each run, smoothed over some seconds, in one colour.

    Args:
        axes: of matplotlib.
        runs: of one system.
        of: the series.
        label: in the legend.
        colour: of the lines.
        times: what the values are multiplied by.
    """
    for number, run in enumerate(runs):
        values = np.array(run[of]) * times
        padded = np.pad(values, SMOOTH_S // 2, mode="edge")
        smooth = np.convolve(padded, np.full(SMOOTH_S, 1.0 / SMOOTH_S), mode="valid")
        axes.plot(run["at_s"], smooth, color=colour, lw=1.2, alpha=0.8, label=label if number == 0 else None)


def bars(axes: Any, labels: Sequence[Any], values: Mapping[str, Sequence[float]], unit: str) -> None:
    """Draw groups of bars: one group for each label, one colour for each system.

    Args:
        axes: of matplotlib.
        labels: below the groups.
        values: system -> one value for each label; NaN draws none.
        unit: of the values.
    """
    width, places = 0.8 / max(1, len(values)), np.arange(len(labels))
    for number, (system, heights) in enumerate(values.items()):
        axes.bar(places + (number - (len(values) - 1) / 2) * width, heights, width, label=system)
    axes.set_xticks(places, [str(label) for label in labels], fontsize=8)
    axes.set_ylabel(unit)
    axes.legend(fontsize=7)
