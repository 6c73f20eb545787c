"""A map-style torch.utils.data.DataLoader as the user wrote it, made live.

Nothing is changed before other numbers than the user's are asked for: till then its own iterators deliver, timed.
Then a running iterator is taken over: its batches in flight are delivered first, and ours continues from its sampler.
Indices are drawn in the training thread as before. Where somebody else holds the running iterator, in a generator or
as an attribute of the loader, it stays in its place and hands on what ours delivers; so it is with each iterator of a
loader that makes them in a way of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import (
    DataLoader,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from intune_callbacks.pipelines.base import MAX_PROCESSES, MAX_THREADS, MAX_WINDOW, LiveLoader, clamp, windowed
from intune_callbacks.pipelines.epochs import DRAWN
from intune_callbacks.pipelines.given import hints_of_change, hints_of_here
from intune_callbacks.pipelines.torch.engine import WORKERS, Engines, ranks
from intune_callbacks.pipelines.torch.iterator import LoaderIterator
from intune_callbacks.pipelines.torch.reach import Seam, attributes, dataset_of, has_own_iterator, hidden_in, is_of
from intune_callbacks.pipelines.torch.stock import Kept, shown_by
from intune_callbacks.pipelines.watched import WINDOW_KNOB, WORKERS_KNOB
from intune_callbacks.types import Allocation, Clock, Hint, PipelineStats, Stage

if TYPE_CHECKING:
    from intune_callbacks.pipelines.ray.cluster import Cluster

__all__ = ["MapLoader"]

WINDOW = "load.window"
DEPENDS = (
    "{0} {1}: so that it gives what it would in your loader, {2} batches are in flight, and there are no more than "
    "{2} workers"
)
STAYS = (
    "made in a new worker, a batch raised {}; yours made it: items of {} seem to depend on those before them, so "
    "num_workers stays {}"
)
STOCK = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)


class MapLoader(LiveLoader):
    """A map-style DataLoader with any sampler, collate function, init function, generator or context.

    Its stage `load` begins at the user's `num_workers`, 0 in the training loop included; 0 is offered to none else.

    Args:
        max_workers: upper limit of `load`, unless the user's own number is higher.
        kind: ``process`` (the user's dataset was written for it) or ``thread``.
        in_order: False lets it deliver batches as they are finished, from the first other number on.
        cluster: with ``process``, workers on other machines beside those here.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        clock: Clock,
        max_workers: int | None = None,
        kind: str = "process",
        in_order: bool = True,
        cluster: Cluster | None = None,
    ) -> None:
        self._loader, self._clock = loader, clock
        self._high = max(
            loader.num_workers, max_workers or (MAX_PROCESSES if kind == "process" and cluster is None else MAX_THREADS)
        )
        self._engines = Engines(loader, clock, kind, in_order, cluster)
        self._current: weakref.ref[LoaderIterator] | None = None
        self._seam = Seam(loader, self._get_iterator)
        self._makes_its_own = has_own_iterator(loader)
        self._closed = False

    # -- taking over ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """See each iterator of the loader from its start."""
        self._seam.open()
        if self._engines.cluster is not None:
            self._engines.cluster.begin(ranks())
        self._engines.is_let_go = self._engines.sampling.is_off = False

    def adopt(self, iterator: Any) -> Any:
        """Put a running stock iterator behind ours, which hands on its batches until other numbers are wanted.

        Args:
            iterator: the running one, or what hides it; where none is found, ours is met when the loader makes it.
        """
        if self._closed:
            return iterator
        self.prepare()
        self._current = None
        return self._taken(iterator)

    def _taken(self, iterator: Any) -> Any:
        """Return what delivers instead of an iterator: that one itself, where ours stands behind one inside it."""
        loader = self._loader
        found = hidden_in(iterator, loader, self._is_meant)
        ours = self._ours(found)
        if ours is None and found is not None:
            held = found is not iterator or any(
                value is found for name, value in attributes(loader) if name != "_iterator"
            )
            if held and not loader.in_order:
                return iterator  # its numbers do not say what it has in flight
            ours = LoaderIterator(self._engines, found)
            if held:
                ours.stand_behind()
            elif loader._iterator is found:
                loader._iterator = ours  # type: ignore[assignment]
        if ours is None:
            return iterator
        self._follow(ours)
        return iterator if found is not iterator or ours.is_behind else ours

    def _follow(self, ours: LoaderIterator) -> None:
        """Let the numbers be those of this iterator, unless somebody only validates on the loader in mid-epoch."""
        running = self._iterator()
        if running is None or running.has_ended:
            self._current = weakref.ref(ours)
            if ours.engine is None and not (self._engines.is_stock or self._closed):
                ours.apply()  # wanted before, or by another thread meanwhile

    def _is_meant(self, value: object) -> bool:
        if type(value) not in STOCK:
            return self._ours(value) is not None
        return is_of(self._loader, value) and (shown_by(value) is None or self._ours(value) is not None)

    def _ours(self, value: object) -> LoaderIterator | None:
        """Return what delivers behind this object, if that is one of this loader's."""
        behind = value if type(value) is LoaderIterator else shown_by(value)
        return behind if type(behind) is LoaderIterator and behind.engines is self._engines else None

    def _get_iterator(self) -> Any:
        """In place of the loader's own `_get_iterator`."""
        if self._makes_its_own:
            return self._taken(self._engines.timed(self._seam.stock))
        if self._engines.is_stock or self._closed:
            ours = LoaderIterator(self._engines, self._engines.stock())
        else:
            ours = LoaderIterator.begin(self._engines)
        self._follow(ours)
        return ours

    def _iterator(self) -> LoaderIterator | None:
        return self._current() if self._current is not None else None

    # -- the pipeline protocol -----------------------------------------------------------------------------------

    @property
    def why_not(self) -> str:
        """Why the last wanted numbers are not in force, empty if they are."""
        return self._engines.why_not

    @property
    def is_growing(self) -> bool:
        """True while workers that were asked for cannot compute yet."""
        iterator, engines = self._iterator(), self._engines
        if iterator is None or iterator.has_ended or engines.is_stock or self._closed:
            return False
        engine, pool = iterator.engine, iterator.children.pool
        if engine is None:
            return pool is not None and pool.starting > 0
        cluster = engines.cluster
        return engine.is_growing(engines.workers) or (cluster is not None and cluster.is_growing)

    def stages(self) -> tuple[Stage, ...]:
        engines, low = self._engines, min(1, self._loader.num_workers)
        high = self._high if engines.most is None else engines.most
        if engines.cluster is not None:
            high = min(high, self._most_anywhere(engines.cluster))
        window = engines.least_window, MAX_WINDOW
        if engines.stays:
            low, high, window = engines.own[0], engines.own[0], (engines.own[1],) * 2
        elif engines.sampling.why:
            high, window = min(high, engines.own[1] if low else 0), (engines.own[1],) * 2
        load = Stage(
            *(WORKERS, "cpu", "workers", low, high, engines.workers),
            knob=WORKERS_KNOB,
            startup_s=0.0 if engines.lives_on else engines.start_s,
            once_s=engines.start_s if engines.lives_on else 0.0,
        )
        return windowed(load, engines.window, low=window[0], high=window[1], knob=WINDOW_KNOB)

    def _most_anywhere(self, cluster: Cluster) -> int:
        """Return how many workers there can be, and do without those that were wanted and did not come."""
        engines, here = self._engines, cluster.most_here(self._engines.own[0])
        iterator, there = self._iterator(), here + cluster.ready
        if engines.workers > there and not self.is_growing:
            engines.workers = there
            if iterator is not None:
                iterator.apply()
        return here + int(cluster.cpus)

    def beyond(self, cpus: float) -> float:
        """Return how many CPUs of other machines it can have workers on.

        Args:
            cpus: there are here.
        """
        cluster = self._engines.cluster
        if cluster is None:
            return 0.0
        cluster.local_cpus = cpus
        return cluster.cpus

    @property
    def late_hints(self) -> tuple[Hint, ...]:
        """What has shown of loop, dataset and sampler; that the dataset was changed, while that keeps workers away."""
        cluster = self._engines.cluster
        machines = () if cluster is None else tuple(Hint(said, "", "cluster", WORKERS) for said in cluster.sentences)
        return (*self._engines.epochs.hints, *machines, *self._drawn(), *self._hints())

    def _drawn(self) -> tuple[Hint, ...]:
        engines = self._engines
        name = engines.epochs.generator if engines.workers != engines.own[0] else ""
        return (Hint(DRAWN.format(name), kind="generator"),) if name else ()

    def _hints(self) -> tuple[Hint, ...]:
        engines = self._engines
        sampling, window = engines.sampling, engines.own[1]
        if engines.stays:
            kind = type(dataset_of(self._loader)).__name__
            if not engines.own[0]:
                return hints_of_here(engines.stays, WORKERS)
            return (Hint(STAYS.format(engines.stays, kind, engines.own[0]), "", "order", WORKERS),)
        changed = hints_of_change(engines.why_not, WORKERS, engines.workers)
        if changed or not sampling.why:
            return changed
        most = window if self._loader.num_workers else 0
        about = {"kind": "order", "stage": WORKERS} if engines.workers >= most else {}  # else it is not what limits
        return (Hint(DEPENDS.format(sampling.name, sampling.why, most), **about),)

    def stats(self) -> PipelineStats:
        iterator, engines = self._iterator(), self._engines
        engine = iterator.engine if iterator is not None else None
        reading = engine.stats() if engine is not None else engines.watch.reading(engines.window)
        return PipelineStats(self._clock.wall(), engines.delivered, {WORKERS: reading})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        engines, wanted = self._engines, clamp(allocation, self.stages())
        before = engines.workers, engines.window
        engines.workers = wanted.get(WORKERS, engines.workers)
        engines.window = wanted.get(WINDOW, engines.window)
        iterator = self._iterator()
        if before != (engines.workers, engines.window):
            engines.why_not = ""
            if iterator is not None and not self._closed:
                iterator.apply()
        return {WORKERS: engines.workers, WINDOW: engines.window}

    def trim(self) -> None:
        """End the children that are only kept for later."""
        iterator = self._iterator()
        if iterator is not None:
            iterator.children.spare()

    def release(self) -> None:
        """Give the loader its own iterator back; a training that goes on gets the rest of its epoch from that."""
        self._let_go(goes_on=True)

    def _let_go(self, goes_on: bool) -> None:
        self._seam.close()
        self._engines.is_let_go = self._engines.sampling.is_off = True
        for name, value in attributes(self._loader):
            ours = self._ours(value)
            if ours is not None:
                # At the end of a training, new stock workers of a kept iterator would work for nobody, and might hang.
                is_left = name == "_iterator" and not (goes_on or ours.is_behind or ours.engine is None)
                given = None if is_left else ours.give_back()
                if given is not None or name == "_iterator":
                    given = Kept(ours.children.base_seed) if given is None else given
                    object.__setattr__(self._loader, name, given)
        running = self._iterator()
        if running is not None and running.is_behind:
            running.give_back()

    def close(self) -> None:
        self._closed = True
        iterator = self._iterator()
        self._let_go(goes_on=False)
        if iterator is not None:
            iterator.close()
        if self._engines.cluster is not None:
            self._engines.cluster.close()
