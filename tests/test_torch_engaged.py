"""New workers begin while the batch that the stock ones still make is waited for."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402

LATER = 4  # of the first that the one stock worker is not sent


class Waits(Dataset[bool]):
    """Item 2 ends once a later one has begun, which only another worker can."""

    def __init__(self) -> None:
        self.begun = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> bool:
        if index >= LATER:
            self.begun.set()
        return index != 2 or self.begun.wait(8.0)


def test_new_workers_do_not_wait_for_the_stock_ones() -> None:
    loader = DataLoader(Waits(), num_workers=1, multiprocessing_context="fork")
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    iterator = iter(loader)
    made = [next(iterator), next(iterator)]
    until_s = time.monotonic() + 20.0
    while getattr(iterator, "engine", None) is None and time.monotonic() < until_s:
        pipeline.resize({"load": 3, "load.window": 6})
        time.sleep(0.01)
    made += list(iterator)
    assert [bool(item) for item in made] == [True] * 12
    pipeline.close()
