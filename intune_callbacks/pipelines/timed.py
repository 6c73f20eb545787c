"""A running stock iterator behind a stopwatch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Executor
from threading import Thread
from types import FrameType
from typing import Any, Protocol

from intune_callbacks.pipelines.delivered import Delivery, Followed

__all__ = ["TimedIterator", "has_thread"]

DEEPEST, LONGEST = 4, 256
"""How deep, and in how long dicts, one looks for a thread."""


def has_thread(iterator: object) -> bool:
    """Return whether an iterator, or one inside it, is a thread or holds one, which then makes its batches ahead."""
    level: list[object] = [iterator]
    for _ in range(DEEPEST):
        if any(isinstance(value, (Thread, Executor)) for value in level):
            return True
        level = [part for value in level for part in _parts(value)]
    return False


def _parts(value: object) -> list[object]:
    kind = type(value)
    if not (kind is FrameType or hasattr(kind, "__next__") or (type(value) is dict and len(value) <= LONGEST)):
        return []
    # A frame also refers to the names around it, and to who called it.
    return [part for part in gc.get_referents(value) if kind is not FrameType or type(part) not in (dict, FrameType)]


class Owner(Protocol):
    """Who watches a loader."""

    watch: Any
    delivery: Delivery
    delivered: int


class TimedIterator:
    """Hands on the batches of the iterator behind it and times each fetch."""

    def __init__(self, inner: Iterator[Any], owner: Owner) -> None:
        self._inner, self._owner = inner, owner
        followed = Followed(owner.delivery, inner)
        self._followed = followed if followed.is_known else None

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        inner, owner, followed = self._inner, self._owner, self._followed
        if followed is None:
            batch = owner.watch.fetch(inner.__next__)
            owner.delivered += 1
            return batch
        try:
            batch = owner.watch.fetch(inner.__next__)
        except BaseException as error:
            followed.stopped(inner, error)
            raise
        owner.delivered += 1
        followed.delivered(inner)
        followed.sent(inner)
        return batch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch with the same workers, as a DataLoader asks of the iterator it keeps."""
        self._inner._reset(loader, first_iter)  # type: ignore[attr-defined]
        self._owner.watch.begin(self._inner)
        if self._followed is not None:
            self._followed.sent(self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
