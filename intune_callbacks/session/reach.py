"""Batches that nobody here delivered: such a loader is let go, and the report says so."""

from __future__ import annotations

from typing import Any

from intune_callbacks.pipelines.find import Found

__all__ = ["let_go"]


def let_go(loader: Any, found: Found) -> Found:
    """Return what is left of a find once the trainer has batches: all of it, or the reason why it delivered none.

    A pipeline that delivered none is closed, and the loader is as it was.

    Args:
        loader: what the trainer was given.
        found: what was made of it.
    """
    if found.pipeline is None or found.pipeline.stats().delivered:
        return found
    found.pipeline.close()
    why = (
        f"behind this loader, a {type(loader).__name__}, no iterator of DataLoader was found: its batches come another "
        "way, so nothing is tuned; let its __iter__ take them from super().__iter__(), or give the DataLoader itself"
    )
    # What is said of a stage holds for a stage that delivers.
    return Found(None, why, tuple(hint for hint in found.hints if not hint.stage))
