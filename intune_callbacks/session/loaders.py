"""What was found of the loaders of one training, seen as one; and what of it is let go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from intune_callbacks.config import TunerConfig
from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.find import Found, find
from intune_callbacks.types import Clock, Hint

__all__ = ["GiveUp", "found_in", "hints_of", "leave", "left_of", "let_go", "look_for", "pipeline_of", "reasons_of"]

_left: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""By loader, the tuner's state at the end of its last fit: some call `live(loader)` anew in each epoch."""

GiveUp = Callable[[str, BaseException], None]


def found_in(
    loader: Any, config: TunerConfig, *, is_alone: bool = True, clock: Clock | None = None, wait: bool = True
) -> Found:
    """Return what can be tuned of a loader under these settings; of loaders that are paired, in their order."""
    return find(
        loader,
        clock=clock,
        max_workers=config.max_workers,
        workers_kind=config.workers_kind,
        ray_address=config.cluster_address,
        order=config.order if is_alone else "same",
        live=config.mode == "tune",
        wait=wait,
    )


def look_for(loader: Any, config: TunerConfig, is_alone: bool, give_up: GiveUp) -> Found:
    """Return what a loop can have tuned of a loader, ready for its first iterator.

    Args:
        config: mode, `workers_kind`, `max_workers` and `order`.
        is_alone: False where several loaders feed the same steps: their batches are paired.
    """
    try:
        found = found_in(loader, config, is_alone=is_alone, wait=False)
        if found.pipeline is not None:
            found.pipeline.prepare()
        return found
    except Exception as error:
        give_up("the first look at a loader", error)
        return Found(None, f"{type(loader).__name__}: {error}")


def pipeline_of(found: Mapping[str, Found]) -> Combined:
    """Return all that can be tuned, with the loaders' names in front of the stages when there are several."""
    return Combined({name: one.pipeline for name, one in found.items() if one.pipeline is not None})


def reasons_of(found: Mapping[str, Found]) -> tuple[str, ...]:
    """Return, for each loader that cannot be tuned, the reason and the smallest change that would help."""
    reasons = (one.why for one in found.values() if one.pipeline is None or not one.pipeline.stages())
    return tuple(dict.fromkeys(reasons))


def hints_of(found: Mapping[str, Found]) -> tuple[Hint, ...]:
    """Return what can be seen of the loaders, with the stages' names as in `pipeline_of`."""
    several = sum(one.pipeline is not None for one in found.values()) > 1
    return tuple(
        replace(hint, stage=f"{name}/{hint.stage}") if several and hint.stage else hint
        for name, one in found.items()
        for hint in one.hints
    )


def leave(loaders: Sequence[Any], state: dict[str, Any]) -> None:
    """Keep the state of a tuner that has changed something of one loader, for the next fit on that loader."""
    if state.get("allocation") and len(loaders) == 1:
        with suppress(TypeError):  # it has no hash, or nothing can refer to it weakly
            _left[loaders[0]] = state


def left_of(loaders: Sequence[Any]) -> dict[str, Any]:
    """Return what the last fit on this loader has left, empty where nothing was or there are several loaders."""
    with suppress(TypeError):
        return _left.get(loaders[0], {}) if len(loaders) == 1 else {}
    return {}


def let_go(loader: Any, found: Found) -> Found:
    """Return what is left of a find once the trainer has batches: all of it, or the reason why it delivered none.

    A pipeline that delivered none is closed, and the loader is as it was.
    """
    if found.pipeline is None or not found.pipeline.stages() or found.pipeline.stats().delivered:
        return found
    found.pipeline.close()
    why = (
        f"behind this loader, a {type(loader).__name__}, no iterator of DataLoader was found: its batches come another "
        "way, so nothing is tuned; let its __iter__ take them from super().__iter__(), or give the DataLoader itself"
    )
    # What is said of a stage holds for a stage that delivers.
    return Found(None, why, tuple(hint for hint in found.hints if not hint.stage))
