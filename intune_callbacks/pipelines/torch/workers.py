"""What runs inside a worker of a torch pipeline: fetching one batch of indices, seeding."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import zlib
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import DataLoader, _DatasetKind

from intune_callbacks.pipelines.torch.reach import dataset_of

__all__ = ["Fetch", "SeededMap", "Start", "context_of", "pin", "random_states", "seed_all"]

# Of Python's `random`, numpy and torch.
_Seeds = tuple[int, int, int]
# The stock workers that ours take over from had the base seed and their number, below any number of workers.
_BEHIND_STOCK = 2**20


class Fetch:
    """The work of one DataLoader worker: a numbered list of indices in, a collated batch out.

    Args:
        start: what began the worker; None computes in the training process, whose random state is left alone. Before
            each batch Python, numpy and torch are seeded with the batch's number and what `start` knows. The random
            state belongs to the batch, not to the worker, so augmentations do not depend on how many workers there are.
    """

    def __init__(self, loader: DataLoader[Any], start: Start | None) -> None:
        self._kind, self._dataset, self._collate = loader._dataset_kind, dataset_of(loader), loader.collate_fn
        self._auto_collation, self._drop_last = loader._auto_collation, loader.drop_last
        self._start = start
        self._fetcher: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetcher": None}

    def __call__(self, task: tuple[int, int, Any]) -> Any:
        base_seed, number, index = task
        if self._fetcher is None:
            self._fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
                self._kind, self._dataset, self._auto_collation, self._collate, self._drop_last
            )
        if self._start is not None:
            seed_all(self._start.told or (base_seed, base_seed, base_seed), number)
        return self._fetcher.fetch(index)


class SeededMap:
    """A map function whose random numbers depend on the item's number, not on the process that computes it."""

    def __init__(self, fn: Callable[[Any], Any], seeds: _Seeds) -> None:
        self._fn, self._seeds = fn, seeds

    def __call__(self, task: tuple[int, Any]) -> Any:
        number, item = task
        seed_all(self._seeds, number)
        return self._fn(item)


class Start:
    """What a stock DataLoader worker does before its first batch.

    Args:
        dataset: what `torch.utils.data.get_worker_info().dataset` gives in the child; None outside DataLoader.
        workers: the user's number: worker ids stay below it, also when there are more.
        before: how often others were started for the same iterator and have ended.

    Attributes:
        told: what the first worker returned, in all of them.
    """

    def __init__(
        self,
        dataset: Any = None,
        init_fn: Callable[[int], None] | None = None,
        base_seed: int = 0,
        workers: int = 1,
        before: int = 0,
    ) -> None:
        self._dataset, self._init_fn, self._base_seed, self._before = dataset, init_fn, base_seed, before
        self._workers = max(1, workers)
        self.told: _Seeds | None = None

    def again(self, base_seed: int, before: int) -> None:
        """Be that of another iterator: of a process that works for several."""
        self._base_seed, self._before = base_seed, before

    def __call__(self, number: int) -> _Seeds | None:
        """Begin the process that was started as the `number`-th.

        Returns:
            The seeds the user's `worker_init_fn` has left, None if there is none. Those of the first worker count for
            all: what they owe to the rank or the user's own seed stays, and no batch depends on who computes it.
        """
        signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
        # The OpenMP pool does not survive a fork: more than one thread hangs in the child.
        torch.set_num_threads(1)
        # A batch crosses by value: torch's `default_collate` is not to make it in /dev/shm, which may have no room for
        # one of each worker.
        torch.UntypedStorage._new_shared = classmethod(_in_own_memory)  # type: ignore[method-assign, assignment]
        worker_id = number % self._workers
        # Of each process another one, as in stock: a generator that `worker_init_fn` seeds in the dataset goes by it.
        seed = self._base_seed + _BEHIND_STOCK + number
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        if self._dataset is not None:
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=worker_id,
                num_workers=self._workers,
                seed=seed + self._before * _BEHIND_STOCK,
                dataset=self._dataset,
            )
        if self._init_fn is None:
            return None
        stock = random_states()
        self._init_fn(worker_id)
        own = random_states()
        python, numpy = (seed if left == begun else left for left, begun in zip(own[:2], stock[:2], strict=True))
        return python, numpy, torch.initial_seed()


def _in_own_memory(kind: Any, size: int, *, device: Any = "cpu") -> Any:
    return kind(size, device=device)


def random_states(epoch: int = 0) -> _Seeds:
    """Return one number for each of the states of Python's `random`, numpy and torch; none of them moves.

    Args:
        epoch: other numbers for each, also where the states stay the same.
    """
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().numpy()
    python, numpy, of_torch = (zlib.crc32(pickle.dumps((state, epoch))) for state in states)
    return python, numpy, of_torch


def seed_all(seeds: _Seeds, number: int) -> None:
    """Seed Python's `random`, numpy and torch for the batch or item `number`."""
    random.seed(seeds[0] + number)
    np.random.seed((seeds[1] + number) % 2**32)
    # `torch.manual_seed` also visits every accelerator: 200 us a batch instead of 1.
    torch.default_generator.manual_seed((seeds[2] + number) % 2**64)


def context_of(given: Any) -> BaseContext:
    """Return the multiprocessing context a user gave as None, a name or a context."""
    if given is None or isinstance(given, str):
        return multiprocessing.get_context(given)
    return given  # type: ignore[no-any-return]


def pin(device_index: int, kind: str) -> Callable[[Any], Any]:
    """Return the function that copies a batch to pinned memory, bound to the training thread's device."""
    from torch.utils.data._utils.pin_memory import pin_memory

    def finish(batch: Any) -> Any:
        # A new thread starts on device 0: pinning there would open a context on another rank's GPU.
        torch.accelerator.set_device_index(device_index)
        return pin_memory(batch, kind)  # type: ignore[no-untyped-call]

    return finish
