"""A training that changes its dataset while an epoch's workers run: workers started later compute what those do."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, Dataset

from intune_callbacks.pipelines.torch_loader import MapLoader
from intune_callbacks.types import Clock


class Epochal(Dataset[Any]):
    """Each sample holds the epoch that the dataset, or a part of it, was told."""

    def __init__(self, part: Epochal | None = None) -> None:
        self.epoch, self.part = 0, part

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.tensor([index, self.epoch, self.part.epoch if self.part else 0])


def trained(nested: bool, tuned: bool, persistent: bool) -> list[Any]:
    part = Epochal()
    dataset = Epochal(part)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=persistent)
    pipeline = MapLoader(loader, clock=Clock()) if tuned else None
    if pipeline is not None:
        pipeline.prepare()
    seen = []
    try:
        for epoch in (10, 20):
            for number, batch in enumerate(loader):
                if number == 0:
                    (part if nested else dataset).epoch = epoch
                if pipeline is not None:
                    pipeline.resize({"load": 3 + number % 3, "load.window": 8})
                seen.append(batch.tolist())
    finally:
        if pipeline is not None:
            pipeline.close()
    return seen


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_samples_are_those_of_the_stock_loader(nested: bool, persistent: bool) -> None:
    assert trained(nested, True, persistent) == trained(nested, False, persistent)
