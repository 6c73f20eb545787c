"""DataLoaders whose workers own shards or states: only the batches in flight can change without changing the order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from intune_callbacks.pipelines.base import clamp
from intune_callbacks.pipelines.watched import WINDOW_KNOB, WORKERS_KNOB
from intune_callbacks.types import Allocation, Clock, PipelineStats, Stage

__all__ = ["WindowLoader"]

WORKERS, WINDOW = "load", "load.window"
# As in `torch_loader`.
MAX_WINDOW = 4096


class WindowLoader:
    """The batches in flight of a stock multiprocess iterator: the one number that is exact for iterable-style
    datasets and StatefulDataLoader, whose workers own shards or states. Workers stay as the user set them; fewer
    batches in flight than workers leaves the surplus workers idle.

    Args:
        loader: the user's loader, `num_workers` >= 1.
        clock: wall and CPU clock.
    """

    def __init__(self, loader: DataLoader[Any], *, clock: Clock) -> None:
        self._loader, self._clock = loader, clock
        self._window = (loader.prefetch_factor or 2) * loader.num_workers
        self._running: weakref.ref[Any] | None = None
        self._delivered = 0
        self._filling = threading.Lock()

    def prepare(self) -> None:
        """Nothing to do before the first `iter()`."""

    @property
    def _iterator(self) -> Any:
        # Weak: in a cycle with us the iterator would be finalised at some collection, perhaps in a forked child.
        return self._running() if self._running is not None else None

    def adopt(self, iterator: Any) -> Any:
        """Replace the rule by which the running iterator sends out work; it stays the same object."""
        if iterator is not self._iterator and isinstance(iterator, _BaseDataLoaderIter):
            self._delivered += self._iterator._num_yielded if self._iterator is not None else 0
            self._running = weakref.ref(iterator)
            # Each iterator fills itself: two of one loader may run side by side.
            iterator._try_put_index = partial(self._fill, self._running)  # type: ignore[attr-defined]
        return iterator

    def _fill(self, running: weakref.ref[Any]) -> None:
        """Send out work until the window is full, through the iterator's own method."""
        # One thread may fetch while another sets the window: two at once would draw the same indices.
        with self._filling:
            self._fill_alone(running())

    def _fill_alone(self, iterator: Any) -> None:
        while self._in_flight(iterator) < self._window:
            sent, factor = iterator._send_idx, iterator._prefetch_factor
            # The stock method asserts outstanding <= prefetch_factor * workers, for this one call too low a limit.
            iterator._prefetch_factor = MAX_WINDOW
            try:
                type(iterator)._try_put_index(iterator)
            finally:
                iterator._prefetch_factor = factor
            if iterator._send_idx == sent:
                return

    @staticmethod
    def _in_flight(iterator: Any) -> int:
        if iterator._dataset_kind == _DatasetKind.Map:
            return int(iterator._send_idx - iterator._rcvd_idx)
        return int(iterator._tasks_outstanding)

    def stages(self) -> tuple[Stage, ...]:
        workers = self._loader.num_workers
        return (
            Stage(WORKERS, "cpu", "workers", workers, workers, workers, sequential=True, knob=WORKERS_KNOB),
            Stage(WINDOW, "memory", "items", 1, MAX_WINDOW, self._window, window_of=WORKERS, knob=WINDOW_KNOB),
        )

    def stats(self) -> PipelineStats:
        delivered = self._delivered + (self._iterator._num_yielded if self._iterator is not None else 0)
        return PipelineStats(self._clock.wall(), delivered, {})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        if WINDOW in wanted and wanted[WINDOW] != self._window:
            self._window = wanted[WINDOW]
            iterator = self._iterator
            if iterator is not None and not iterator._shutdown:
                iterator._try_put_index()
        return {WORKERS: self._loader.num_workers, WINDOW: self._window}

    def release(self) -> None:
        """Give the running iterator its own rule back."""
        iterator = self._iterator
        # With more in flight than the stock rule allows, its assertion would end the epoch: it keeps ours.
        if iterator is not None and self._in_flight(iterator) < iterator._prefetch_factor * iterator._num_workers:
            iterator.__dict__.pop("_try_put_index", None)

    def close(self) -> None:
        self.release()
