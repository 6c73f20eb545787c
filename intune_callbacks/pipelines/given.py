"""Whether a worker that starts now would get what those of before got, and what is to be said where it would not."""

from __future__ import annotations

from typing import Any

from intune_callbacks.pipelines.places import what_changed
from intune_callbacks.types import Hint

__all__ = ["CHANGED", "check_same", "hints_of_change", "hints_of_here"]

CHANGED = "the training changed the dataset after its workers had started: no more of them now"
ONLY_HERE = "the training process makes each batch itself: in a worker one raised {}"
KEPT_AWAY = (
    "the training changed the dataset after its workers had started{}, and one that starts later would get it as it is "
    "then: their number stays {} while it runs, and is yours to set"
)


def check_same(before: Any, now: Any) -> None:
    """Raise where a worker that starts now would get something else than those of before.

    Args:
        before: what `plain_values` returned when those started.
        now: what it returns now.

    Raises:
        RuntimeError: they differ.
    """
    if now != before:
        name = what_changed(before, now)
        raise RuntimeError(f"{CHANGED} ({name})" if name else CHANGED)


def hints_of_here(why: str, stage: str) -> tuple[Hint, ...]:
    """Return the word that batches are made in the training process for good.

    Args:
        why: what a worker raised where the training process did not.
        stage: which has 0 workers.
    """
    return (Hint(ONLY_HERE.format(why), "", "serial", stage),)


def hints_of_change(why_not: str, stage: str, workers: int) -> tuple[Hint, ...]:
    """Return what is to be said while a change of the dataset keeps workers away; nothing where something else does.

    Args:
        why_not: why what was wanted of the stage is not in force.
    """
    _, is_change, what = why_not.partition(CHANGED)
    return (Hint(KEPT_AWAY.format(what, workers), "", "order", stage),) if is_change else ()
