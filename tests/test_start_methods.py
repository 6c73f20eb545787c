"""Each way to start a process: the same batches under any resizes, none held up, the dataset pickled once."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_take_over import Squares, epochs_of, take_over

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, get_worker_info  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402

METHODS = ["fork", "forkserver", "spawn"]
SENDING = METHODS[1:]
pytestmark = pytest.mark.timeout(900)  # each process imports torch


@pytest.mark.parametrize("method", SENDING)
def test_batches_go_on_while_ours_begin(method: str, tmp_path: Path) -> None:
    take_over(tmp_path, method, 40_000)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_epochs_are_the_stock_epochs_under_any_resizes(method: str, persistent: bool) -> None:
    def made() -> DataLoader[Any]:
        torch.manual_seed(11)
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
        return DataLoader(Squares(1_200), batch_size=4, shuffle=True, multiprocessing_context=method, **options)

    expected = epochs_of(made(), 2)
    loader, draw = made(), random.Random(5)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    got: list[list[Any]] = []
    for _ in range(2):
        got.append([])
        for batch in loader:
            got[-1].append(batch.tolist())
            if draw.random() < 0.05:
                pipeline.resize({"load": draw.randint(1, 5), "load.window": draw.randint(1, 12)})
    assert got == expected and pipeline.why_not == ""
    pipeline.close()


pickled = itertools.count()
"""Counts how often a `Held` was: a number in its class, or a list, would be a change of the dataset."""


class Held(Dataset[Any]):
    """A dataset that knows whether its tensor is the one of the training process."""

    def __init__(self, n: int) -> None:
        self.n, self.rows = n, torch.arange(n)

    def __getstate__(self) -> dict[str, Any]:
        next(pickled)
        return self.__dict__

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.rows[i].item(), self.rows.is_shared()


@pytest.mark.parametrize("method", SENDING)
def test_a_dataset_is_pickled_once_and_its_tensors_are_shared(method: str) -> None:
    loader = DataLoader(Held(4_000), batch_size=4, num_workers=1, multiprocessing_context=method)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    before = next(pickled)
    rows: list[int] = []
    while len(rows) < 4_000:
        if len(rows) == 100:
            pipeline.resize({"load": 4, "load.window": 8})
        given, shared = next(iterator)
        rows += given.tolist()
        assert shared.all()
    assert rows == list(range(4_000))
    assert next(pickled) - before == 1 + 1
    assert pipeline.why_not == ""
    pipeline.close()


class AsProcess(threading.Thread):
    """MONAI's ThreadDataLoader: torch's worker in a thread, which looks like a process to the DataLoader."""

    @property
    def pid(self) -> int:
        return id(self)


class AsQueue(queue.Queue):
    def close(self) -> None: ...

    def cancel_join_thread(self) -> None: ...


class Threads(SpawnContext):
    _name = "processthread"
    Process = AsProcess
    Queue = AsQueue


@pytest.mark.parametrize("kind", [None, "process", "thread"])
def test_workers_that_are_no_processes_stay_as_they_are_but_by_consent(kind: str | None) -> None:
    loader = DataLoader(Squares(240), batch_size=4, num_workers=2, multiprocessing_context=Threads())
    found = find(loader, workers_kind=kind)
    pipeline = found.pipeline
    pipeline.prepare()
    rows: list[Any] = []
    for batch in pipeline.adopt(iter(loader)):
        if len(rows) == 40:
            pipeline.resize({"load": 4, "load.window": 12})
        rows += batch.tolist()
    assert rows == [row for batch in epochs_of(DataLoader(Squares(240), batch_size=4), 1)[0] for row in batch]
    assert pipeline.stages()[0].current == (4 if kind == "thread" else 2)
    assert ("Threads starts" in found.why) == (kind != "thread")
    pipeline.close()


class OwnNumbers(Dataset[Any]):
    """MONAI's transforms: a generator in the dataset, seeded where a worker starts."""

    drawn = np.random.RandomState(0)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> int:
        return int(self.drawn.randint(2**31))


def seeded(worker_id: int) -> None:
    info = get_worker_info()
    info.dataset.drawn = np.random.RandomState(info.seed % 2**32)


def test_a_generator_in_the_dataset_is_another_one_in_each_worker() -> None:
    loader = DataLoader(OwnNumbers(), batch_size=4, num_workers=1, worker_init_fn=seeded)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    pipeline.resize({"load": 4, "load.window": 8})
    numbers = torch.cat(list(loader)).tolist()
    pipeline.close()
    assert len(set(numbers)) == len(numbers) == 160
