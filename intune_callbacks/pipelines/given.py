"""What a worker process would get of an object of the user's, so that a later one is known to get the same."""

from __future__ import annotations

from typing import Any

__all__ = ["plain_values"]

NESTED, MOST_PARTS = 4, 64
"""How deep, and how many parts of each object, are looked at for values the training changed. A choice: a
large dataset must not hold up the training."""


def plain_values(given: Any, depth: int = NESTED) -> Any:
    """Return the numbers and strings in an object and in what it holds, so that two such returns can be compared."""
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if depth == 0:
        return None
    if isinstance(given, list | tuple):
        return [plain_values(part, depth - 1) for part in given[:MOST_PARTS]]
    held = getattr(given, "__dict__", None)
    if not isinstance(held, dict):
        return None
    return {name: plain_values(held[name], depth - 1) for name in list(held)[:MOST_PARTS]}
