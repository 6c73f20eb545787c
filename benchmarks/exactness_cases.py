"""The loaders of the exactness benchmark: for each adapter one to resize, and the untouched stock one beside it."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.exactness_loaders import (
    BATCH,
    hostile,
    hostile_nodes,
    hostile_stream,
    iterable,
    map_style,
    nested,
    nodes,
    own_workers,
    stateful,
    work,
)
from benchmarks.hostile import identity
from intune_callbacks.pipelines.base import LiveLoader
from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.types import Stage

__all__ = ["ADAPTERS", "Adapter", "Subject"]

THREADS, PROCESSES, WINDOW = 8, 3, 12
Build = Callable[[int, int], Any]


class Subject(Protocol):
    """Something that runs epochs and can be resized meanwhile."""

    def start(self) -> Iterator[object]:
        """Begin an epoch."""

    def change(self, choices: random.Random) -> None:
        """Set random workers and windows."""

    def close(self) -> None:
        """Stop all workers."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter under stress.

    Args:
        name: of the row.
        weight: its share of all resizes.
        build: (items, seed) -> what is resized.
        stock: (items, seed) -> the loader whose sequence is expected.
        beside: True if a second thread may resize while the training loop fetches.
        ordered: False where only what comes counts, and each epoch is taken to its end.
    """

    name: str
    weight: float
    build: Callable[[int, int], Subject]
    stock: Build
    beside: bool
    ordered: bool = True

    def expected(self, items: int, seed: int, epochs: int) -> list[list[object]]:
        """Return what the stock loader delivers in each of the first `epochs` epochs."""
        loader = self.stock(items, seed)
        return [[identity(batch) for batch in loader] for _ in range(epochs)]


class Elastic:
    """A loader made elastic by `find`.

    Args:
        loader: as the user wrote it.
        kind: ``thread`` or ``process`` workers, where the loader leaves the choice.
        high: most workers to ask for.
        late: batches delivered by the stock iterator before it is taken over in the first epoch.
        order: ``any`` delivers batches as they are finished.
    """

    def __init__(self, loader: Any, kind: str, high: int, late: int = 0, order: str = "same") -> None:
        self._loader, self._high, self._late = loader, high, late
        found = find(loader, workers_kind=kind, order=order)
        if found.pipeline is None:
            raise RuntimeError(f"nothing to resize in {type(loader).__name__}: {found.why}")
        self._live: LiveLoader = found.pipeline
        self._live.prepare()

    def start(self) -> Iterator[object]:
        running = iter(self._loader)
        first = list(itertools.islice(running, self._late))
        self._late = 0
        return itertools.chain(first, self._live.adopt(running))

    def change(self, choices: random.Random) -> None:
        stages: Sequence[Stage] = self._live.stages()
        wanted = {s.name: choices.randint(1, WINDOW if s.kind == "memory" else self._high) for s in stages}
        self._live.resize({name: value for name, value in wanted.items() if choices.random() < 0.7})

    def close(self) -> None:
        self._live.close()
        # A stock iterator that is still waiting for the collector complains in every process forked after it.
        gc.collect()


class Engine:
    """The resizable stage alone."""

    def __init__(self, items: int, kind: str) -> None:
        self._items, self._high = items, THREADS if kind == "thread" else PROCESSES
        context: Any = torch.multiprocessing.get_context("fork")
        self._pool = ProcessPool(work, context) if kind == "process" else None
        self._stage: ElasticMap[torch.Tensor] | None = None

    def start(self) -> Iterator[object]:
        self._end()
        self._stage = ElasticMap(iter(range(self._items)), work, workers=2, window=4, pool=self._pool)
        return self._stage

    def change(self, choices: random.Random) -> None:
        stage, which = self._stage, choices.randrange(3)
        workers, window = choices.randint(1, self._high), choices.randint(1, WINDOW)
        if stage is not None:
            stage.resize(None if which == 0 else workers, None if which == 1 else window)

    def close(self) -> None:
        self._end()
        if self._pool is not None:
            self._pool.close()

    def _end(self) -> None:
        if self._stage is not None:
            self._stage.close()


def _late(seed: int, items: int) -> int:
    choices = random.Random(seed ^ 0x5EED)
    return choices.choice((0, choices.randrange(max(1, items // BATCH))))


def _adapters() -> Iterator[Adapter]:
    yield Adapter("elastic thread", 26, lambda n, s: Engine(n, "thread"), lambda n, s: nodes(n, 0), True)
    yield Adapter("elastic process", 5, lambda n, s: Engine(n, "process"), lambda n, s: nodes(n, 0), False)
    yield Adapter(
        "DataLoader map-style thread",
        14,
        lambda n, s: Elastic(map_style(n, s, **own_workers()), "thread", THREADS, _late(s, n)),
        map_style,
        True,
    )
    yield Adapter(
        "DataLoader map-style process",
        5,
        lambda n, s: Elastic(map_style(n, s, **own_workers()), "process", PROCESSES, _late(s, n)),
        map_style,
        False,
    )
    yield Adapter(
        "DataLoader map-style num_workers=0",
        12,
        lambda n, s: Elastic(map_style(n, s), "thread", THREADS, _late(s, n)),
        map_style,
        True,
    )
    yield Adapter("DataLoader iterable", 3, lambda n, s: Elastic(iterable(n, s), "process", PROCESSES), iterable, True)
    yield Adapter("StatefulDataLoader", 3, lambda n, s: Elastic(stateful(n, s), "process", PROCESSES), stateful, True)
    yield Adapter(
        "torchdata thread", 15, lambda n, s: Elastic(nodes(n, 2), "thread", THREADS), lambda n, s: nodes(n, 0), True
    )
    yield Adapter(
        "torchdata process",
        4,
        lambda n, s: Elastic(nodes(n, 2, "process", multiprocessing_context="fork"), "process", PROCESSES),
        lambda n, s: nodes(n, 0),
        False,
    )
    yield Adapter(
        "torchdata nested", 8, lambda n, s: Elastic(nested(n, 2), "thread", THREADS), lambda n, s: nested(n, 0), True
    )
    yield Adapter(
        "torchdata prebatch",
        5,
        lambda n, s: Elastic(nodes(n, 2, prebatch=3), "thread", THREADS),
        lambda n, s: nodes(n, 0),
        True,
    )
    for method, weight in (("fork", 5), ("forkserver", 0.2), ("spawn", 0.2)):
        yield Adapter(
            f"hostile {method}",
            weight,
            partial(_hostile, method=method, workers_kind="process"),
            partial(hostile, method=method),
            False,
        )
    yield Adapter("hostile thread", 5, partial(_hostile, method="fork", workers_kind="thread"), hostile, True)
    yield Adapter(
        "hostile iterable",
        3,
        lambda n, s: Elastic(hostile_stream(n, s), "process", PROCESSES),
        hostile_stream,
        True,
    )
    for method, high in (("thread", THREADS), ("process", PROCESSES)):
        yield Adapter(
            f"hostile torchdata {method}",
            3,
            partial(_hostile_nodes, method=method, high=high),
            partial(hostile_nodes, workers=0),
            method == "thread",
        )


def _hostile(items: int, seed: int, method: str, workers_kind: str) -> Elastic:
    high = THREADS if workers_kind == "thread" else PROCESSES
    return Elastic(hostile(items, seed, method, num_workers=2), workers_kind, high, _late(seed, items))


def _hostile_nodes(items: int, seed: int, method: str, high: int) -> Elastic:
    return Elastic(hostile_nodes(items, seed, 2, method), method, high)


ADAPTERS = tuple(_adapters())
