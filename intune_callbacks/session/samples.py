"""How many samples a batch has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["Samples", "batch_size_of"]

CONTAINERS = (tuple, list, dict)
DEEPEST = 4
"""How deep the samples of a batch are looked for. A choice: a batch is a dict of lists, or a tuple of those."""


class Samples:
    """Counts the samples of the batches of one loader, also where they are in a list and not in one tensor.

    Args:
        batch_size: what the loader says of a whole batch, None where it says nothing.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = batch_size
        self._place: tuple[Hashable, ...] = ()
        self._kind: Any = None
        self._has_shape = False  # torch computes a tensor's `len` in Python

    def count(self, batch: Any) -> int:
        """Return the samples of a batch, 1 where nothing tells."""
        try:
            # Each batch comes here, and mostly as the first one did.
            part = batch
            for key in self._place:
                part = part[key] if type(part) in CONTAINERS else None
            samples = 0
            if type(part) is self._kind:
                samples = part.shape[0] if self._has_shape else len(part)
        except Exception:  # a batch of another kind
            samples = 0
        if samples:
            return samples
        try:
            return self._looked_for(batch)
        except Exception:  # anything may be a batch, also what raises when it is asked for its shape
            return self._batch_size or 1

    def _looked_for(self, batch: Any) -> int:
        samples, place = _first_length(batch)
        if self._kind is None:
            self._kind, size = type(None), self._batch_size
            # The first batch is a whole one. Of a list of images the first tensor begins with the channels.
            elsewhere = _place_of(batch, size, DEEPEST) if size is not None and samples != size else None
            if size is not None and elsewhere is not None:
                samples, place = size, elsewhere
            if samples:
                self._place, part = place, batch
                for key in place:
                    part = part[key]
                self._kind, self._has_shape = type(part), hasattr(part, "shape")
        return samples or _said_by(batch) or self._batch_size or 1


def batch_size_of(loader: Any) -> int | None:
    """Return how many samples a loader says are in a whole batch, or its batch sampler; None where neither does.

    Args:
        loader: any; a wrapper that says nothing stands for the DataLoader inside.
    """
    return _said_by(loader) or _said_by(_inside(loader))


def _inside(wrapper: Any) -> Any:
    if "torch.utils.data" in sys.modules:
        with suppress(Exception):  # of a torch that is not known, `find` says so
            from intune_callbacks.pipelines.torch.reach import unwrapped

            return unwrapped(wrapper)
    return wrapper


def _said_by(value: Any) -> int | None:
    """Return the `batch_size` of a loader or of a batch that is an object (PyTorch Geometric's), None without one."""
    reads: tuple[Callable[[], Any], ...] = (lambda: value.batch_size, lambda: value.batch_sampler.batch_size)
    for read in reads:
        with suppress(Exception):  # no such attribute, or a property of the user's that raises
            size = read()
            if type(size) is int and size > 0:
                return size
    return None


def _first_length(batch: Any) -> tuple[int, tuple[Hashable, ...]]:
    """Return the length of the first tensor that has one, and the keys that lead there; 0 where there is none."""
    if isinstance(batch, (list, tuple)):
        parts: Any = enumerate(batch)
    else:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 0, ()
        if not isinstance(batch, Mapping):
            return 0, ()
        parts = batch.items()
    for key, part in parts:
        length, place = _first_length(part)
        if length:
            return length, (key, *place)
    return 0, ()


def _place_of(batch: Any, size: int, depth: int) -> tuple[Hashable, ...] | None:
    """Return the keys that lead to the first list or tensor of this length, None if there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return () if len(shape) and shape[0] == size else None
    is_list = isinstance(batch, (list, tuple))
    if is_list and len(batch) == size:
        return ()
    if depth and (is_list or isinstance(batch, Mapping)):
        for key, part in enumerate(batch) if is_list else batch.items():
            place = _place_of(part, size, depth - 1)
            if place is not None:
                return (key, *place)
    return None
