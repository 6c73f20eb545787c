"""The course of a run as columns, and the few of its decisions that a drawing needs: peaks and all that happened."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from intune_callbacks.words import PAGE_ARROW, changed

__all__ = [
    "ADVISED",
    "CHANGED",
    "REFUSED",
    "TAKEN_BACK",
    "Column",
    "Event",
    "RunColumns",
    "averaged",
    "columns_of",
    "thin",
]

CHANGED, TAKEN_BACK, REFUSED, ADVISED = "changed", "taken back", "refused", "advised"
Column = list[float | None]
OF_ALL = (
    *("samples_per_s", "wait_frac", "exposed_wait_frac", "model_s", "seam_s"),
    *("cpus", "memory_used_bytes", "memory_limit_bytes", "gpu_utilisation"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """What one decision did.

    Args:
        kinds: of what happened: `CHANGED`, `TAKEN_BACK`, `REFUSED`, `ADVISED`; nothing for an ordinary decision.
        change: what was changed, or would be, from which value to which.
        reason: why.
        refused: what the guard refused, and why.
        effect: samples/s afterwards / samples/s before; None while unknown.
    """

    kinds: tuple[str, ...]
    change: str
    reason: str
    refused: str
    effect: float | None

    @property
    def texts(self) -> tuple[str, str, str]:
        """What is said of it, in the order in which it is read; empty where there is nothing to say."""
        return self.change, self.reason, f"refused: {self.refused}" if self.refused else ""


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Columns of equal length, one entry for each decision.

    Args:
        at_s: seconds since the run began; where that is not known, since its first window did.
        steps: batches seen by then.
        machine: figures of the whole by name, as in ``observation`` of a history line; units in the names.
        allocation: stage -> its value from then on.
        busy: worker stage -> share of its workers' time spent computing, 0..1.
        fill: worker stage -> share of its window that was full, 0..1.
        events: what each decision did.
    """

    at_s: list[float]
    steps: Column
    machine: dict[str, Column]
    allocation: dict[str, Column]
    busy: dict[str, Column]
    fill: dict[str, Column]
    events: list[Event] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def eventful(self) -> list[int]:
        """The decisions in which something happened."""
        return [index for index, event in enumerate(self.events) if event.kinds]

    @property
    def seams(self) -> list[int]:
        """The decisions whose window held the start of an epoch."""
        return [index for index, seam_s in enumerate(self.machine["seam_s"]) if seam_s]


def columns_of(lines: Sequence[Mapping[str, Any]], begin_at_s: float | None = None) -> RunColumns:
    """Return the columns of a history.

    Args:
        lines: of `history.jsonl`, as `record.history.Tail` reads them.
        begin_at_s: when the run began, by the clock of the lines; None where that is not known.
    """
    seen, after = [line["observation"] for line in lines], [line["after"] for line in lines]
    rates = [one["rates"] for one in seen]
    return RunColumns(
        _times(lines, begin_at_s),
        [line["step"] for line in lines],
        {name: [one[name] for one in seen] for name in OF_ALL},
        {name: [one.get(name) for one in after] for name in _names(after)},
        {name: [one.get(name, {}).get("busy_frac") for one in rates] for name in _names(rates)},
        {name: [one.get(name, {}).get("queue_fill") for one in rates] for name in _names(rates)},
        list(_events(lines)),
    )


def thin(columns: Iterable[Sequence[float | None]], must: Iterable[int], most: int) -> list[int]:
    """Return which entries to draw: the first and the last, all of `must`, and of each stretch the peaks.

    Args:
        columns: of equal length; of every stretch the largest and the smallest value of each is kept.
        must: entries that stay whatever happens; they are not counted.
        most: about how many others may stay.

    Returns:
        Indices, ascending; all of them where they are no more than `most`.
    """
    columns = list(columns)
    count = max((len(column) for column in columns), default=0)
    columns = [column for column in columns if any(value is not None for value in column)]
    chosen = {index for index in must if index < count}
    if count <= most:
        return list(range(count))
    chosen |= {0, count - 1}
    stretches = max(1, most // (2 * max(1, len(columns))))
    edges = [round(stretch * count / stretches) for stretch in range(stretches + 1)]
    for begin, end in itertools.pairwise(edges):
        for column in columns:
            known = [index for index in range(begin, end) if column[index] is not None]
            if known:
                chosen.add(max(known, key=lambda index: column[index] or 0.0))
                chosen.add(min(known, key=lambda index: column[index] or 0.0))
    return sorted(chosen)


def averaged(columns: Sequence[Sequence[float | None]], most: int) -> list[Column]:
    """Return the columns with at most `most` entries each, every one the mean of a stretch of equal length."""
    count = max((len(column) for column in columns), default=0)
    if count <= most:
        return [list(column) for column in columns]
    edges = [round(stretch * count / most) for stretch in range(most + 1)]
    return [[_mean(column[begin:end]) for begin, end in itertools.pairwise(edges)] for column in columns]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _events(lines: Sequence[Mapping[str, Any]]) -> Iterable[Event]:
    previous: Mapping[str, Any] | None = None
    for line in lines:
        before, after = line["before"], line["after"]
        kinds, change = [REFUSED] if line["vetoes"] else [], ""
        if line["applied"]:
            kinds.insert(0, TAKEN_BACK if previous is not None and after == previous else CHANGED)
            # To and fro and to again are a change, its undoing and another change.
            previous, change = before if kinds[0] == CHANGED else None, changed(before, after, PAGE_ARROW)
        elif line["granted"]:
            kinds.insert(0, ADVISED)
            change = changed(before, line["granted"], PAGE_ARROW)
        yield Event(tuple(kinds), change, line["reason"], "; ".join(line["vetoes"]), line["effect"])


def _times(lines: Sequence[Mapping[str, Any]], begin_at_s: float | None) -> list[float]:
    """Seconds from the begin; a line without a time stands where the one before it does."""
    at = [line["at_s"] for line in lines]
    known = [(line["at_s"], line["observation"]["elapsed_s"] or 0.0) for line in lines if line["at_s"]]
    start = known[0][0] - known[0][1] if known else 0.0
    start = min(start, begin_at_s) if begin_at_s is not None else start
    times: list[float] = []
    for value in at:
        times.append(max(value - start if value is not None else 0.0, times[-1] if times else 0.0))
    return times


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every key in the order of its first appearance: the order of the stages."""
    return list(dict.fromkeys(name for row in rows for name in row))
