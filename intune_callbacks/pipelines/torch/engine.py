"""What all iterators of one DataLoader share: the wanted numbers, the counters, and how either engine is built."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import DataLoader

from intune_callbacks.errors import first_line, pass_on
from intune_callbacks.pipelines.base import give_back
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.epochs import Epochs
from intune_callbacks.pipelines.given import CHANGED
from intune_callbacks.pipelines.length import Length
from intune_callbacks.pipelines.look import plain_values
from intune_callbacks.pipelines.torch.carry import Carry
from intune_callbacks.pipelines.torch.reach import dataset_of
from intune_callbacks.pipelines.torch.sampler import SamplerWatch, is_settled
from intune_callbacks.pipelines.torch.stock import Numbered, going_on
from intune_callbacks.pipelines.torch.workers import Fetch, Start, context_of, pin
from intune_callbacks.pipelines.watched import Watch
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.line import Hold
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.pipelines.workers.surroundings import Surroundings, places
from intune_callbacks.types import Clock

if TYPE_CHECKING:
    from intune_callbacks.pipelines.ray.cluster import Cluster

__all__ = ["WORKERS", "Engines", "pinning", "ranks"]

WORKERS = "load"


class Engines:
    """Builds the stock engine of one loader and ours, and holds what both have in common.

    Args:
        kind: ``process`` or ``thread``.
        in_order: False lets ours deliver batches as they are finished.
        cluster: with ``process``, workers on other machines beside those here.

    Attributes:
        workers: wanted; in force as soon as the running iterator could start them.
        window: batches that may be in flight, wanted.
        delivered: batches handed out by all iterators.
        why_not: why what was wanted is not in force: the last error of a take-over or of a growth, empty if none.
        most: workers that can be had, None while that is not known.
        stays: why the stock engine goes on for good, empty if it does not have to.
        is_let_go: the loader was given back: from now on it is the stock engine that begins.
        places: of the files that are open, before the workers of a stock iterator read in them.
        sampling: whether the sampler depends on what the training does meanwhile.
        epochs: how they ended.
        length: returns the batches of an epoch, None if the sampler does not know.
    """

    def __init__(
        self, loader: DataLoader[Any], clock: Clock, kind: str, in_order: bool = True, cluster: Cluster | None = None
    ) -> None:
        self.loader, self.clock, self.kind, self._in_order, self.cluster = loader, clock, kind, in_order, cluster
        self.own = (loader.num_workers, max(2, (loader.prefetch_factor or 2) * loader.num_workers))
        self.workers, self.window = self.own
        self.counters = Counters()
        self.watch = Watch(loader.num_workers, self.window, clock, self.counters)
        self._ahead = (loader.prefetch_factor or 0) * loader.num_workers
        self.length = Length(loader._index_sampler, is_settled(loader._index_sampler)).now
        self.sampling = SamplerWatch(loader, self._ahead, self._depends, self.counters, self._period())
        self.startup = Startup()
        self.stock_startup = Startup()
        self.delivered = 0
        self.epochs = Epochs()
        self.why_not = self.stays = ""
        self.most: int | None = None
        self.is_let_go = False
        self.places = places()
        self._is_used_here = self._is_changed = False

    @property
    def is_stock(self) -> bool:
        """True while the wanted numbers are the user's own: with no workers a window is no number.

        Never again once threads have used the dataset of a loader with worker processes: what it opened then is not for
        a child to inherit.
        """
        if self.is_let_go or self.stays or (self.own[0] == 0 and self.sampling.is_held):
            return True  # in the training loop nothing is read ahead
        if self._is_used_here:
            return False
        return (self.workers, self.window) == self.own or self.workers == self.own[0] == 0

    @property
    def at_once(self) -> int:
        """How many workers to start before the first batch: where none can come later, for the dataset changes, all."""
        return self.workers if self._is_changed else min(self.workers, max(2, self.own[0]))

    @property
    def starts_at_once(self) -> bool:
        """True where a new worker computes at once: a thread, or a fork in which no code of the user's runs before."""
        return self.kind != "process" or (self.loader.worker_init_fn is None and self.start_method == "fork")

    @property
    def start_method(self) -> str:
        """How the loader starts processes."""
        return str(context_of(self.loader.multiprocessing_context).get_start_method())

    @property
    def reach(self) -> int:
        """Batches that may be in flight now."""
        return self._ahead if self.sampling.is_held and self._ahead else self.window

    def prime(self, engine: ElasticMap[Any], left: int) -> None:
        """Have ours ask for indices up to its window.

        Args:
            left: batches that a stock iterator has yet to deliver before.
        """
        if self.sampling.is_held:
            if left >= self.reach:
                return
            engine.resize(window=self.reach - left)  # in stock they would be in the window, too
        engine.prime(before=left)

    def _depends(self) -> None:
        """The sampler depends on the training: no index is to be asked for sooner or later than in stock."""
        self.workers, self.window = min(self.workers, self.own[1] if self.own[0] else 0), self.own[1]

    @property
    def least_window(self) -> int:
        """The smallest window: with less than its own, a sampler that begins anew would draw later than in stock."""
        return self.own[1] if self.own[0] and self._period() is not None else 1

    def refused(self, error: Exception, engine: ElasticMap[Any] | None) -> None:
        """Note that workers could not be started: what is in force now becomes what is wanted.

        Args:
            engine: the running one, with the workers it has; None when the stock engine goes on.
        """
        pass_on(error)
        self.why_not = f"{type(error).__name__}: {error}"
        self._is_changed |= CHANGED in self.why_not
        if engine is None:
            self.workers, self.window = self.own
        else:
            before, self.workers = engine.workers, give_back(engine, error, self.own[0])
            if self.workers < before:
                self.most = self.workers

    def stay(self, error: BaseException) -> None:
        """Leave it to the user's workers, or to the training process: there a batch was made that ours could not."""
        self.stays = self.why_not = first_line(error)
        self.workers, self.window = self.own

    # -- the stock engine ----------------------------------------------------------------------------------------

    def stock(self) -> Any:
        """Return a new iterator of the loader's own, its start-up timed."""
        return self.timed(partial(DataLoader._get_iterator, self.loader))

    def drawn(self) -> tuple[Iterator[Any], int, torch.Generator]:
        """Return sampler, base seed and the generator before it, drawn in the order in which a stock iterator does."""
        loader, again = self.loader, torch.Generator()
        sampler = iter(loader._index_sampler)
        again.set_state((loader.generator or torch.default_generator).get_state())
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        if loader.num_workers > 0:
            sampler = iter(loader._index_sampler)  # the stock iterator asks twice
        return self.sampling.around(sampler), base_seed, again

    def begin(self, stock: Any) -> None:
        """Look on while a stock iterator delivers.

        Args:
            stock: one that has begun an epoch, or is in the midst of it.
        """
        self.watch.begin(stock)
        done = getattr(stock, "_send_idx", stock._num_yielded)
        stock._sampler_iter = self.sampling.around(stock._sampler_iter, done)

    def stock_from(self, sampler: Iterator[Any], generator: torch.Generator, done: int = 0) -> Any:
        """Return a stock iterator that goes on with `sampler`.

        Args:
            sampler: a running iterator over indices; nothing is pulled from it for the start.
            generator: where the base seed of its workers is drawn from.
            done: batches of the epoch that were delivered before.
        """
        return self.timed(partial(going_on, self.loader, sampler, generator, done))

    def stock_again(self, sampler: Iterator[Any], base_seed: int, done: int = 0) -> Any:
        """Return the same where the base seed was drawn before."""
        return self.stock_from(sampler, torch.Generator().manual_seed(base_seed), done)

    def timed(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, which starts the loader's own workers; the time that takes is noted."""
        begin_s = time.perf_counter()
        iterator = make()
        self.stock_startup.add(self.own[0], time.perf_counter() - begin_s)
        return iterator

    # -- ours ----------------------------------------------------------------------------------------------------

    def pool(self, base_seed: int, surroundings: Surroundings, before: int = 0) -> Any:
        """Return a pool for an epoch, without children yet; None for threads; `before`: pools its iterator had."""
        if self.kind != "process":
            return None
        loader = self.loader
        start = Start(dataset_of(loader), loader.worker_init_fn, base_seed, loader.num_workers, before)
        context = context_of(loader.multiprocessing_context)
        fetch = Fetch(loader, start)
        pool = ProcessPool(fetch, context, start, Carry, self.startup, surroundings)
        if self.cluster is None:
            return pool
        from intune_callbacks.pipelines.ray.mixed import MixedPool

        return MixedPool(pool, self.cluster, (fetch, start, Carry), (base_seed, before), self.own[0])

    def given(self) -> Any:
        """Return the plain values that dataset and collate function hold now, None where no process gets a copy."""
        return plain_values((dataset_of(self.loader), self.loader.collate_fn)) if self.kind == "process" else None

    def engine(self, source: Numbered, pulled: int, pool: ProcessPool | None, workers: int) -> ElasticMap[Any]:
        """Return our engine with its first workers; the source has not been touched.

        Args:
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
            workers=workers,
            window=self.reach,
            ordered=loader.in_order and self._in_order,
            pool=pool,
            feed=True,
            hold=Hold(self._seam(pulled), self._period() or 0, self._ahead),
            inline=fetch if self.own[0] == 0 else None,
            refused=self.stay,
            finish=pinning(self.loader),
            may_stop=True,
            timeout_s=loader.timeout,
            delivered=source.forget,
            counters=self.counters,
            clock=self.clock,
            name=WORKERS,
        )

    @property
    def lives_on(self) -> bool:
        """True where workers are not started anew for each epoch: an iterator without an end begins again by itself."""
        return self.loader.persistent_workers or self._period() is not None

    @property
    def start_s(self) -> float:
        """What is waited for each worker, in seconds; 0.0 for threads."""
        if self.kind != "process":
            return 0.0
        return self.startup.each_s or max(self.stock_startup.expected_s, self.watch.startup_s)

    def _seam(self, pulled: int) -> int | None:
        """Batches up to where a sampler may draw random numbers: ours asks for what follows no sooner than stock."""
        length, period = self.length(), self._period()
        if length is not None:
            return max(0, length - pulled)
        return None if period is None else -pulled % period

    def _period(self) -> int | None:
        """Batches of an epoch where the sampler begins anew by itself, as that of a loader without an end does."""
        try:
            return None if self.length() is not None else max(1, len(self.loader))
        except Exception:  # the length is the user's code
            return None


def ranks() -> int:
    """Return how many processes train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if there else 1


def pinning(loader: DataLoader[Any]) -> Callable[[Any], Any] | None:
    """Return what pins the batches of a loader, None where they are not to be pinned."""
    if not loader.pin_memory or not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "mps":
        return None
    return pin(torch.accelerator.current_device_index(), device.type)
