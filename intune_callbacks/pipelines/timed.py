"""A running stock iterator behind a stopwatch."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.delivered import Followed
from intune_callbacks.types import Hint

if TYPE_CHECKING:
    from intune_callbacks.pipelines.watched import WatchedLoader

__all__ = ["AHEAD", "INSIDE", "TimedIterator", "made_ahead", "within"]

DEEPEST, LONGEST, MOST = 8, 256, 4096
"""How deep, in how long containers and among how many objects one looks for who makes the batches."""

# An iterator of the loader's own may do so, such as a `BackgroundGenerator`, or a `zip` of other loaders.
AHEAD = Hint("a thread makes the batches ahead, one after the other", kind="ahead", stage="load")
INSIDE = Hint(
    "loaders inside this one make its batches, in workers of their own, whose number is yours to set there",
    kind="serial",
    stage="load",
)


def made_ahead(iterator: object) -> Hint | None:
    """Return who makes the batches ahead where an iterator, or one inside it, is or holds a thread, or has workers."""
    workers = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", ())
    for value in within(iterator):
        if isinstance(value, (Thread, Executor)):
            return AHEAD
        if isinstance(value, workers):
            return INSIDE
    return None


def within(start: object, owner: object = None, closed: Any = ()) -> Iterator[object]:
    """Yield an object and what is inside it, the nearest first; what else it refers to leads to other people's.

    Args:
        owner: looked into whatever it is, of others only iterators, frames of generators and small containers are.
        closed: kinds of iterators that are not.
    """
    level, seen = [start], {id(start)}
    for _ in range(DEEPEST):
        yield from level
        inside = {id(part): part for value in level for part in _parts(value, owner, closed)}
        level = [part for key, part in inside.items() if key not in seen]
        seen |= inside.keys()
        if len(seen) > MOST:
            return


def _parts(value: object, owner: object, closed: Any) -> Iterator[object]:
    kind = type(value)
    if kind in (dict, list, tuple):
        # The globals of a module are no part of an iterator that was made there.
        holds = len(value) <= LONGEST and not (kind is dict and "__builtins__" in value)  # type: ignore[arg-type, operator]
    else:
        holds = value is owner or kind is FrameType or (hasattr(kind, "__next__") and not issubclass(kind, closed))
    for part in gc.get_referents(value) if holds else ():
        # A frame also refers to the names around it, and to who called it.
        if kind is not FrameType or type(part) not in (dict, FrameType):
            yield part


class TimedPulls:
    """Hands on the indices of a sampler, which the thread that trains asks for, and adds up their time."""

    def __init__(self, pulls: Iterator[Any], counters: Counters) -> None:
        self._pulls, self._counters = pulls, counters

    def __iter__(self) -> TimedPulls:
        return self

    def __next__(self) -> Any:
        begin_s = time.perf_counter()
        item = next(self._pulls)
        self._counters.pulled_s += time.perf_counter() - begin_s
        return item


class TimedIterator:
    """Hands on the batches of the iterator behind it and times each fetch."""

    def __init__(self, inner: Iterator[Any], owner: WatchedLoader) -> None:
        self._inner, self._owner = inner, owner
        self._time_pulls()
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
        self._time_pulls()
        if self._followed is not None:
            self._followed.sent(self._inner)

    def _time_pulls(self) -> None:
        inner: Any = self._inner
        pulls = getattr(inner, "_sampler_iter", None)
        if pulls is not None and not hasattr(pulls, "state_dict"):  # a StatefulDataLoader asks it for its state
            inner._sampler_iter = TimedPulls(pulls, self._owner.watch.counters)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
