"""More loaders for the exactness benchmark: plain loops, helpers, consent to another order, PyDatasets, Grain."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.exactness_cases import PROCESSES, THREADS, WINDOW, Adapter, Elastic
from benchmarks.exactness_loaders import BATCH, map_style, work
from intune_callbacks import later, live
from intune_callbacks.types import Clock

__all__ = ["adapters"]

NEVER = {"decide_every_s": 3600.0, "decide_every_batches": 1_000_000, "show_card": False}
"""The tuner itself changes nothing: who changes is the benchmark."""

make = later(work)


class Stream(IterableDataset[Any]):
    """Iterable-style data that says `later`; each worker owns every n-th item."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return map(make, range(first, self.items, step))


class Changed:
    """Random numbers for the stages of `pipeline`."""

    pipeline: Any
    high: int

    def change(self, choices: random.Random) -> None:
        """Set random workers and windows."""
        stages = self.pipeline.stages()
        # No stage goes below what it accepts.
        wanted = {
            s.name: choices.randint(s.low, max(s.low, WINDOW if s.kind == "memory" else self.high)) for s in stages
        }
        self.pipeline.resize({name: value for name, value in wanted.items() if choices.random() < 0.7})


class Plain(Changed):
    """A loop over `live(loader)`."""

    def __init__(self, loader: Any, kind: str, high: int) -> None:
        self.high = high
        self._live: Any = live(loader, mode="tune", workers_kind=kind, **NEVER)
        self.pipeline = self._live._fit._pipeline

    def start(self) -> Iterator[object]:
        """Begin an epoch."""
        return iter(self._live)

    def close(self) -> None:
        """End the tuning."""
        self._live.close()


class Keras(Changed):
    """A PyDataset behind Keras's enqueuer, with ours in its place; an epoch takes all batches."""

    def __init__(self, items: int, kind: str, high: int) -> None:
        from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

        from intune_callbacks.pipelines.pydataset.enqueuer import LiveEnqueuer
        from intune_callbacks.pipelines.pydataset.pydataset import PyDatasetPipeline

        self.high, self._batches = high, _batches(items)
        stock = OrderedEnqueuer(_py_dataset(items), workers=2, use_multiprocessing=kind == "process", max_queue_size=4)
        self.pipeline = PyDatasetPipeline(stock.py_dataset, workers=2, window=4, kind=kind, clock=Clock())
        self._enqueuer: Any = LiveEnqueuer(stock, self.pipeline, self._batches)
        self._got = self._enqueuer.get()

    def start(self) -> Iterator[object]:
        """Begin an epoch, as Keras does; the last one has ended."""
        self._enqueuer.stop()
        self._enqueuer.start()
        return itertools.islice(self._got, self._batches)

    def close(self) -> None:
        """Stop all workers."""
        self._enqueuer.stop()
        self.pipeline.close()


class Grain(Changed):
    """A Grain dataset with live threads."""

    def __init__(self, items: int, seed: int) -> None:
        from intune_callbacks.pipelines.find import find

        self.high = THREADS
        self.pipeline = find(grain_dataset(items, seed)).pipeline

    def start(self) -> Iterator[object]:
        """Begin an epoch."""
        return iter(self.pipeline.dataset)

    def close(self) -> None:
        """Stop all threads."""
        self.pipeline.close()


def grain_dataset(items: int, seed: int) -> Any:
    """Return a shuffled Grain dataset."""
    import grain

    mapped = grain.MapDataset.source(range(items)).shuffle(seed=seed % (1 << 31)).map(work)
    return mapped.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))


def _py_dataset(items: int) -> Any:
    import keras

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return _batches(items)

        def __getitem__(self, number: int) -> Any:
            return torch.stack([work(item) for item in range(items)[number * BATCH : (number + 1) * BATCH]])

    return Batches()


def _batches(items: int) -> int:
    return -(-items // BATCH)


def _stock_py_dataset(items: int, seed: int) -> Any:
    dataset = _py_dataset(items)
    return [dataset[number] for number in range(len(dataset))]


def stream(items: int, seed: int) -> DataLoader[Any]:
    """Return an iterable-style DataLoader with two workers whose dataset says `later`."""
    return DataLoader(Stream(items), batch_size=BATCH, num_workers=2, multiprocessing_context="fork")


def adapters() -> Iterator[Adapter]:
    """Yield what can be had here: Keras and Grain only where they are installed."""
    fork: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    for kind, high, weight in (("thread", THREADS, 8.0), ("process", PROCESSES, 3.0)):
        beside = kind == "thread"
        yield Adapter(f"plain loop {kind}", weight, _plain(kind, high, fork), map_style, beside)
        yield Adapter(f"any order {kind}", weight, _any_order(kind, high, fork), map_style, beside, ordered=False)
        if importlib.util.find_spec("keras"):
            yield Adapter(f"PyDataset {kind}", weight, _keras(kind, high), _stock_py_dataset, beside)
    yield Adapter("later", 2.0, lambda n, s: Elastic(stream(n, s), "process", PROCESSES), stream, True)
    if importlib.util.find_spec("grain"):
        yield Adapter("Grain", 6.0, Grain, grain_dataset, True)


def _plain(kind: str, high: int, fork: dict[str, Any]) -> Any:
    return lambda n, s: Plain(map_style(n, s, **fork), kind, high)


def _any_order(kind: str, high: int, fork: dict[str, Any]) -> Any:
    return lambda n, s: Elastic(map_style(n, s, **fork), kind, high, order="any")


def _keras(kind: str, high: int) -> Any:
    return lambda n, s: Keras(n, kind, high)
