"""What all iterators of one DataLoader share: the wanted numbers, the counters, and how either engine is built."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.elastic import ElasticMap
from intune_callbacks.pipelines.torch_workers import Fetch, Start, carry_tensor, context_of, pin
from intune_callbacks.pipelines.watched import Watch
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.pipelines.workers import ProcessPool
from intune_callbacks.types import Clock

__all__ = ["WORKERS", "Engines"]

WORKERS = "load"

# A fork takes so long, plus so much per byte that has to be mapped anew: assumed until one was measured.
FORK_S, FORK_S_PER_BYTE = 0.01, 0.02 / 2**30

NESTED, MOST_PARTS = 4, 64
"""How deep, and how many parts of each object, are looked at for values the training changed. A choice: a
large dataset must not hold up the training."""


class Engines:
    """Builds the stock engine of one loader and ours, and holds what both have in common.

    Args:
        loader: the user's map-style loader.
        clock: wall and CPU clock.
        kind: ``process`` or ``thread``.

    Attributes:
        workers: wanted; in force as soon as the running iterator could start them.
        window: batches that may be in flight, wanted.
        delivered: batches handed out by all iterators.
        why_not: why what was wanted is not in force: the last error of a take-over or of a growth, empty if none.
    """

    def __init__(self, loader: DataLoader[Any], clock: Clock, kind: str) -> None:
        self.loader, self.clock, self.kind = loader, clock, kind
        self.own = (loader.num_workers, max(2, (loader.prefetch_factor or 2) * loader.num_workers))
        self.workers, self.window = self.own
        self.counters = Counters()
        self.watch = Watch(loader.num_workers, self.window, clock, self.counters)
        self.startup = Startup()
        self.stock_startup = Startup()
        self.delivered = 0
        self.why_not = ""
        self._prior_s: float | None = None
        self._is_used_here = False

    @property
    def is_stock(self) -> bool:
        """True while the wanted numbers are the user's own: with no workers a window is no number.

        Never again once threads have used the dataset of a loader with worker processes: what it opened then is not for
        a child to inherit.
        """
        if self._is_used_here:
            return False
        return (self.workers, self.window) == self.own or self.workers == self.own[0] == 0

    @property
    def at_once(self) -> int:
        """How many workers to start before the first batch: as many as the user's loader, and at least two."""
        return min(self.workers, max(2, self.own[0]))

    def refused(self, error: Exception, engine: ElasticMap[Any] | None) -> None:
        """Note that workers could not be started: what is in force now becomes what is wanted.

        Args:
            error: why.
            engine: the running one, with the workers it has; None when the stock engine goes on.
        """
        self.why_not = f"{type(error).__name__}: {error}"
        if engine is None:
            self.workers, self.window = self.own
        else:
            self.workers = engine.workers

    # -- the stock engine ----------------------------------------------------------------------------------------

    def stock(self) -> Any:
        """Return a new iterator of the loader's own, its start-up timed."""
        return self._timed(self.loader)

    def stock_from(self, sampler: Iterator[Any], generator: torch.Generator) -> Any:
        """Return a stock iterator that goes on with `sampler`.

        Args:
            sampler: a running iterator over indices; nothing is pulled from it for the start.
            generator: where the base seed of its workers is drawn from.
        """
        twin = copy.copy(self.loader)
        given = {"sampler": (), "generator": generator}
        vars(twin).update(given | ({"batch_sampler": ()} if self.loader.batch_sampler is not None else {}))
        iterator = self._timed(twin)
        iterator._index_sampler, iterator._sampler_iter = self.loader._index_sampler, sampler
        for _ in range(self.loader.num_workers * (self.loader.prefetch_factor or 0)):
            iterator._try_put_index()
        return iterator

    def _timed(self, loader: DataLoader[Any]) -> Any:
        begin_s = time.perf_counter()
        iterator = DataLoader._get_iterator(loader)
        self.stock_startup.add(self.own[0], time.perf_counter() - begin_s)
        return iterator

    # -- ours ----------------------------------------------------------------------------------------------------

    def pool(self, base_seed: int) -> ProcessPool | None:
        """Return a pool without children yet; None for threads.

        Args:
            base_seed: of the epoch.
        """
        if self.kind != "process":
            return None
        loader = self.loader
        start = Start(loader.dataset, loader.worker_init_fn, base_seed, loader.num_workers)
        context = context_of(loader.multiprocessing_context)
        return ProcessPool(Fetch(loader, start), context, start, carry_tensor, self.startup)

    def given(self) -> Any:
        """Return the plain values that dataset and collate function hold now, None where no process gets a copy."""
        return _plain((self.loader.dataset, self.loader.collate_fn)) if self.kind == "process" else None

    def engine(self, source: Iterator[Any], pulled: int, pool: ProcessPool | None) -> ElasticMap[Any]:
        """Return our engine with its first workers; the source has not been touched.

        Args:
            source: numbered indices.
            pulled: batches of the epoch that were pulled before.
            pool: the children; None computes in threads.

        Raises:
            Exception: a worker could not be started; then none is left.
        """
        loader = self.loader
        fetch = Fetch(loader, None)
        self._is_used_here |= pool is None and self.own[0] > 0
        return ElasticMap(
            source,
            fetch if pool is None else None,
            workers=self.at_once,
            window=self.window,
            ordered=loader.in_order,
            pool=pool,
            feed=True,
            hold_at=self._length(pulled),
            hold_window=(self.loader.prefetch_factor or 0) * self.loader.num_workers,
            inline=fetch if self.own[0] == 0 else None,
            finish=self._pin(),
            timeout_s=loader.timeout,
            counters=self.counters,
            clock=self.clock,
            name=WORKERS,
        )

    def startup_s(self) -> float:
        """Return what a new epoch waits for each worker, in seconds; 0.0 where workers live on, or are threads."""
        if self.loader.persistent_workers or self.kind != "process":
            return 0.0
        for measured in (self.startup, self.stock_startup):
            if measured.count:
                return measured.total_s / measured.count
        if self._prior_s is None:
            self._prior_s = FORK_S + FORK_S_PER_BYTE * psutil.Process().memory_info().rss
        return self._prior_s

    def _length(self, pulled: int) -> int | None:
        """Batches left; a sampler may draw random numbers at its end, so ours looks for it no sooner than stock."""
        length = self.length()
        return None if length is None else max(0, length - pulled)

    def length(self) -> int | None:
        """Return the batches of an epoch, None if the sampler does not know."""
        try:
            return len(self.loader._index_sampler)
        except (TypeError, NotImplementedError):
            return None

    def _pin(self) -> Callable[[Any], Any] | None:
        if not self.loader.pin_memory or not torch.accelerator.is_available():
            return None
        device = torch.accelerator.current_accelerator()
        if device is None or device.type == "mps":
            return None
        return pin(torch.accelerator.current_device_index(), device.type)


def _plain(given: Any, depth: int = NESTED) -> Any:
    """Return the numbers and strings in an object and in what it holds, so that two such returns can be compared."""
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if depth == 0:
        return None
    if isinstance(given, list | tuple):
        return [_plain(part, depth - 1) for part in given[:MOST_PARTS]]
    held = getattr(given, "__dict__", None)
    if not isinstance(held, dict):
        return None
    return {name: _plain(held[name], depth - 1) for name in list(held)[:MOST_PARTS]}
