"""Where something stands in what `plain_values` found: the names that lead to it."""

from __future__ import annotations

from typing import Any

from intune_callbacks.pipelines.look import DRAWS

__all__ = ["generator_in", "what_changed"]


def what_changed(before: Any, now: Any) -> str:
    """Return where two returns of `plain_values` differ, as ``Rows.options.epoch``; empty where no name tells."""
    names: list[str] = []
    while isinstance(before, (tuple, list)) and type(now) is type(before) and len(now) == len(before):
        names += _named(before, names)
        before, now = next(((one, other) for one, other in zip(before, now, strict=True) if one != other), (None, None))
    return ".".join(names)


def generator_in(looked: Any) -> str:
    """Return where a generator of random numbers stands, as ``Rows.transform.rng``; empty where there is none."""
    return ".".join(_generator_in(looked, ()) or ())


def _generator_in(looked: Any, names: tuple[str, ...]) -> tuple[str, ...] | None:
    if looked is DRAWS:
        return names
    if not isinstance(looked, (tuple, list)):
        return None
    inside = (*names, *_named(looked, names))
    return next((found for part in looked if (found := _generator_in(part, inside)) is not None), None)


def _named(looked: Any, names: Any) -> tuple[str, ...]:
    """Return what a part of a look adds to the names that lead there: an attribute's, and the class of the first."""
    if isinstance(looked, tuple) and len(looked) == 2:
        name, kind = looked
        if isinstance(name, str):
            return (name,)
        if isinstance(kind, str) and not names and kind != "tuple":
            return (kind,)
    return ()
