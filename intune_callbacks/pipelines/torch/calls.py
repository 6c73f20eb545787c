"""Calls by `later` on their way to a helper, and what a helper makes of them."""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import DataLoader

from intune_callbacks.pipelines.later import Later, Token, call_of, hold, known, resolved
from intune_callbacks.pipelines.torch.carry import carry_tensor
from intune_callbacks.pipelines.torch.reach import dataset_of
from intune_callbacks.pipelines.torch.told import WHERE
from intune_callbacks.pipelines.torch.workers import seed_all

__all__ = ["Batch", "Evaluate", "Seeds", "Shared", "Task", "evaluated", "packed", "same"]

NESTED, DEEPEST = 4, 16
"""How deep datasets are looked for in each other, and how deep two batches are compared. A choice."""

# Those of Python's `random`, numpy and torch, and the batch's number.
Seeds = tuple[tuple[int, int, int], int]
# The worker's id, its seed, the seeds of the batch, the packed samples.
Task = tuple[int, int, Seeds, bytes]


def evaluated(collate: Callable[[Any], Any], items: Any, seeds: Seeds) -> Any:
    """Return the batch of `items`, every call in them made; random numbers are the batch's own.

    Raises:
        RuntimeError: the user's function raised StopIteration.
    """
    seed_all(*seeds)
    try:
        return collate(resolved(items))
    except StopIteration as error:
        # In `__iter__` it would have been one; as it is, it would end the worker's share without a word.
        raise RuntimeError("generator raised StopIteration") from error


class Shared:
    """What the workers of one iterator and the training process both see.

    Args:
        credits: a semaphore: how many batches helpers may be given now.
        persistent: the workers live for several epochs.
        is_known: helpers have made batches of this loader before: nothing is watched first, but proved all the same.

    Attributes:
        board: one byte each: whether calls may be made later, the epoch, and per worker whether it was proved.
    """

    ON, EPOCH, PROVED = 0, 1, 2

    def __init__(self, workers: int, credits: Any, persistent: bool, is_known: bool) -> None:
        self.board = mmap.mmap(-1, self.PROVED + workers)
        self.workers, self.credits, self.persistent, self.is_known = workers, credits, persistent, is_known


@dataclass(eq=False)
class Batch:
    """What a worker delivers in place of a batch.

    Args:
        worker: its id.
        epoch: of its iterator, modulo 256.
        value: the batch, None where `raw` stands for it.
        raw: the samples with the calls in them, packed; in `proof`, to be compared with the value.
        seeds: of the batch's random numbers.
        cpu_s: CPU seconds spent on it.
        refused: why no call shall be made later; empty where nothing new speaks against it.
        proof: both were made.
    """

    worker: int
    epoch: int
    value: Any
    raw: bytes | None
    seeds: Seeds
    cpu_s: float
    refused: str
    proof: bool

    def pin_memory(self) -> Batch:
        """Called in the thread in which torch pins batches."""
        self.value = pin_memory(self.value)  # type: ignore[no-untyped-call]
        return self


class Evaluate:
    """What a helper does to one batch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset, self._collate, self._workers = dataset_of(loader), loader.collate_fn, loader.num_workers

    def __call__(self, task: Task) -> Any:
        """Return the batch; an error in it as torch's workers hand it on."""
        worker, seed, seeds, raw = task
        hold(None)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=self._workers, seed=seed, dataset=self._dataset
        )
        try:
            return evaluated(self._collate, pickle.loads(raw), seeds)
        except Exception:
            return ExceptionWrapper(where=WHERE.format(worker))  # type: ignore[no-untyped-call]


class _Packer(pickle.Pickler):
    """Names what a helper has of its own: the dataset, and what `later` made before workers were forked."""

    def __init__(self, file: io.BytesIO, unknown: int) -> None:
        super().__init__(file, protocol=5)
        self._unknown = unknown
        self._names = dict(_named(_info().dataset))

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is Token:
            return Token, call_of(value)
        if kind is Later:
            return (known, (value.number,)) if value.number < self._unknown else (Later, (value.fn,))
        if issubclass(kind, IterableDataset) and id(value) in self._names:
            return _dataset_at, self._names[id(value)]
        return carry_tensor(value)


def packed(items: Any, unknown: int) -> bytes:
    """Return samples with calls in them as bytes.

    Args:
        unknown: the number of the first result of `later` that a helper does not have.

    Raises:
        Exception: what pickling raises.
    """
    file = io.BytesIO()
    _Packer(file, unknown).dump(items)
    return file.getvalue()


def _info() -> Any:
    return get_worker_info()


def _named(dataset: Any, names: tuple[str, ...] = ()) -> Any:
    """Yield the identity of a dataset and of those in it, each with the names that lead there."""
    yield id(dataset), names
    for name, part in vars(dataset).items():
        if len(names) < NESTED and issubclass(type(part), IterableDataset):
            yield from _named(part, (*names, name))


def _dataset_at(*names: str) -> Any:
    found: Any = _info().dataset
    for name in names:
        found = vars(found)[name]
    return found


def same(one: Any, other: Any, depth: int = DEEPEST) -> bool:
    """Return whether two batches cannot be told apart; False where that is not known."""
    try:
        return depth > 0 and type(one) is type(other) and _same(one, other, depth - 1)
    except Exception:  # anything may stand in a batch, also what raises when it is compared
        return False


def _same(one: Any, other: Any, depth: int) -> bool:
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return bool(np.array_equal(_bytes_of(one), _bytes_of(other)))
    if isinstance(one, np.ndarray) and one.dtype != object:
        return bool((one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return bool(list(one) == list(other)) and all(same(one[key], other[key], depth) for key in one)
    if isinstance(one, (list, tuple, np.ndarray)):
        return len(one) == len(other) and all(same(*pair, depth) for pair in zip(one, other, strict=True))
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    if hasattr(one, "__dict__"):
        return same(vars(one), vars(other), depth)
    return bool(one == other)


def _bytes_of(value: torch.Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
