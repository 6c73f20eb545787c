"""One iterator of a loader in a loop of the user's own: it hands on the batches and tells of each fetch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from intune_callbacks.measure.wait import StepTimer
from intune_callbacks.types import Clock

if TYPE_CHECKING:
    from intune_callbacks.session.loop_fit import Fit

__all__ = ["Fetches", "Telling", "Together", "Unseen", "told"]


class Together:
    """Fetches between two looks at the counters: they are counted here as they come, and told together.

    To tell of each took up to a twentieth of a step of one millisecond.

    Attributes:
        until_s, most: a fetch that begins later by that clock, or behind so many, is told by itself.
        batches, samples, wait_s: since they were told last.
        last_s: when the last of them was over, by that clock.
    """

    __slots__ = ("batches", "count", "last_s", "most", "now", "samples", "until_s", "wait_s")

    def __init__(self, clock: Clock, count: Callable[[Any], int]) -> None:
        self.now, self.count = clock.wall, count
        self.batches, self.samples, self.wait_s, self.until_s = 0, 0, 0.0, 0.0
        self.last_s, self.most = 0.0, 0

    def tell(self, timer: StepTimer) -> tuple[int, int]:
        """Have the timer count them and return how many they were and their samples; the next one is told by itself."""
        batches, samples, wait_s = self.batches, self.samples, self.wait_s
        self.batches, self.samples, self.wait_s, self.until_s = 0, 0, 0.0, 0.0
        if batches or wait_s:
            timer.count(batches, wait_s, self.last_s)
        return batches, samples


def told(inner: Any, fit: Fit, place: int, owner: Any) -> tuple[Iterator[Any], object]:
    """Return an iterator whose fetches are told, and its token.

    Args:
        inner: the iterator; one of TensorFlow's is changed, as compiled functions and checkpoints take no other.
        place: of the loader among those of the fit.
        owner: held as long as the iterator is, such as the `Live`, which so ends behind it and not before.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and hasattr(tensorflow, "data"):
        with suppress(ImportError, TypeError):  # in a version that looks otherwise it is wrapped as any other
            from intune_callbacks.session import tf_fetches

            if tf_fetches.is_plain(inner):
                return inner, tf_fetches.told(inner, fit, place, owner)
    fetches = Fetches(inner, fit, place, owner)
    return fetches, fetches.token


NOT_ASKED = (
    "what live() gave was not asked for a batch in this process; let the training loop go over it: a loader that a "
    "framework makes anew from its dataset and sampler is another one"
)
IN_A_GRAPH = (
    "no step was seen: a compiled function that iterates over the dataset, or keeps its iterator, and a distribution "
    "strategy that was given it tell of none and nothing is tuned; call the function for each step, and give it the "
    "iterator: step(iterator); live(...) around what the strategy made measures its waits"
)
SPREAD = (
    "no step was seen: a compiled function took the batches of what a distribution strategy made, and tells of none; "
    "give it the batch, step(next(iterator)), to have its waits measured"
)


class Telling:
    """What both kinds of iterators do: tell of a fetch, and of their end."""

    __slots__ = ()  # else an iterator of TensorFlow's could not become one of these
    _fit: Fit
    _place: int
    token: object

    def _fetched(self, fetch: Callable[[], Any], ends: tuple[type[Exception], ...]) -> Any:
        fit = self._fit
        if fit.is_closed:
            return fetch()
        fit.fetch_begin(self._place)
        try:
            batch = fetch()
        except BaseException as error:
            self._failed(error, ends)
            raise
        fit.fetch_end(self._place, batch, True)
        return batch

    def _failed(self, error: BaseException, ends: tuple[type[Exception], ...]) -> None:
        self._fit.fetch_end(self._place, None, False)
        if isinstance(error, ends):
            self._fit.epoch_end(self._place, self.token)

    def __del__(self) -> None:
        fit = vars(self).get("_fit")
        if fit is not None:
            fit.epoch_end(self._place, self.token, is_dropped=True)


class Fetches(Telling):
    """One iterator of a loader, each fetch timed; arguments are those of `told`."""

    def __init__(self, inner: Any, fit: Fit, place: int, owner: Any) -> None:
        self.inner, self._fit, self._owner = inner, fit, owner
        self._place, self.token = place, object()
        self._together = fit.together

    def __iter__(self) -> Fetches:
        return self

    def __next__(self) -> Any:
        together = self._together
        begin_s = together.now()
        if begin_s >= together.until_s or together.batches >= together.most:
            return self._fetched(self.inner.__next__, (StopIteration,))
        try:
            batch = self.inner.__next__()
        except BaseException as error:
            together.last_s = together.now()
            together.wait_s += together.last_s - begin_s
            self._failed(error, (StopIteration,))
            raise
        together.last_s = end_s = together.now()
        together.wait_s += end_s - begin_s
        together.batches += 1
        together.samples += together.count(batch)
        return batch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch with the same workers, as a DataLoader asks of the iterator it keeps."""
        self._fit.again(self._place, self.token)
        self.inner._reset(loader, first_iter)

    def __len__(self) -> int:
        return len(self.inner)

    def __bool__(self) -> bool:
        return bool(self.inner)  # not by a length it may not have

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Asked for by who is given an iterator: Grain's checkpoints take one that is none of its own for another.
        kind: type = self.inner.__class__
        return kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "_fit", "_owner", "_place", "_together", "token"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Unseen:
    """Batches of a tf.data pipeline that compiled functions took: only its own end has counted them.

    Args:
        pipeline: of the loader; anything else than a tf.data pipeline has none.

    Attributes:
        batch_samples: of such a batch, 0 while unknown.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline if hasattr(pipeline, "waits") else None
        self._batches = self._samples = self.batch_samples = 0
        self._wait_s = 0.0

    def tell(self, timer: StepTimer, seen: int) -> int:
        """Count what was taken since the last call; return the samples in it.

        Args:
            seen: batches of the whole run that were fetched in Python.
        """
        if self._pipeline is None:
            return 0
        now = self._pipeline.waits()
        batches, samples = now.delivered - seen - self._batches, now.samples - self._samples
        if seen:  # those are among them
            samples = batches * now.samples // max(1, now.delivered)
        wait_s, self._wait_s, self._samples = now.wait_s - self._wait_s, now.wait_s, now.samples
        if batches <= 0:
            return 0
        timer.count(batches, wait_s)
        self._batches += batches
        self.batch_samples = round(samples / batches)
        return max(int(samples), int(batches))

    def why_none(self, is_seen: int, is_handed: bool) -> str:
        """Return why no step was seen, and what would let them be; empty where some was, or its pipeline tells them.

        Args:
            is_seen: whether any was.
            is_handed: whether a compiled function was given the iterator.
        """
        if is_seen or (self._pipeline is not None and self._pipeline.is_inside):
            return ""
        return IN_A_GRAPH if self._pipeline is not None else SPREAD if is_handed else NOT_ASKED
