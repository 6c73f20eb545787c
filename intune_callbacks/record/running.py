"""Read the history of a run while it is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intune_callbacks.measure.verdict import Verdict, settle
from intune_callbacks.record.history import HISTORY, Tail
from intune_callbacks.record.process import has_ended
from intune_callbacks.record.report import REPORT
from intune_callbacks.types import Observation, Resources, Stage, StageRates

__all__ = ["Job", "Rank"]

REMEMBERED = 120
"""Decisions of a running fit that are drawn. A choice: about one for each column of a terminal."""
JUDGED = 5
"""Windows at the end that the verdict rests on. A choice: it says how it is now, and one odd window does not decide."""


class Rank:
    """One history file and the report that ends it.

    Args:
        folder: where ``history.jsonl`` is, or will be.
        name: of the rank, empty when there is only one.

    Attributes:
        decisions: the last ones of the run, as in the file, oldest first.
        change: the last decision that changed something or, in mode ``advise``, would have; None before that.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.decisions: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self.change: dict[str, Any] | None = None
        self._tail = Tail(folder / HISTORY)

    @property
    def is_over(self) -> bool:
        """True when the run has ended, and no other one has begun."""
        return self.is_reported or (bool(self.decisions) and has_ended(self.decisions[-1].get("process")))

    @property
    def is_reported(self) -> bool:
        """True when the report is newer than the last decision."""
        try:
            return (self.folder / REPORT).stat().st_mtime_ns >= self._tail.path.stat().st_mtime_ns
        except OSError:
            return False

    @property
    def modified_s(self) -> float | None:
        """When the last decision was written, seconds since the epoch."""
        try:
            return self._tail.path.stat().st_mtime
        except OSError:
            return None

    def read(self) -> list[dict[str, Any]]:
        """Take what was written since the last call, and return the decisions in it that belong to the run."""
        new, anew = self._tail.read()
        if anew:
            self.decisions.clear()
            self.change = None
        self.decisions.extend(new)
        moved = [decision for decision in new if decision["applied"] or decision["granted"]]
        self.change = moved[-1] if moved else self.change
        return new

    def verdict(self) -> Verdict:
        """Judge the last windows as the tuner does."""
        return settle([_observation(decision) for decision in list(self.decisions)[-JUDGED:]])


class Job:
    """The ranks of a run: one in its folder, which need not exist yet, or each in a folder ``rank{r}`` below it."""

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
        """True when every rank has written its report, or is not there any more."""
        return bool(self.ranks) and all(rank.is_over for rank in self.ranks)

    def read(self) -> list[tuple[Rank, dict[str, Any]]]:
        """Return the decisions that were written since the last call."""
        for path in sorted(self.folder.glob(f"rank*/{HISTORY}")):
            self._ranks.setdefault(path.parent.name, Rank(path.parent, path.parent.name))
        if (self.folder / HISTORY).is_file():
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
        resources=Resources(
            seen["cpus"] or 0.0, int(seen["memory_limit_bytes"] or 0), int(seen["memory_used_bytes"] or 0)
        ),
        exposed_wait_frac=seen["exposed_wait_frac"],
        seam_s=seen["seam_s"] or 0.0,
    )
