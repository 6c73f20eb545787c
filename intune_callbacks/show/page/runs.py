"""Read what a run left in its folder, however it ended: files that are missing, old, or cut off in mid-line."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from intune_callbacks.errors import ConfigError
from intune_callbacks.record.history import HISTORY, Tail
from intune_callbacks.record.report import REPORT, Report, Side, StageRow
from intune_callbacks.words import count

__all__ = ["Run", "read"]

LAST_WINDOWS = 50
"""Windows of each side, where a run left no report: as many as `record.before_after` describes."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process's run.

    Args:
        folder: where it was read.
        report: of `report.json`; from the history where there is no such file.
        lines: the decisions of `history.jsonl`, oldest first.
        notes: what was missing or could not be read, a sentence each.
        rank: of a run of several processes; None for a single one.
    """

    folder: Path
    report: Report
    lines: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    rank: int | None = None

    @property
    def name(self) -> str:
        """The folder's name, and that of the folder around it."""
        return "/".join(self.folder.absolute().parts[-2:])


def read(directory: str | Path) -> list[Run]:
    """Return the run in a folder, or one for each rank, rank 0 first.

    Raises:
        ConfigError: it is no folder, or nothing in it is of a run.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError([f"DIR={str(directory)!r}: no such folder; expected the run_dir of an InTuneCallback"])
    ranks = [replace(_read_one(path), rank=rank) for rank, path in _rank_folders(folder)]
    if ranks:
        # A recipe writes the report of rank 0, with its own figures added, beside the folders of the ranks.
        whole = _report(folder / REPORT, [])
        if whole is not None:
            ranks[0] = replace(ranks[0], report=whole)
        return [replace(ranks[0], folder=folder), *ranks[1:]]
    if not (folder / REPORT).exists() and not (folder / HISTORY).exists():
        near = sorted(path.parent for name in (REPORT, HISTORY) for path in folder.glob(f"*/{name}"))
        hint = f"; did you mean {str(near[0])!r}?" if near else ""
        raise ConfigError([f"DIR={str(directory)!r}: expected {REPORT} or {HISTORY} in it, found neither{hint}"])
    return [_read_one(folder)]


def _rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the ranks that left a file in a folder of theirs, in order."""
    found = ((re.fullmatch(r"rank(\d+)", path.name), path) for path in folder.glob("rank*"))
    ranks = [(int(match[1]), path) for match, path in found if match]
    return sorted((rank, path) for rank, path in ranks if (path / REPORT).exists() or (path / HISTORY).exists())


def _read_one(folder: Path) -> Run:
    notes: list[str] = []
    lines = _lines(folder / HISTORY, notes)
    report = _report(folder / REPORT, notes)
    if report is None:
        notes.append(f"no whole {REPORT}: the run was stopped hard, or goes on; the figures are from {HISTORY}")
        report = _unfinished(lines)
    return Run(folder, report, tuple(lines), tuple(notes))


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        notes.append(f"no {HISTORY}: there is no course to draw")
    tail = Tail(path)
    lines, _ = tail.read()
    if tail.why_not:
        notes.append(f"{HISTORY} could not be read: {tail.why_not}")
    if unread := tail.unread + tail.is_cut:
        of = count(unread, "line")
        notes.append(f"{of} of {HISTORY} could not be read; a run that is killed cuts off its last one")
    if tail.earlier:
        notes.append(f"{tail.earlier} decisions of earlier fits are in {HISTORY} as well; only the last fit is shown")
    return lines


def _report(path: Path, notes: list[str]) -> Report | None:
    if not path.exists():
        return None
    try:
        if not path.is_file():
            raise OSError("it is no file")  # to open a pipe would wait for its writer
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{REPORT} could not be read: {error}")
        return None
    if not isinstance(found, dict):
        notes.append(f"{REPORT} could not be read: expected an object, got {type(found).__name__}")
        return None
    if not found.keys() & {one.name for one in fields(Report)}:
        notes.append(f"{REPORT} is not one of InTune: it has none of its entries")
        return None
    return Report.from_json(found)


def _unfinished(lines: Sequence[dict[str, Any]]) -> Report:
    """Return a report of what can be said without the end of the run."""
    moved = [i for i, line in enumerate(lines) if line["applied"]]
    first = lines[: moved[0] + 1] if moved else lines
    last = lines[moved[-1] + 1 :] if moved else lines
    begin, now = (lines[0]["before"], lines[-1]["after"]) if lines else ({}, {})
    at_s = [line["at_s"] for line in lines if line["at_s"] is not None]
    seen_s = lines[0]["observation"]["elapsed_s"] or 0.0 if lines else 0.0  # a decision comes at the end of its window
    rates = lines[-1]["observation"]["rates"] if lines else {}
    return Report(
        before=_side(first[-LAST_WINDOWS:], begin),
        after=_side(last[-LAST_WINDOWS:] or lines[-1:], now),
        stages=tuple(_row(name, begin.get(name, value), value, rates) for name, value in now.items()),
        changes=len(moved),
        wall_s=at_s[-1] - at_s[0] + seen_s if at_s else 0.0,
        steps=int(lines[-1]["step"]) if lines else 0,
        why="the run has left no verdict: it was stopped hard, or goes on",
        next="look again when it has ended",
    )


def _row(name: str, first: int, current: int, rates: Collection[str]) -> StageRow:
    is_window = name.endswith(".window")
    window_of = name.removesuffix(".window") if is_window else None
    unit: Literal["workers", "items"] = "workers" if not is_window and name in rates else "items"
    return StageRow(name, "cpu", unit, 0, 0, current, window_of=window_of, first=first)


def _side(lines: Sequence[dict[str, Any]], allocation: dict[str, int]) -> Side:
    def middle(key: str) -> float | None:
        values = [value for line in lines if (value := line["observation"][key]) is not None]
        return median(values) if values else None

    keys = ("wait_frac", "exposed_wait_frac", "model_s", "cpus", "memory_used_bytes", "memory_limit_bytes")
    found: dict[str, Any] = {key: middle(key) for key in keys}
    return Side(
        **found,
        throughput_samples_per_s=middle("samples_per_s"),
        windows=len(lines),
        verdict="not finished",
        allocation=allocation,
    )
