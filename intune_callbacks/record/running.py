"""Read the history of a run while it is written."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intune_callbacks.measure.verdict import Verdict, settle
from intune_callbacks.types import Observation, Resources, Stage, StageRates

__all__ = ["Job", "Rank"]

KEPT = 120
JUDGED = 5


class Rank:
    """One history file and the report that ends it.

    Only complete lines are read, so a line that is just being written is taken the next time. A file that was replaced
    or cut is read from its beginning; where a run was appended to an older one only the newer one counts.

    Args:
        folder: where ``history.jsonl`` is, or will be.
        name: of the rank, empty when there is only one.

    Attributes:
        decisions: the last ones of the run, as in the file, oldest first.
        change: the last decision that changed something or, in mode ``advise``, would have; None before that.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.change: dict[str, Any] | None = None
        self._offset, self._file = 0, 0

    @property
    def is_over(self) -> bool:
        """True when the report is newer than the last decision: the run has ended, and no other one has begun."""
        try:
            return (self.folder / "report.json").stat().st_mtime_ns >= self._history.stat().st_mtime_ns
        except FileNotFoundError:
            return False

    @property
    def modified_s(self) -> float | None:
        """When the last decision was written, seconds since the epoch."""
        try:
            return self._history.stat().st_mtime
        except FileNotFoundError:
            return None

    def read(self) -> list[dict[str, Any]]:
        """Take what was written since the last call, and return the decisions in it that belong to the run."""
        try:
            with self._history.open("rb") as file:
                file.seek(0, 2)
                if self._history.stat().st_ino != self._file or file.tell() < self._offset:
                    self._file, self._offset = self._history.stat().st_ino, 0
                    self._forget()
                file.seek(self._offset)
                written = file.read()
        except FileNotFoundError:
            self._offset = 0
            self._forget()
            return []
        complete = written[: written.rfind(b"\n") + 1]
        self._offset += len(complete)
        new: list[dict[str, Any]] = []
        for line in complete.splitlines():
            decision = _decision(line)
            if decision is None:
                continue
            if self.decisions and decision["step"] <= self.decisions[-1]["step"]:
                self._forget()
                new = []
            new.append(decision)
            self.decisions.append(decision)
            if decision["applied"] or decision["granted"]:
                self.change = decision
        return new

    def verdict(self) -> Verdict:
        """Judge the last windows as the tuner does."""
        return settle([_observation(decision) for decision in list(self.decisions)[-JUDGED:]])

    @property
    def _history(self) -> Path:
        return self.folder / "history.jsonl"

    def _forget(self) -> None:
        self.decisions.clear()
        self.change = None


class Job:
    """The ranks of a run: one in its folder, or each in a folder ``rank{r}`` below it.

    Args:
        folder: the run's ``run_dir``; it need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks: dict[str, Rank] = {}
        self._begun: set[str] = set()
        self._looked = False

    @property
    def ranks(self) -> list[Rank]:
        """The ranks of the run that goes on, without what an earlier one has left; before it, those of the earlier."""
        known = sorted((r for r in self._ranks.values() if r.decisions), key=lambda r: (len(r.name), r.name))
        return [rank for rank in known if rank.name in self._begun] or known

    @property
    def has_begun(self) -> bool:
        """True once a run was seen that had not ended."""
        return bool(self._begun)

    @property
    def is_over(self) -> bool:
        """True when every rank has written its report."""
        return bool(self.ranks) and all(rank.is_over for rank in self.ranks)

    def read(self) -> list[tuple[Rank, dict[str, Any]]]:
        """Return the decisions that were written since the last call."""
        for path in sorted(self.folder.glob("rank*/history.jsonl")):
            self._ranks.setdefault(path.parent.name, Rank(path.parent, path.parent.name))
        if (self.folder / "history.jsonl").is_file():
            self._ranks.setdefault("", Rank(self.folder))
        new = []
        for rank in self._ranks.values():
            read = rank.read()
            new += [(rank, decision) for decision in read]
            # A short run may begin and end between two looks.
            if rank.decisions and (not rank.is_over or (read and self._looked)):
                self._begun.add(rank.name)
        self._looked = True
        return new


def _decision(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds, None if that is no decision, as after a crash in the middle of a line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("observation"), Mapping) else None


def _observation(decision: Mapping[str, Any]) -> Observation:
    """Return of a decision what a verdict looks at."""
    seen = decision["observation"]
    rates = {
        name: StageRates(**{key: value or 0 for key, value in rate.items()}) for name, rate in seen["rates"].items()
    }
    elapsed_s, batches_per_s = seen["elapsed_s"] or 0.0, seen["batches_per_s"] or 0.0
    return Observation(
        step=decision["step"],
        at_s=decision["at_s"] or 0.0,
        elapsed_s=elapsed_s,
        batches=round(elapsed_s * batches_per_s),
        samples=0,
        batches_per_s=batches_per_s,
        samples_per_s=seen["samples_per_s"] or 0.0,
        wait_frac=seen["wait_frac"] or 0.0,
        model_s=seen["model_s"] or 0.0,
        stages=tuple(Stage(name, "cpu", "workers", 1, 1, 1) for name in rates),
        rates=rates,
        resources=Resources(seen["cpus"] or 0.0, seen["memory_limit_bytes"], seen["memory_used_bytes"]),
        exposed_wait_frac=seen["exposed_wait_frac"],
        seam_s=seen.get("seam_s") or 0.0,
    )
