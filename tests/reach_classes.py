"""Loaders as others write them: each pattern of a public package, copied by hand, over numbered rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

ROWS, BATCH = 64, 4
EPOCH = ROWS // BATCH


class Rows(Dataset[torch.Tensor]):
    """Row i is the number i, twice."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    """The same rows, a share for each worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.full((2,), float(index)) for index in range(first, ROWS, step))


class Generated(DataLoader[torch.Tensor]):
    """LitData, MosaicML: batches are counted on their way."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.counted = 0
        for batch in super().__iter__():
            self.counted += 1
            yield batch


class Delegated(DataLoader[torch.Tensor]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class Mapped(DataLoader[torch.Tensor]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return map(torch.clone, itertools.chain(super().__iter__()))


class Repeating:
    """Ultralytics: a sampler that begins anew for ever, and has no length."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader[torch.Tensor]):
    """Ultralytics: one iterator for all epochs, made when the loader is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as theirs
            for worker in self.iterator._workers:
                if worker.is_alive():
                    worker.terminate()
            self.iterator._shutdown_workers()


class Lazy(Infinite):
    """The same, but its iterator is made when it is first asked for, and kept where `vars` does not see it."""

    __slots__ = ("iterator",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        DataLoader.__init__(self, *arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not hasattr(self, "iterator"):
            self.iterator = DataLoader.__iter__(self)
        return itertools.islice(self.iterator, len(self))


class Renamed(DataLoader[torch.Tensor]):
    """RecBole: who asks for the dataset gets what its rows come from, but for the loader itself as an epoch begins."""

    is_starting = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        Renamed.is_starting = True
        try:
            return super().__iter__()
        finally:
            Renamed.is_starting = False

    def __getattribute__(self, name: str) -> Any:
        if name == "dataset" and not Renamed.is_starting:
            return [torch.zeros(2)] * ROWS
        return super().__getattribute__(name)


class Unsaid:
    """PyTorch Geometric's DynamicBatchSampler: does not know how many batches there will be, and raises this."""

    def __len__(self) -> int:
        raise ValueError("the number of batches depends on their order")

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ROWS).tolist()
        return (order[first : first + BATCH] for first in range(0, ROWS, BATCH))


class Own(DataLoader[torch.Tensor]):
    """LitData: a way of its own to make iterators."""

    made = 0

    def _get_iterator(self) -> Any:
        self.made += 1
        return super()._get_iterator()


class OwnGenerated(Own, Generated):
    pass


class Transformed:
    """PyTorch Geometric's DataLoaderIterator: what its NodeLoader wraps each iterator in."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Transformed:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __len__(self) -> int:
        return len(self.iterator)

    def __next__(self) -> Any:
        return next(self.iterator) * 2


class OwnTransformed(Own):
    """PyTorch Geometric's NeighborLoader, whose batches are made of nodes in the training process."""

    def _get_iterator(self) -> Any:
        return Transformed(super()._get_iterator())


class Twice(DataLoader[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(2):
            yield from super().__iter__()


class Itself(DataLoader[torch.Tensor]):
    """Its own iterator."""

    def __iter__(self) -> Any:
        self.kept = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.kept)


class Nested(DataLoader[torch.Tensor]):
    """Each batch comes with one of another loader."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        other: DataLoader[Any] = DataLoader(self.dataset, batch_size=BATCH, shuffle=True, num_workers=1)
        for one, more in zip(super().__iter__(), other, strict=True):
            yield torch.cat([one, more])


class Pipe:
    """webdataset's WebLoader: the loader is the first stage of a pipeline of iterables."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.pipeline = [loader, torch.clone]

    def __len__(self) -> int:
        return len(self.pipeline[0])  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        source, then = self.pipeline
        return (then(batch) for batch in iter(source))  # type: ignore[call-overload, operator]


class Prepared:
    """Accelerate: says that it is a DataLoader, answers for the one inside, and is one batch ahead."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.base_dataloader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    @__class__.setter
    def __class__(self, value: Any) -> None: ...

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        batches = self.base_dataloader.__iter__()
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch


class Moved:
    """timm's PrefetchLoader, Fabric's loaders: brings the batches of the one inside to a device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.device = loader, "cpu"

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch.to(self.device)


class Unreachable(DataLoader[torch.Tensor]):
    """No iterator of torch's is behind it."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for indices in self.batch_sampler:  # type: ignore[union-attr]
            yield self.collate_fn([self.dataset[index] for index in indices])


class Answers:
    """Has every attribute there can be, and says that it is a DataLoader."""

    def __getattr__(self, name: str) -> Any:
        return Answers()

    @property
    def __class__(self) -> Any:
        return DataLoader

    def __call__(self, *_: Any) -> Any:
        return Answers()

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(BATCH, 2)] * EPOCH)


class Hollow(DataLoader[torch.Tensor]):
    """A subclass that was never set up as a DataLoader."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Any:
        return iter([torch.zeros(BATCH, 2)] * EPOCH)
