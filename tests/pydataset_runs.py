"""A dataset of numbers for the enqueuers of Keras and of ours, and what an epoch takes of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("keras")

import keras_runs as runs
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

from intune_callbacks.pipelines.pydataset.enqueuer import LiveEnqueuer
from intune_callbacks.pipelines.pydataset.pydataset import PyDatasetPipeline
from intune_callbacks.types import Clock


class Counting:
    """A dataset whose batch i is the number i; `asked` holds the numbers it was asked for."""

    def __init__(self, batches: int | None, breaks_at: int = -1, none_at: int = -1) -> None:
        self.num_batches, self.breaks_at, self.none_at = batches, breaks_at, none_at
        self.asked: list[int] = []

    def __getitem__(self, number: int) -> Any:
        self.asked.append(number)
        if number == self.breaks_at:
            raise KeyError(number)
        return None if number == self.none_at else (number, random.Random(number).random())


def stock_of(dataset: Any, places: int, shuffle: bool = False, processes: bool = False) -> Any:
    return OrderedEnqueuer(dataset, workers=2, use_multiprocessing=processes, max_queue_size=places, shuffle=shuffle)


def live_of(stock: Any, steps: int | None, kind: str = "thread") -> tuple[PyDatasetPipeline, LiveEnqueuer]:
    places = stock.future_queue.maxsize
    pipeline = PyDatasetPipeline(stock.py_dataset, workers=2, window=places, kind=kind, clock=Clock())
    return pipeline, LiveEnqueuer(stock, pipeline, steps)


def epochs(enqueuer: Any, takes: list[int], between: Any = lambda: None) -> list[Any]:
    """Take so many batches in each epoch, with one iterator for all, as `steps_per_epoch` does."""
    batches, taken = enqueuer.get(), []
    for many in takes:
        enqueuer.start()
        for _ in range(many):
            taken.append(next(batches))
            between()
        if isinstance(enqueuer, OrderedEnqueuer):
            runs.settled(enqueuer)
        enqueuer.stop()
    return taken


def takes_of(steps: int, batches: int | None, many: int = 4) -> list[int]:
    """What Keras takes in each epoch: it counts the batches of all, and begins anew when there are no more."""
    takes, taken = list[int](), 0
    for _ in range(many):
        takes.append(steps if batches is None else min(steps, batches - taken))
        taken += takes[-1]
        taken = 0 if taken == batches else taken
    return takes


class Resizes:
    """Sets both numbers at random."""

    def __init__(self, pipeline: PyDatasetPipeline, seed: int) -> None:
        self.pipeline, self.random = pipeline, random.Random(seed)

    def __call__(self) -> None:
        low = self.pipeline.stages()[0].low
        self.pipeline.resize({"load": self.random.randint(low, 5), "load.window": self.random.randint(1, 12)})
