"""What tests of the cache share: a function marked as pure, its dataset, the batches of a loader, a machine."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from intune_callbacks import pure
from intune_callbacks.types import Observation, Resources

GB = 10**9


@pure
def decode(number: int) -> np.ndarray[Any, Any]:
    time.sleep(0.01)  # keeping it takes up to 1 ms of a busy CPU, a third of what is worth it
    return np.random.default_rng(number).random((8, 100)).astype(np.float32)


class Decoded(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(decode(index)) + index, index


def digest(batches: Any) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for part in batch if isinstance(batch, (list, tuple)) else [batch]:
            found.update(part.numpy().tobytes())
    return found.hexdigest()


def epochs(loader: Any, count: int = 3) -> list[str]:
    torch.manual_seed(3)
    return [digest(loader) for _ in range(count)]


def loader_of(dataset: Any, workers: int) -> DataLoader[Any]:
    shuffle = not isinstance(dataset, IterableDataset)
    return DataLoader(dataset, batch_size=6, shuffle=shuffle, num_workers=workers)


def seen(used: float, wait: float = 0.5, limit: float = 10.0) -> Observation:
    machine = Resources(1.0, int(limit * GB), int(used * GB))
    return Observation(100, 1.0, 1.0, 10, 100, 10.0, 100.0, wait, 0.1, (), {}, machine)
