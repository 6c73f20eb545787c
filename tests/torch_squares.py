"""Loaders of squares, as the stock one delivers them and as one that is resized."""

from __future__ import annotations

import time

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    get_worker_info,
)

from intune_callbacks.pipelines.find import find


class Squares(Dataset):
    """Sample i is (i, i^2 as a tensor); some samples are slow."""

    def __init__(self, n: int = 120) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        if i % 37 == 5:
            time.sleep(0.003)
        return i, torch.full((3,), float(i * i))


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor([i]) for i in range(first, 120, step))


def key(batch):
    """A batch as nested lists, comparable with ==."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, (list, tuple)):
        return [key(part) for part in batch]
    return batch


def stock(make) -> list:
    """What the loader delivers with num_workers=0 and without us."""
    torch.manual_seed(0)
    return [key(batch) for batch in make(num_workers=0)]


def live(make, **arguments):
    """Build a pipeline and its running iterator, as `check_pipeline` wants them."""
    torch.manual_seed(0)
    loader = make()
    found = find(loader, **{"workers_kind": "process"} | arguments)
    assert found.pipeline is not None, found.why
    return found.pipeline, found.pipeline.adopt(iter(loader))


def pairs(samples):
    """A collate function of the user's."""
    return [s[0] for s in samples], torch.stack([s[1] for s in samples])


LOADERS = {
    "sequential": dict(batch_size=4),
    "shuffled": dict(batch_size=4, shuffle=True),
    "drop_last": dict(batch_size=7, shuffle=True, drop_last=True),
    "collate": dict(batch_size=4, collate_fn=pairs),
    "unbatched": dict(batch_size=None),
    "persistent": dict(batch_size=4, shuffle=True, persistent_workers=True),
    "prefetch": dict(batch_size=4, prefetch_factor=5),
}


def make(name: str):
    extra = LOADERS[name]

    def build(num_workers: int = 2):
        only_with_workers = ("persistent_workers", "prefetch_factor")
        arguments = {k: v for k, v in extra.items() if num_workers or k not in only_with_workers}
        return DataLoader(Squares(), num_workers=num_workers, **arguments)

    return build
