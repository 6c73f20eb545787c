"""What a cause is computed from beside the windows, and what a cause is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from intune_callbacks.types import Hint

__all__ = ["NONE", "Cause", "Evidence", "measured_hints", "tried"]

RAISED = 1.5
"""Factor on its workers from which on a stage counts as tried with more. A choice: less brings too little to see."""
WORKERS_LINE = "num_workers="
"""How a hint begins that says a number of workers before anything was measured."""

# fmt: off
Kind = Literal[
    "storage", "cpu", "workers", "serial", "files", "order", "held", "shards", "loader",
    "startup", "shuffle", "prefetch", "memory", "uneven", "model",
]
# fmt: on


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why the training is not faster.

    Args:
        kind: ``storage`` (long waits, little CPU), ``cpu`` (no CPU is free), ``workers`` (too few of them), ``serial``
            (one item at a time), ``files`` (too few), ``order`` (workers own the shards), ``held`` (what is finished
            waits for a slower one), ``shards`` (too few, or uneven), ``loader`` (computed in the training loop),
            ``startup`` (of workers, each epoch), ``shuffle`` (a buffer being filled), ``prefetch`` (none), ``memory``
            (the guard's limit), ``uneven`` (few long waits) or ``model``.
        stage: the stage it is about, empty for the whole pipeline.
        sentence: with the numbers it rests on.
        line: what to paste, lines apart; empty where nothing can be pasted or nothing is predicted to gain.
        gain: the promised factor on the throughput, 1.25 = 25 % faster; 1.0 where none is predicted.
    """

    kind: Kind
    stage: str
    sentence: str
    line: str = ""
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known beside the windows.

    Args:
        hints: oddities of the user's pipeline, see `intune_callbacks.types.Hint`.
        whole: figures of the whole run: ``wall_s``, ``seam_s``, ``paused_s``, ``first_batch_s``, ``epochs``.
        tried: stage name -> what more workers for it brought: samples/s then / before.
        vetoes: what the guard refused last.
        first: stage name -> its value at the start of the run.
        order: what the user gave for it, see `intune_callbacks.config.TunerConfig`.
    """

    hints: Sequence[Hint] = ()
    whole: Mapping[str, Any] = field(default_factory=dict)
    tried: Mapping[str, float] = field(default_factory=dict)
    vetoes: Sequence[str] = ()
    first: Mapping[str, int] = field(default_factory=dict)
    order: str = "same"

    @property
    def share(self) -> float:
        """Of the run's wall time, what is neither a pause nor the start of the pipeline."""
        wall_s, paused_s = self.whole.get("wall_s"), self.whole.get("paused_s")
        return min(1.0, max(0.0, 1.0 - (paused_s or 0.0) / wall_s)) if wall_s else 1.0

    @property
    def may_persist(self) -> bool:
        """Whether workers had better live on: not where they start only once, nor where fewer of them are enough.

        Nor where epochs are left: one that lives on has to finish what it had read ahead before the next begins. Nor
        where the dataset changes between epochs: it would go on with that of the first one.
        """
        is_said = any(h.kind in ("left", "changing") or (h.kind == "shards" and h.line) for h in self.hints)
        return self.whole.get("epochs") != 1 and not is_said

    @property
    def changes(self) -> bool:
        """Whether the dataset changes between epochs."""
        return self.hint("changing") is not None

    def hint(self, kind: str, stage: str = "") -> Hint | None:
        """Return the first hint of a kind that is about a stage or about the whole pipeline."""
        return next((h for h in self.hints if h.kind == kind and h.stage in ("", stage)), None)


NONE = Evidence()
"""Nothing is known beside the windows."""


def tried(decisions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, by stage, the most that clearly more workers for it alone brought in the decisions of a report."""
    found: dict[str, float] = {}
    for decision in decisions:
        before, after = decision["before"], decision["after"]
        moved = [name for name, n in after.items() if before.get(name) != n and not name.endswith(".window")]
        if decision["applied"] and decision["effect"] is not None and len(moved) == 1:
            (name,) = moved
            if after[name] >= RAISED * max(1, before.get(name, 1)):
                found[name] = max(decision["effect"], found.get(name, 0.0))
    return found


def measured_hints(hints: Sequence[Hint], wanted: Mapping[str, int], last: Sequence[Cause]) -> tuple[Hint, ...]:
    """Return the hints without those that say a smaller number of workers than what was measured.

    Args:
        hints: of the pipeline as it is written, and as it ran.
        wanted: stage name -> the number that this run gave reasons for.
        last: why it is not faster now, what limits first.
    """
    waits = bool(last) and last[0].kind == "storage"

    def is_refuted(hint: Hint) -> bool:
        least = re.match(rf"{WORKERS_LINE}(\d+)", hint.line)
        if hint.kind != "workers" or least is None:
            return False
        return waits or any(n > int(least[1]) for name, n in wanted.items() if not name.endswith(".window"))

    return tuple(hint for hint in hints if not is_refuted(hint))
