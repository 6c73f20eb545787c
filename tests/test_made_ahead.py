"""A DataLoader without workers whose own iterator is read by a thread, or reads other loaders that have workers."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset

from intune_callbacks import live
from intune_callbacks.pipelines.timed import made_ahead


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        time.sleep(0.004)
        return index


class Background(threading.Thread):
    """As that of `prefetch_generator`."""

    def __init__(self, inner: Iterator[Any]) -> None:
        super().__init__(daemon=True)
        self.queue: queue.Queue[Any] = queue.Queue(1)
        self.inner = inner
        self.start()

    def run(self) -> None:
        for batch in self.inner:
            self.queue.put(batch)
        self.queue.put(None)

    def __iter__(self) -> Background:
        return self

    def __next__(self) -> Any:
        batch = self.queue.get()
        if batch is None:
            raise StopIteration
        return batch


class ReadAhead(DataLoader[int]):
    def __iter__(self) -> Any:
        return Background(super().__iter__())


class Yields(DataLoader[int]):
    def __iter__(self) -> Any:
        ahead = Background(super().__iter__())
        for batch in ahead:  # noqa: UP028
            yield batch


class Zipped(DataLoader[int]):
    """As scvi-tools' `ConcatDataLoader`."""

    def __init__(self, workers: int) -> None:
        self.first = DataLoader(Slow(), batch_size=1, num_workers=workers)
        self.second = DataLoader(Slow(), batch_size=4, num_workers=workers)
        super().__init__(self.first)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return zip(self.first, itertools.cycle(self.second))


class Generated(Zipped):
    def __iter__(self) -> Any:
        for both in super().__iter__():  # noqa: UP028
            yield both


@pytest.mark.parametrize("kind", [ReadAhead, Yields])
@pytest.mark.parametrize("mode", ["tune", "observe"])
def test_what_a_thread_makes_is_not_said_to_be_made_in_the_loop(kind: type[DataLoader[int]], mode: str) -> None:
    loader = live(kind(Slow(), batch_size=1), mode=mode, show_card=False, warmup_batches=2, cpus=8.0)
    for _ in loader:
        time.sleep(0.001)
    report = loader.close()
    assert [hint["kind"] for hint in report["hints"]] == ["ahead"]
    assert "batch itself" not in report["cause"]


def test_an_iterator_of_its_own_without_a_thread_makes_them_in_the_loop() -> None:
    loader = DataLoader(Slow(), batch_size=1)
    assert made_ahead(iter(loader)) is None and made_ahead(map(int, loader)) is None
    assert made_ahead(batch for batch in loader) is None


@pytest.mark.parametrize("kind", [Zipped, Generated])
def test_what_workers_of_loaders_inside_make_is_not_said_to_be_made_in_the_loop(kind: type[Zipped]) -> None:
    loader = live(kind(1), show_card=False, warmup_batches=2, cpus=8.0)
    for _ in loader:
        time.sleep(0.001)
    report = loader.close()
    assert [hint["kind"] for hint in report["hints"]] == ["serial"]
    assert "batch itself" not in report["cause"]
    assert not report["advice"]


@pytest.mark.parametrize("kind", [Zipped, Generated])
def test_loaders_inside_without_workers_make_them_in_the_loop(kind: type[Zipped]) -> None:
    batches = iter(kind(0))
    next(batches)
    assert made_ahead(batches) is None
