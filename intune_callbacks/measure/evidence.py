"""What a cause is computed from beside the windows, and what a cause is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from intune_callbacks.types import Hint

__all__ = ["NONE", "Cause", "Evidence"]

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
        """Whether workers had better live on: not where they start only once, nor where fewer of them are enough."""
        return self.whole.get("epochs") != 1 and not any(h.kind == "shards" and h.line for h in self.hints)

    def hint(self, kind: str, stage: str = "") -> Hint | None:
        """Return the first hint of a kind that is about a stage or about the whole pipeline."""
        return next((h for h in self.hints if h.kind == kind and h.stage in ("", stage)), None)


NONE = Evidence()
"""Nothing is known beside the windows."""
