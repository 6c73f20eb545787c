"""DataLoaders whose workers own shards or states: only the batches in flight can change without changing the order."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data.dataloader import DataLoader

from intune_callbacks.pipelines.base import MAX_WINDOW, LiveLoader, clamp, windowed
from intune_callbacks.pipelines.counters import nbytes
from intune_callbacks.pipelines.delivered import Delivery, Followed
from intune_callbacks.pipelines.torch.private import RUNNING
from intune_callbacks.pipelines.torch.reach import Seam, dataset_of, hidden_in, is_of
from intune_callbacks.pipelines.torch.sampler import is_settled
from intune_callbacks.pipelines.watched import WINDOW_KNOB, WORKERS_KNOB
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.types import Allocation, Clock, Hint, PipelineStats, Stage

__all__ = ["WORKERS", "WindowLoader"]

WORKERS, WINDOW = "load", "load.window"
# Where torch puts the tensors of each batch that a worker sends.
SHARED = "/dev/shm"


class WindowLoader(LiveLoader):
    """The batches in flight of a stock multiprocess iterator: the one number that is exact for iterable-style
    datasets and StatefulDataLoader, whose workers own shards or states. Workers stay as the user set them; fewer
    batches in flight than workers leaves the surplus workers idle. More than in stock are as many as half of /dev/shm,
    through which they come, and of a process's descriptors, one for each tensor, have room for.

    Args:
        loader: the user's loader, `num_workers` >= 1.
        in_order: False lets its iterators deliver as torch's own do with ``in_order=False``.
    """

    def __init__(self, loader: DataLoader[Any], *, clock: Clock, in_order: bool = True) -> None:
        self._loader, self._clock, self._in_order = loader, clock, in_order
        self._window = own = (loader.prefetch_factor or 2) * loader.num_workers
        # A sampler that draws as it goes is read as far ahead as in stock.
        self._low, self._most = (1, MAX_WINDOW) if is_settled(loader._index_sampler) else (own, own)
        self._seam = Seam(loader, self._get_iterator)
        # Weak: in a cycle with us an iterator would be finalised at some collection, perhaps in a forked child.
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running: weakref.ref[Any] | None = None
        self._delivered = 0
        self._largest: tuple[int, int] | None = None  # bytes and tensors of a batch
        self._delivery = Delivery(loader.num_workers, dataset_of(loader), clock)
        self._startup = Startup()
        self._filling = threading.Lock()

    def prepare(self) -> None:
        """See each iterator of the loader from its start."""
        self._seam.open()

    @property
    def _iterator(self) -> Any:
        return self._running() if self._running is not None else None

    def _get_iterator(self) -> Any:
        """In place of the loader's own `_get_iterator`."""
        before, begin_s = self._iterator, self._clock.wall()
        iterator = self._make()
        self._startup.add(self._loader.num_workers, self._clock.wall() - begin_s)
        if self._is_meant(iterator):
            self._take(iterator)
            if before is not None and not before._shutdown and before._task_info:
                self._running = weakref.ref(before)  # somebody validates on the loader in mid-epoch
        return iterator

    def _make(self) -> Any:
        return self._seam.stock()

    def adopt(self, iterator: Any) -> Any:
        """Replace the rule by which the running iterator sends out work; it stays the same object."""
        self.prepare()
        found = hidden_in(iterator, self._loader, self._is_meant)
        self._running = None
        if found is not None:
            self._take(found)
        return iterator

    def _is_meant(self, value: object) -> bool:
        return is_of(self._loader, value) and all(hasattr(value, name) for name in RUNNING)

    def _take(self, iterator: Any) -> None:
        self._running = weakref.ref(iterator)
        if iterator not in self._taken:
            self._taken.add(iterator)
            if not self._in_order:
                iterator._in_order = False
            # Each iterator fills itself: two of one loader may run side by side.
            followed = Followed(self._delivery, iterator)
            iterator._try_put_index = partial(self._fill, self._running, followed)
            iterator._next_data = partial(self._next_data, self._running, followed)

    def _next_data(self, running: weakref.ref[Any], followed: Followed) -> Any:
        iterator: Any = running()
        try:
            batch = self._fetch(iterator)
        except BaseException as error:
            followed.stopped(iterator, error)
            raise
        self._delivered += 1
        if self._largest is None or self._window > _most_in_stock(iterator):
            size, tensors = self._largest or (0, 0)
            self._largest = max(size, nbytes(batch)), max(tensors, _tensors(batch))
        followed.delivered(iterator)
        return batch

    def _fetch(self, iterator: Any) -> Any:
        return type(iterator)._next_data(iterator)

    def _fill(self, running: weakref.ref[Any], followed: Followed) -> None:
        """Send out work until the window is full, through the iterator's own method."""
        # One thread may fetch while another sets the window: two at once would draw the same indices.
        with self._filling:
            iterator = running()
            self._fill_alone(iterator)
            followed.sent(iterator)

    def _fill_alone(self, iterator: Any) -> None:
        while (flying := _in_flight(iterator)) < self._window:
            if flying >= _most_in_stock(iterator) and not self._has_room(flying + 1):
                if self._largest is not None:
                    self._window = flying
                return
            sent, factor = iterator._send_idx, iterator._prefetch_factor
            # The stock method asserts outstanding < prefetch_factor * workers, for this one call too low a limit; out
            # of order it is each worker's share, too.
            in_order, most = getattr(iterator, "_in_order", True), max(self._window, iterator._tasks_outstanding + 1)
            iterator._prefetch_factor = MAX_WINDOW if in_order else -(-most // iterator._num_workers)
            try:
                type(iterator)._try_put_index(iterator)
            finally:
                iterator._prefetch_factor = factor
            if iterator._send_idx == sent:
                return
            self._was_sent(iterator, sent)

    def _has_room(self, batches: int) -> bool:
        """Return whether so many batches may be in flight, more than in stock; not before the size of one is known."""
        if self._largest is None:
            return False
        size, tensors = self._largest
        by_descriptor = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
        if by_descriptor and 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * batches * tensors:  # -1: no limit
            return False
        with suppress(OSError):  # there is none
            shared = os.statvfs(SHARED)
            # Of those in flight some are in it already: they count twice, so that others' batches find room, too.
            return 2 * batches * size <= shared.f_bavail * shared.f_frsize
        return True

    def _was_sent(self, iterator: Any, number: int) -> None:
        """Called for each batch that is asked of a worker."""

    @property
    def late_hints(self) -> tuple[Hint, ...]:
        """What the loop has shown of its epochs, and its workers of the shards."""
        return self._delivery.hints

    def stages(self) -> tuple[Stage, ...]:
        workers = self._loader.num_workers
        load = Stage(
            *(WORKERS, "cpu", "workers", workers, workers, workers),
            sequential=True,
            knob=WORKERS_KNOB,
            startup_s=0.0 if self._loader.persistent_workers else self._startup.each_s,
            delivering=self._delivery.delivering,
        )
        return windowed(load, self._window, low=self._low, high=self._most, knob=WINDOW_KNOB)

    def stats(self) -> PipelineStats:
        return PipelineStats(self._clock.wall(), self._delivered, {})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        if WINDOW in wanted and wanted[WINDOW] != self._window:
            self._window = wanted[WINDOW]
            iterator = self._iterator
            if iterator is not None and not iterator._shutdown:
                iterator._try_put_index()
        return {WORKERS: self._loader.num_workers, WINDOW: self._window}

    def release(self) -> None:
        """Give the running iterators their own rule back, and the loader its own way to make them."""
        self._seam.close()
        for iterator in list(self._taken):
            vars(iterator).pop("_next_data", None)
            if not self._in_order:
                iterator._in_order = self._loader.in_order
            iterator._try_put_index = partial(_send_as_stock, weakref.ref(iterator))
            if _in_flight(iterator) <= _most_in_stock(iterator):
                _give_rule_back(iterator)
        self._taken.clear()
        self._running = None


def _tensors(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return sum(map(_tensors, parts))


def _in_flight(iterator: Any) -> int:
    """Return how many batches are being made or wait to be delivered.

    Not the iterator's own count, in which all stays that was asked of a worker beyond its end, and nobody answers.
    """
    status = iterator._workers_status
    return sum(len(task) > 1 or status[task[0]] for task in iterator._task_info.values())


def _most_in_stock(iterator: Any) -> int:
    return int(iterator._prefetch_factor * iterator._num_workers)


def _send_as_stock(running: weakref.ref[Any]) -> None:
    """Send out nothing while more is in flight than the stock rule allows: its assertion would end the epoch."""
    iterator: Any = running()
    if _in_flight(iterator) < _most_in_stock(iterator):
        _give_rule_back(iterator)
        iterator._try_put_index()


def _give_rule_back(iterator: Any) -> None:
    status = iterator._workers_status
    iterator._tasks_outstanding = sum(len(task) == 1 and status[task[0]] for task in iterator._task_info.values())
    del iterator._try_put_index
