"""How many batches of an iterable-style DataLoader are in flight where /dev/shm is small."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from intune_callbacks.pipelines.torch.window import WindowLoader  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(40.0))


class Wide(IterableDataset[Any]):
    """Items of many tensors, as of a table."""

    def __iter__(self) -> Iterator[Any]:
        return ({f"column {k}": torch.tensor(k + i) for k in range(40)} for i in range(400))


def test_no_more_batches_are_in_flight_than_shared_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sends each through /dev/shm, 64 MB in a container: beyond what stock has there, half of what is free."""
    loader = DataLoader(Counted(), batch_size=4, num_workers=2)
    pipeline = WindowLoader(loader, clock=Clock())
    pipeline.prepare()
    room = os.statvfs_result((1, 1, 16 * 12, 16 * 12, 16 * 12, 1, 1, 1, 0, 255))  # twelve batches
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    try:
        batches = iter(loader)
        pipeline.resize({"load.window": 64})
        assert batches._send_idx == 4  # nobody knows how large they are
        seen, most = [next(batches)], 0
        for batch in batches:
            if len(seen) < 8:  # what is asked of a worker beyond its end nobody answers
                most = max(most, batches._send_idx - batches._rcvd_idx)
            seen.append(batch)
        assert most == pipeline.stages()[1].current == 6
        stock = list(DataLoader(Counted(), batch_size=4, num_workers=2))
        assert [batch.tolist() for batch in seen] == [batch.tolist() for batch in stock]
    finally:
        pipeline.close()


def test_no_more_batches_are_in_flight_than_there_are_descriptors_for() -> None:
    """Torch opens one for each tensor that a worker has sent and nobody has taken."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 500, limits[1]))
    loader = DataLoader(Wide(), batch_size=4, num_workers=2)
    pipeline = WindowLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        batches = iter(loader)
        next(batches)
        pipeline.resize({"load.window": 64})
        time.sleep(1.0)  # until the workers have made them
        assert 4 <= pipeline.stages()[1].current <= (open_now + 500) // 80
        assert sum(1 for _ in batches) == 199
    finally:
        pipeline.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
