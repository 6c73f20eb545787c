"""Iterable-style datasets that say `later`, and trainings on them with and without us."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import lightning_runs as runs
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from intune_callbacks import later
from intune_callbacks.pipelines.find import find


@later
def decode(index: int, sleep_s: float = 0.0) -> torch.Tensor:
    time.sleep(sleep_s)
    return torch.full((2,), float(index))


class Rows(IterableDataset[Any]):
    """Numbered rows in uneven shards: each worker has fewer of them than the one before."""

    def __init__(self, rows: int = 96, sleep_s: float = 0.0) -> None:
        self.rows, self.sleep_s = rows, sleep_s

    def numbers(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = range(first, self.rows, step)
        return iter(numbers[: len(numbers) - 5 * first])

    def __iter__(self) -> Iterator[Any]:
        for index in self.numbers():
            yield decode(index, self.sleep_s)


def delivered(loader: Any, epochs: int = 2, sizes: Any = None, left_at: int | None = None, **how: Any) -> list[Any]:
    """Return the batches of some epochs, one of which is left early; the pipeline's numbers change on the way.

    Args:
        loader: the user's.
        epochs: how many.
        sizes: allocations, one after the other, each before a batch; None trains without us.
        left_at: the batch of the second epoch at which it is left.
        how: for `find`.
    """
    pipeline = None
    if sizes is not None:
        pipeline = find(loader, **how).pipeline
        pipeline.prepare()
    wanted, seen = iter(sizes or ()), []
    for epoch in range(epochs):
        iterator = iter(loader)
        if pipeline is not None:
            iterator = pipeline.adopt(iterator)
        number = 0
        while True:
            size = next(wanted, None)
            if size is not None:
                pipeline.resize(size)
            batch = next(iterator, None)
            if batch is None:
                break
            seen.append(runs.plain(batch))
            number += 1
            if epoch == 1 and number == left_at:
                break
        del iterator
    delivered.pipeline = pipeline
    if pipeline is not None:
        pipeline.close()
    return seen
