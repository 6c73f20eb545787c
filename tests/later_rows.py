"""Iterable-style datasets that say `later`, and trainings on them with and without us."""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning_runs as runs
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from intune_callbacks import later
from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.torch.calls import Shared
from intune_callbacks.pipelines.torch.jobs import Job, Jobs


@later
def decode(index: int, sleep_s: float = 0.0) -> torch.Tensor:
    time.sleep(sleep_s)
    return torch.full((2,), float(index))


# By then each of two workers has made the batches that come before the proof.
SETTLED = 8


class Rows(IterableDataset[Any]):
    """Numbered rows in uneven shards: each worker has fewer of them than the one before.

    Args:
        rows: how many there would be.
        sleep_s: what making one takes.
    """

    def __init__(self, rows: int = 400, sleep_s: float = 0.0) -> None:
        self.rows, self.sleep_s = rows, sleep_s

    def numbers(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = range(first, self.rows, step)
        return iter(numbers[: len(numbers) - 5 * first])

    def __iter__(self) -> Iterator[Any]:
        for index in self.numbers():
            yield decode(index, self.sleep_s)


class Made(Rows):
    """What is yielded is made by `make`, a function of the dataset and a number."""

    def __init__(self, make: Callable[[Any, int], Any], rows: int = 400) -> None:
        super().__init__(rows)
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        for index in self.numbers():
            yield self.make(self, index)


class Run:
    """Trains on a loader for some epochs.

    Args:
        loader: the user's.
        sizes: what is asked of the pipeline before each batch; None trains without us, and the last one stays.
        epochs: how many.
        left_at: the batch of the second epoch at which that one is left.
        hook: called with this run and the number of each batch.
        settle: wait until helpers make batches, or never will: how soon that is, is not for a test to say.
    """

    def __init__(
        self,
        loader: Any,
        sizes: Sequence[dict[str, int]] | None = None,
        epochs: int = 2,
        left_at: int | None = None,
        hook: Callable[[Run, int], None] | None = None,
        settle: bool = False,
    ) -> None:
        self.loader, self.seen, self.helped = loader, list[Any](), 0
        self.pipeline = None
        finished = Jobs._finished

        def counted(jobs: Jobs, job: Job, *rest: Any) -> None:
            self.helped += not job.batch.proof
            finished(jobs, job, *rest)

        Jobs._finished = counted  # type: ignore[method-assign]
        try:
            if sizes is not None:
                self.pipeline = find(loader).pipeline
                assert self.pipeline is not None
                self.pipeline.prepare()
            self._train(list(sizes or ()), epochs, left_at, hook, settle)
            self.why_not = getattr(self.pipeline, "why_not", "")
            self.stages = self.pipeline.stages() if self.pipeline is not None else ()
        finally:
            Jobs._finished = finished  # type: ignore[method-assign]
            if self.pipeline is not None:
                self.pipeline.close()

    def _train(self, sizes: list[dict[str, int]], epochs: int, left_at: int | None, hook: Any, settle: bool) -> None:
        for epoch in range(epochs):
            iterator = iter(self.loader)
            if self.pipeline is not None:
                iterator = self.pipeline.adopt(iterator)
            number = 0
            while epoch != 1 or number != left_at:
                if self.pipeline is not None and sizes:
                    self.pipeline.resize(sizes.pop(0))
                batch = next(iterator, None)
                if batch is None:
                    break
                self.seen.append(plain(batch))
                number += 1
                if settle and number == SETTLED:
                    self._settle()
                if hook is not None:
                    hook(self, number)

    def _settle(self) -> None:
        until_s = time.monotonic() + 30.0
        helpers = None if self.pipeline is None else self.pipeline._running_helpers()
        while helpers is not None and not helpers.refused and not all(helpers.shared.board[Shared.PROVED :]):
            if time.monotonic() > until_s or not helpers.jobs.wanted:
                return
            time.sleep(0.01)


def plain(batch: Any) -> Any:
    if isinstance(batch, str | int | float):
        return batch
    if isinstance(batch, torch.Tensor):
        return tuple(batch.flatten().tolist())
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return None if batch is None else tuple(plain(part) for part in batch)


MANY = {"load": 5, "load.window": 24}


@later
def drawn(index: int) -> Any:
    return torch.tensor([float(index), random.random(), float(np.random.rand()), float(torch.rand(()))])


@later
def times(index: int, factor: int = 1) -> Any:
    return {"x": torch.tensor([float(index * factor)]), "name": f"row {index}"}


def same(dataset: Any, sizes: Any = (MANY,), helped: bool = True, run: Any = None, **options: Any) -> Run:
    """Compare a training with helpers with a stock one; return the first."""
    options = {"batch_size": 4, "num_workers": 2} | options
    run = {"settle": True} | (run or {})
    torch.manual_seed(0)
    stock = Run(DataLoader(dataset, **options), **run)
    before = runs.running()
    torch.manual_seed(0)
    ours = Run(DataLoader(dataset, **options), list(sizes), **run)
    assert ours.seen == stock.seen
    assert (ours.helped > 0) == helped, ours.why_not
    assert vars(ours.loader).keys() == vars(stock.loader).keys()
    assert ours.loader.collate_fn is stock.loader.collate_fn and ours.loader.worker_init_fn is None
    ours.loader = ours.pipeline = None
    gc.collect()
    assert runs.only(before | set(multiprocessing.active_children() if options.get("persistent_workers") else ()))
    return ours
