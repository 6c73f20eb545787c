"""How many samples a batch has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["Samples", "batch_size_of"]

CONTAINERS = (tuple, list, dict)
Keys = tuple[Hashable, ...]
DEEPEST = 4
"""How deep the samples of a batch are looked for. A choice: a batch is a dict of lists, or a tuple of those."""


class Samples:
    """Counts the samples of the batches of one loader, also where they are in a list and not in one tensor.

    Args:
        batch_size: what the loader says of a whole batch, None where it says nothing.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = batch_size
        self._place: Keys = ()
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
        tensors = ((int(length), place) for length, place, is_tensor in _lengths(batch, -1) if is_tensor and length)
        samples, place = next(tensors, (0, ()))
        if self._kind is None:
            self._kind, size = type(None), self._batch_size
            # The first batch is a whole one. Of a list of images the first tensor begins with the channels.
            elsewhere = ((length, place) for length, place, _ in _lengths(batch, DEEPEST) if length == size)
            if samples != size:
                samples, place = next(elsewhere, (samples, place))
            if size is None and _are_samples(batch):
                samples, place = len(batch), ()
            if samples:
                self._place, part = place, batch
                for key in place:
                    part = part[key]
                self._kind, self._has_shape = type(part), hasattr(part, "shape")
        return samples or _said_by(batch) or self._batch_size or 1


def batch_size_of(loader: Any) -> int | None:
    """Return how many samples a loader, or what is inside a wrapper, says are in a whole batch; None where none."""
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


def _are_samples(batch: Any) -> bool:
    """Return whether a batch is a list of what the dataset gave, dicts of the same names; two may be views."""
    if type(batch) not in (list, tuple) or len(batch) <= 2 or not isinstance(batch[0], Mapping):
        return False
    return all(isinstance(one, Mapping) and one.keys() == batch[0].keys() for one in batch)


def _lengths(
    batch: Any, depth: int, place: tuple[Hashable, ...] = ()
) -> Iterator[tuple[int, tuple[Hashable, ...], bool]]:
    """Yield the length of each list and tensor in a batch, the keys that lead there, and whether it is a tensor's.

    Args:
        depth: how deep is looked; -1 looks without end.
    """
    is_list, shape = isinstance(batch, (list, tuple)), None
    if is_list:
        yield len(batch), place, False
    elif (shape := getattr(batch, "shape", None)) is not None:
        yield shape[0] if len(shape) else 0, place, True
    elif isinstance(parts := getattr(batch, "values", None), tuple):  # of a distribution strategy: one per device
        yield sum(length for part in parts for length, _, is_tensor in _lengths(part, 0) if is_tensor), place, True
    if depth and (is_list or (shape is None and isinstance(batch, Mapping))):
        for key, part in enumerate(batch) if is_list else batch.items():
            yield from _lengths(part, depth - 1, (*place, key))
