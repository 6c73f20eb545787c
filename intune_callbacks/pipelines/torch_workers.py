"""What runs inside a worker of a torch pipeline: fetching one batch of indices, seeding, carrying tensors."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

__all__ = ["Fetch", "Start", "carry_tensor", "context_of", "pin"]

# What stock workers report as their number of siblings has no meaning when it changes; a dataset that shards by it
# is iterable-style and never gets here.
MANY = 1 << 10


class Fetch:
    """The work of one DataLoader worker: a numbered list of indices in, a collated batch out.

    Args:
        loader: the user's map-style loader.
        seeded: seed Python, numpy and torch from (base seed, batch number) before each batch. The random state
            belongs to the batch, not to the worker, so augmentations do not depend on how many workers there are.
    """

    def __init__(self, loader: DataLoader[Any], seeded: bool) -> None:
        self._kind, self._dataset, self._collate = loader._dataset_kind, loader.dataset, loader.collate_fn
        self._auto_collation, self._drop_last = loader._auto_collation, loader.drop_last
        self._seeded = seeded
        self._fetcher: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetcher": None}

    def __call__(self, task: tuple[int, int, Any]) -> Any:
        base_seed, number, index = task
        if self._fetcher is None:
            self._fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
                self._kind, self._dataset, self._auto_collation, self._collate, self._drop_last
            )
        if self._seeded:
            seed = base_seed + number
            random.seed(seed)
            # `torch.manual_seed` also visits every accelerator: 200 us a batch instead of 1.
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
        return self._fetcher.fetch(index)


class Start:
    """What a stock DataLoader worker does before its first batch.

    Args:
        dataset: what `torch.utils.data.get_worker_info().dataset` gives in the child; None outside DataLoader.
        init_fn: the user's `worker_init_fn`.
        base_seed: the epoch's base seed.
    """

    def __init__(self, dataset: Any = None, init_fn: Callable[[int], None] | None = None, base_seed: int = 0) -> None:
        self._dataset, self._init_fn, self._base_seed = dataset, init_fn, base_seed

    def __call__(self, worker_id: int) -> None:
        signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
        # The OpenMP pool does not survive a fork: more than one thread hangs in the child.
        torch.set_num_threads(1)
        seed = self._base_seed + worker_id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        if self._dataset is not None:
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=worker_id, num_workers=MANY, seed=seed, dataset=self._dataset
            )
        if self._init_fn is not None:
            self._init_fn(worker_id)


def carry_tensor(value: Any) -> Any:
    """Pickle plain CPU tensors through numpy, so that their bytes travel out of band and are written once."""
    if type(value) is not torch.Tensor:
        return NotImplemented
    plain = value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous()
    if not plain or value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
        return NotImplemented
    raw = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
    return _rebuild_tensor, (raw, value.dtype, tuple(value.shape))


def _rebuild_tensor(raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape)


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
