"""Read what a run left in its folder, however it ended: files that are missing, old, or cut off in mid-line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from intune_callbacks.errors import ConfigError
from intune_callbacks.words import number

__all__ = ["HISTORY", "REPORT", "Run", "rank_folders", "read"]

REPORT, HISTORY = "report.json", "history.jsonl"
LAST_WINDOWS = 50
SIDE: dict[str, Any] = {
    **dict.fromkeys(("throughput_samples_per_s", "throughput_batches_per_s", "wait_frac", "exposed_wait_frac")),
    **dict.fromkeys(("model_s", "memory_used_bytes", "memory_limit_bytes", "cpus", "stage", "headroom", "why")),
    "allocation": {},
    "windows": 0,
    "verdict": "not known",
}
STAGE = {"name": "?", "kind": "cpu", "unit": "workers", "first": None, "current": None, "window_of": None}
CAUSE = {"kind": "", "sentence": "", "line": "", "gain": 1.0}
WHOLE: dict[str, Any] = {
    **{"mode": "not known", "mode_source": "not known", "policy": "not known", "why": "", "cause": "", "next": ""},
    **{"before": SIDE, "after": SIDE, "changes": 0, "wall_s": 0.0, "steps": 0, "samples": 0, "stages": []},
    **{"settled_after_s": None, "frozen": None, "auc": None, "ranks": None, "warm_start": None},
    **{"memory": {}, "settings": {}, "versions": {}, "decisions": []},
    **{"whole": {}, "hints": [], "causes": []},
}


@dataclass(frozen=True, slots=True)
class Run:
    """One process's run.

    Args:
        folder: where it was read.
        report: `report.json` with every key that is read here; from the history where there is no such file.
        lines: the decisions of `history.jsonl`, oldest first.
        notes: what was missing or could not be read, a sentence each.
        rank: of a run of several processes; None for a single one.
    """

    folder: Path
    report: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    rank: int | None = None

    @property
    def name(self) -> str:
        """The folder's name, and that of the folder around it."""
        return "/".join(self.folder.absolute().parts[-2:])


def read(directory: str | Path) -> list[Run]:
    """Return the run in a folder, or one for each rank, rank 0 first.

    Args:
        directory: the `run_dir` of the callback.

    Raises:
        ConfigError: it is no folder, or nothing in it is of a run.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError([f"DIR={str(directory)!r}: no such folder; expected the run_dir of an InTuneCallback"])
    ranks = [replace(_read_one(path), rank=rank) for rank, path in rank_folders(folder)]
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


def rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the ranks that left a file in a folder of theirs, in order."""
    found = ((re.fullmatch(r"rank(\d+)", path.name), path) for path in folder.glob("rank*"))
    ranks = [(int(match[1]), path) for match, path in found if match]
    return sorted((rank, path) for rank, path in ranks if (path / REPORT).exists() or (path / HISTORY).exists())


def _read_one(folder: Path) -> Run:
    notes: list[str] = []
    lines = _last_fit(list(_lines(folder / HISTORY, notes)), notes)
    report = _report(folder / REPORT, notes)
    if report is None:
        notes.append(f"no whole {REPORT}: the run was stopped hard, or goes on; the figures are from {HISTORY}")
        report = _unfinished(lines)
    return Run(folder, report, tuple(lines), tuple(notes))


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    if not path.exists():
        notes.append(f"no {HISTORY}: there is no course to draw")
        return
    unread = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict):
                yield line
            else:
                unread += 1
    if unread:
        lines = "1 line" if unread == 1 else f"{unread} lines"
        notes.append(f"{lines} of {HISTORY} could not be read; a run that is killed cuts off its last one")


def _last_fit(lines: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """The file is appended to, so a folder used again holds the lines of several fits; the report is of the last."""
    steps = [number(line.get("step")) for line in lines]
    known = [(i, step) for i, step in enumerate(steps) if step is not None]
    begins = [i for (_, before), (i, step) in itertools.pairwise(known) if step < before]
    if begins:
        notes.append(f"{begins[-1]} decisions of earlier fits are in {HISTORY} as well; only the last fit is shown")
        return lines[begins[-1] :]
    return lines


def _report(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        notes.append(f"{REPORT} could not be read: {error}")
        return None
    if not isinstance(found, dict):
        notes.append(f"{REPORT} could not be read: expected an object, got {type(found).__name__}")
        return None
    whole = _filled(found, WHOLE)
    whole["causes"] = [_filled(cause, CAUSE) for cause in whole["causes"] if isinstance(cause, dict)]
    whole["stages"] = [_stage(stage) for stage in whole["stages"] if isinstance(stage, dict)]
    return whole


def _stage(found: Mapping[str, Any]) -> dict[str, Any]:
    whole = _filled(found, STAGE)
    return whole | {"window_of": None if whole["window_of"] is None else str(whole["window_of"])}


def _filled(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return `found` with every key of `expected`; what is of another kind than expected there is left out."""
    whole = dict(found)
    for key, default in expected.items():
        given = found.get(key)
        if isinstance(default, dict):
            whole[key] = _filled(given if isinstance(given, dict) else {}, default)
        elif isinstance(default, (int, float)):
            whole[key] = given if number(given) is not None else default
        elif default is not None and not isinstance(given, type(default)):
            whole[key] = [] if default == [] else default
        else:
            whole[key] = given
    return whole


def _unfinished(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a report of what can be said without the end of the run."""
    moved = [i for i, line in enumerate(lines) if line.get("applied")]
    first = lines[: moved[0] + 1] if moved else lines
    last = lines[moved[-1] + 1 :] if moved else lines
    before, after = _side(first[-LAST_WINDOWS:]), _side(last[-LAST_WINDOWS:] or lines[-1:])
    after["allocation"] = _allocation(lines[-1], "after") if lines else {}
    names = after["allocation"]
    stages = [
        {
            **STAGE,
            "name": name,
            "unit": "items" if name.endswith(".window") or not _is_worker(name, lines) else "workers",
            "window_of": name.removesuffix(".window") if name.endswith(".window") else None,
            "first": before["allocation"].get(name, now),
            "current": now,
        }
        for name, now in names.items()
    ]
    given: dict[str, Any] = {"before": before, "after": after, "stages": stages, "changes": len(moved)}
    given["wall_s"] = _elapsed_s(lines)
    given["steps"] = int(number(lines[-1].get("step")) or 0) if lines else 0
    given["why"] = "the run has left no verdict: it was stopped hard, or goes on"
    given["next"] = "look again when it has ended"
    return _filled(given, WHOLE)


def _side(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seen = [line["observation"] for line in lines if isinstance(line.get("observation"), dict)]

    def middle(key: str) -> float | None:
        values = [value for one in seen if (value := number(one.get(key))) is not None]
        return median(values) if values else None

    keys = ("wait_frac", "exposed_wait_frac", "model_s", "cpus", "memory_used_bytes", "memory_limit_bytes")
    found: dict[str, Any] = {key: middle(key) for key in keys}
    found["throughput_samples_per_s"] = middle("samples_per_s")
    found |= {"windows": len(seen), "verdict": "not finished"}
    found["allocation"] = _allocation(lines[0], "before") if lines else {}
    return _filled(found, SIDE)


def _allocation(line: Mapping[str, Any], key: str) -> dict[str, Any]:
    given = line.get(key)
    return dict(given) if isinstance(given, dict) else {}


def _is_worker(name: str, lines: Sequence[dict[str, Any]]) -> bool:
    seen = lines[-1].get("observation") if lines else None
    rates = seen.get("rates") if isinstance(seen, dict) else None
    return not isinstance(rates, dict) or name in rates


def _elapsed_s(lines: Sequence[dict[str, Any]]) -> float:
    at = [value for line in lines if (value := number(line.get("at_s"))) is not None]
    return at[-1] - at[0] if at else 0.0
