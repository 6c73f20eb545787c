"""Iterable-style datasets whose workers own shards, and a loader of them gone through epoch by epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from intune_callbacks import Clock
from intune_callbacks.pipelines.find import find


class Shards(IterableDataset):
    """Shard k holds as many numbers as it is told; worker w reads the shards w, w + W, and so on."""

    def __init__(self, sizes: list[int], is_known: bool = True, item_s: float = 0.0) -> None:
        self.sizes, self.item_s = sizes, item_s
        if is_known:
            self.num_shards = len(sizes)

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for shard in range(info.id, len(self.sizes), info.num_workers):
            for number in range(self.sizes[shard]):
                time.sleep(self.item_s)
                yield torch.tensor([1000.0 * shard + number])


class Tars(Shards):
    """webdataset: the shards are the urls of the first part of a pipeline."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes, is_known=False)
        self.pipeline = [self]
        self.urls = [f"{shard}.tar" for shard in range(len(sizes))]


class Faulty(Shards):
    def __iter__(self) -> Any:
        if get_worker_info().id:
            raise KeyError("no such file")
        yield from super().__iter__()


class Late(Shards):
    """The second worker begins when it is allowed to."""

    def __init__(self, sizes: list[int], leave: Any) -> None:
        super().__init__(sizes)
        self.leave = leave

    def __iter__(self) -> Any:
        if get_worker_info().id:
            self.leave.wait(60.0)
        yield from super().__iter__()


class Rows(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])


class Watched:
    """A loader that is only watched, or one whose window is live, gone through epoch by epoch."""

    def __init__(self, loader: Any, is_live: bool, clock: Clock | None = None) -> None:
        self.loader = loader
        pipeline: Any = find(loader, live=is_live, clock=clock).pipeline
        self.pipeline = pipeline
        pipeline.prepare()
        self.told: list[str] = []

    def epoch(self, stop: int | None = None, each: Any = lambda number: None) -> list[float]:
        """Return what is delivered; `told` is what is known after each batch."""
        seen, self.told = [], []
        for number, batch in enumerate(self.pipeline.adopt(iter(self.loader)), 1):
            seen += batch.flatten().tolist()
            each(number)
            self.told.append(self.said[0])
            if number == stop:
                break
        return seen

    @property
    def said(self) -> tuple[str, str]:
        """Sentence and line."""
        hints = getattr(self.pipeline, "late_hints", ())
        return (hints[0].what, hints[0].line) if hints else ("", "")

    @property
    def delivering(self) -> int | None:
        return self.pipeline.stages()[0].delivering


def loader(dataset: Any, workers: int, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=options.pop("batch_size", 1), num_workers=workers, **options)
