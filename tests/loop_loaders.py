"""What the tests of loops of the user's own share: loaders of every kind, and a loop over them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from busy_machine import eventually
from processes import children
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

EAGER: dict[str, Any] = {"decide_every_s": 0.1, "decide_every_batches": 5, "warmup_batches": 3, "cpus": 8.0}
ROWS, BATCH = 400, 4


class Slow(Dataset):
    def __init__(self, row_s: float = 0.003) -> None:
        self.row_s = row_s

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.row_s)
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, ROWS, step):
            time.sleep(0.001)
            yield torch.tensor([float(index)])


class Doubling(DataLoader):
    """A subclass with a generator of its own, as third-party loaders have."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2.0 * batch


class Moved:
    """No DataLoader: what brings the batches of one to a device."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.device = loader, "cpu"

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield batch.to(self.device)


def slow(**arguments: Any) -> DataLoader:
    return DataLoader(Slow(), batch_size=BATCH, shuffle=True, **arguments)


def nodes() -> Any:
    torchdata = pytest.importorskip("torchdata.nodes")
    mapped = torchdata.ParallelMapper(
        torchdata.IterableWrapper(range(200)), Slow().__getitem__, num_workers=1, method="thread"
    )
    return torchdata.Loader(torchdata.Mapper(torchdata.Batcher(mapped, BATCH), torch.stack))


LOADERS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "one worker": (lambda: slow(num_workers=1), {}, True),
    "persistent workers": (lambda: slow(num_workers=1, persistent_workers=True), {}, True),
    "no workers": (slow, {}, False),
    "no workers, consent": (slow, {"workers_kind": "process"}, True),
    "threads": (lambda: slow(num_workers=1), {"workers_kind": "thread"}, True),
    "generator subclass": (lambda: Doubling(Slow(), batch_size=BATCH, shuffle=True, num_workers=1), {}, True),
    "wrapper": (lambda: Moved(slow(num_workers=1)), {}, True),
    "iterable": (lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2), {}, True),
    "observe": (lambda: slow(num_workers=1), {"mode": "observe"}, False),
    "off": (lambda: slow(num_workers=1), {"mode": "off"}, False),
    "torchdata nodes": (nodes, {}, True),
    "a list": (lambda: [torch.tensor([float(k)]) for k in range(50)], {}, False),
}


def values(batch: Any) -> Any:
    return [float(value) for value in (batch if isinstance(batch, (list, tuple)) else batch.flatten())]


def trained(loader: Any, stop: int | None = None) -> list[Any]:
    """Two epochs, each left early behind batch `stop`."""
    seen = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            seen.append(values(batch))
            time.sleep(0.001)
            if number == stop:
                break
    return [*seen, torch.get_rng_state().tolist()]


def assert_nothing_is_left() -> None:
    assert eventually(lambda: not children() and not ours(), 30.0)


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("intune")]
