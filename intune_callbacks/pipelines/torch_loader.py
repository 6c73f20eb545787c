"""A map-style torch.utils.data.DataLoader as the user wrote it, made live.

A running iterator is taken over: its batches in flight are delivered first, and ours continues from its sampler.
Indices are drawn in the training thread as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from intune_callbacks.pipelines.base import clamp
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.elastic import ElasticMap
from intune_callbacks.pipelines.torch_workers import Fetch, Start, carry_tensor, context_of, pin
from intune_callbacks.pipelines.watched import WINDOW_KNOB, WORKERS_KNOB
from intune_callbacks.pipelines.workers import ProcessPool
from intune_callbacks.types import Allocation, Clock, PipelineStats, Stage

__all__ = ["LoaderIterator", "MapLoader"]

WORKERS, WINDOW = "load", "load.window"
MAX_PROCESSES, MAX_THREADS, MAX_WINDOW = 64, 256, 4096


class LoaderIterator:
    """What the loader's `iter()` returns once it is live; nothing holds it but its user, so dropping it ends it."""

    def __init__(self, owner: MapLoader, sampler: Iterator[Any], base_seed: int, first: int, stock: Any) -> None:
        self._owner, self._base_seed, self._stock = owner, base_seed, stock
        self._number = first
        self.engine = owner._engine(self._numbered(sampler, base_seed, first), first)

    @staticmethod
    def _numbered(sampler: Iterator[Any], base_seed: int, first: int) -> Iterator[tuple[int, int, Any]]:
        # A generator function without `self`: the engine's threads must not keep this iterator alive.
        for number, index in enumerate(sampler, first):
            yield base_seed, number, index

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        batch = self._drain() if self._stock is not None else next(self.engine)
        self._number += 1
        self._owner._delivered += 1
        return batch

    def _drain(self) -> Any:
        """Deliver what the stock iterator still has in flight, then ours."""
        try:
            return self._stock._next_data()
        except StopIteration:
            self._drop_stock()
            return next(self.engine)

    def _drop_stock(self) -> None:
        stock, self._stock = self._stock, None
        if stock is not None:
            stock._shutdown_workers()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Start the next epoch with the same children (`persistent_workers`), as the stock iterator does."""
        self._drop_stock()
        self.engine.close()
        source = self._numbered(iter(loader._index_sampler), self._base_seed, self._number)
        self.engine = self._owner._engine(source, 0)
        self.engine.prime()

    def close(self) -> None:
        """Stop the workers; the iterator ends."""
        self._drop_stock()
        self.engine.close()
        self._owner._ended(self.engine)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # An interpreter on its way out has no threading left to complain with.
            return


class MapLoader:
    """A map-style DataLoader with any sampler, collate function, init function, generator or context.

    Args:
        loader: the user's loader.
        clock: wall and CPU clock.
        max_workers: upper limit of `load`.
        kind: ``process`` (the user's dataset was written for it) or ``thread``.
    """

    def __init__(
        self, loader: DataLoader[Any], *, clock: Clock, max_workers: int | None = None, kind: str = "process"
    ) -> None:
        self._loader, self._clock, self._kind = loader, clock, kind
        self._high = max_workers or (MAX_PROCESSES if kind == "process" else MAX_THREADS)
        self._workers = min(max(1, loader.num_workers), self._high)
        self._window = max(2, (loader.prefetch_factor or 2) * loader.num_workers)
        self._counters = Counters()
        self._delivered = 0
        self._pool: ProcessPool | None = None
        self._base_seed = 0
        self._current: weakref.ref[LoaderIterator] | None = None
        self._patched = False

    # -- taking over ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Nothing to do before the first `iter()`: a running iterator is taken over exactly."""

    def adopt(self, iterator: Any) -> Any:
        """Continue a running stock iterator in our engine; later epochs start in it at once."""
        if type(iterator) not in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
            # Ours already, or a subclass with rules of its own: leave it.
            return iterator
        loader = self._loader
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            # Nothing more is sent to the stock workers; what they have in flight is delivered first.
            iterator._try_put_index = _nothing  # type: ignore[method-assign]
            first, stock = iterator._send_idx, iterator
        else:
            first, stock = iterator._num_yielded, None
        self._base_seed = iterator._base_seed
        ours = LoaderIterator(self, iterator._sampler_iter, self._base_seed, first, stock)
        self._current = weakref.ref(ours)
        ours._number = iterator._num_yielded
        if stock is not None:
            ours.engine.prime()
        loader._get_iterator = self._get_iterator  # type: ignore[method-assign]
        self._patched = True
        if loader._iterator is iterator:
            loader._iterator = ours  # type: ignore[assignment]
        return ours

    def _get_iterator(self) -> Any:
        """The loader's own `_get_iterator` from the second epoch on, drawing random numbers in the stock order."""
        loader = self._loader
        sampler = iter(loader._index_sampler)
        self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        if not loader.persistent_workers:
            # As in the stock loader, children see the dataset as it is at the start of each epoch.
            self._pool = None
        ours = LoaderIterator(self, sampler, self._base_seed, 0, None)
        self._current = weakref.ref(ours)
        if loader.num_workers > 0:
            ours.engine.prime()
        return ours

    def _engine(self, source: Iterator[Any], pulled: int) -> ElasticMap[Any]:
        loader, process = self._loader, self._kind == "process"
        fetch = Fetch(loader, seeded=process)
        if process and self._pool is None:
            start = Start(loader.dataset, loader.worker_init_fn, self._base_seed)
            self._pool = ProcessPool(fetch, context_of(loader.multiprocessing_context), start, carry_tensor)
        return ElasticMap(
            source,
            None if process else fetch,
            workers=self._workers,
            window=self._window,
            ordered=loader.in_order,
            pool=self._pool,
            feed=True,
            hold_at=self._length(pulled),
            finish=self._pin(),
            timeout_s=loader.timeout,
            counters=self._counters,
            clock=self._clock,
            name=WORKERS,
        )

    def _length(self, pulled: int) -> int | None:
        """Batches left when the stock loader, too, would not look for the end before it is asked to."""
        if self._loader.num_workers > 0:
            return None
        try:
            return max(0, len(self._loader._index_sampler) - pulled)
        except (TypeError, NotImplementedError):
            return None

    def _pin(self) -> Callable[[Any], Any] | None:
        if not self._loader.pin_memory or not torch.accelerator.is_available():
            return None
        device = torch.accelerator.current_accelerator()
        if device is None or device.type == "mps":
            return None
        return pin(torch.accelerator.current_device_index(), device.type)

    def _ended(self, engine: ElasticMap[Any]) -> None:
        if not self._loader.persistent_workers:
            self._drop_pool(engine.pool)

    def _drop_pool(self, pool: ProcessPool | None) -> None:
        if pool is not None:
            pool.close()
        if pool is self._pool:
            self._pool = None

    def _live(self) -> ElasticMap[Any] | None:
        iterator = self._current() if self._current is not None else None
        return iterator.engine if iterator is not None else None

    # -- the pipeline protocol -----------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(WORKERS, "cpu", "workers", 1, self._high, self._workers, knob=WORKERS_KNOB),
            Stage(WINDOW, "memory", "items", 1, MAX_WINDOW, self._window, window_of=WORKERS, knob=WINDOW_KNOB),
        )

    def stats(self) -> PipelineStats:
        engine = self._live()
        reading = engine.stats() if engine is not None else self._counters.reading(0, self._window)
        return PipelineStats(self._clock.wall(), self._delivered, {WORKERS: reading})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        self._workers = wanted.get(WORKERS, self._workers)
        self._window = wanted.get(WINDOW, self._window)
        engine = self._live()
        if wanted and engine is not None:
            engine.resize(self._workers, self._window)
        return {WORKERS: self._workers, WINDOW: self._window}

    def release(self) -> None:
        """Give the loader its own iterator back from the next epoch on."""
        if self._patched:
            self._loader.__dict__.pop("_get_iterator", None)
            if isinstance(self._loader._iterator, LoaderIterator):
                self._loader._iterator = None
            self._patched = False

    def close(self) -> None:
        iterator = self._current() if self._current is not None else None
        if iterator is not None:
            iterator.close()
        self._drop_pool(self._pool)
        self.release()


def _nothing() -> None:
    return None
