"""The loaders that are compared with themselves under resizes."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.hostile import FORK_ONLY, KINDS, Hostile, HostileStream, as_is

__all__ = [
    "BATCH",
    "hostile",
    "hostile_nodes",
    "hostile_stream",
    "iterable",
    "map_style",
    "nested",
    "nodes",
    "own_workers",
    "stateful",
    "work",
]

BATCH = 2


def work(item: int) -> torch.Tensor:
    """Return a tensor made of `item`; some items take longer, so that later ones overtake them."""
    if item % 13 == 5:
        time.sleep(0.001 + 0.002 * (item % 2))
    return torch.full((3,), item)


def again(item: torch.Tensor) -> torch.Tensor:
    """Return a tensor made of `item`: a second stage with other slow items."""
    if int(item[0]) % 7 == 2:
        time.sleep(0.001)
    return item * 3 + 1


class Items(Dataset[torch.Tensor]):
    """Map-style data."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> torch.Tensor:
        return work(item)


class Stream(IterableDataset[torch.Tensor]):
    """Iterable-style data; each worker owns every n-th item."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return map(work, range(first, self.items, step))


def own_workers() -> dict[str, Any]:
    """Return the arguments of a loader with two forked workers."""
    return {"num_workers": 2, "multiprocessing_context": "fork"}


def map_style(items: int, seed: int, **options: Any) -> DataLoader[torch.Tensor]:
    """Return a shuffled DataLoader with its own generator."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Items(items), batch_size=BATCH, shuffle=True, generator=generator, **options)


def stateful(items: int, seed: int) -> StatefulDataLoader[torch.Tensor]:
    """Return a shuffled StatefulDataLoader with its own generator and two workers."""
    # Stock, it draws another order with num_workers=0 than with 2, so the comparison keeps the 2.
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            Items(items), batch_size=BATCH, shuffle=True, generator=generator, **own_workers(), snapshot_every_n_steps=3
        )


def iterable(items: int, seed: int) -> DataLoader[torch.Tensor]:
    """Return an iterable-style DataLoader with two workers."""
    return DataLoader(Stream(items), batch_size=BATCH, num_workers=2)


def nodes(items: int, workers: int, method: str = "thread", **options: Any) -> Loader[torch.Tensor]:
    """Return a torchdata graph with one mapper; ``workers=0`` computes in the training thread."""
    source: Any = IterableWrapper(range(items))
    return Loader(ParallelMapper(source, work, num_workers=workers, method=method, **options))


def nested(items: int, workers: int) -> Loader[Any]:
    """Return a torchdata graph of two mappers with a Prefetcher and a Batcher."""
    node: Any = ParallelMapper(IterableWrapper(range(items)), work, num_workers=workers)
    node = ParallelMapper(Prefetcher(node, 3) if workers else node, again, num_workers=workers)
    node = Batcher(node, BATCH, drop_last=False)
    return Loader(Prefetcher(node, 2) if workers else node)


def hostile(items: int, seed: int, method: str = "fork", **options: Any) -> DataLoader[Any]:
    """Return a DataLoader of a hostile kind that the start method of its workers allows; the seed chooses."""
    kinds = [kind for kind in KINDS if method == "fork" or kind not in FORK_ONLY]
    if options.get("num_workers"):
        options["multiprocessing_context"] = method
    whole = random.Random(seed).random() < 0.5
    batching: dict[str, Any] = {"batch_size": None} if whole else {"batch_size": BATCH + 1, "shuffle": True}
    generator = torch.Generator().manual_seed(seed)
    data = Hostile(kinds[seed % len(kinds)], items)
    return DataLoader(data, collate_fn=as_is, generator=generator, **batching, **options)


def hostile_stream(items: int, seed: int) -> DataLoader[Any]:
    """Return an iterable-style DataLoader of a hostile kind with two workers."""
    kind = list(KINDS)[seed % len(KINDS)]
    return DataLoader(HostileStream(kind, items), batch_size=BATCH, num_workers=2, collate_fn=as_is)


def hostile_nodes(items: int, seed: int, workers: int, method: str = "thread") -> Loader[Any]:
    """Return a torchdata graph whose mapper looks items of a hostile kind up."""
    data = Hostile(list(KINDS)[seed % len(KINDS)], items)
    context = "fork" if method == "process" else None
    source: Any = IterableWrapper(range(items))
    look_up = data.__getitem__
    return Loader(ParallelMapper(source, look_up, num_workers=workers, method=method, multiprocessing_context=context))
