"""How tensors cross a pipe: their bytes out of band, written once; what shares memory on one side does on the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from intune_callbacks.pipelines.workers.wire import ALIGNED_BYTES

__all__ = ["Carry", "carry_tensor"]

# A view that leaves out less of its storage than this is sent as a view of it all: others may look at the rest.
NEARLY_WHOLE = 0.9


class Carry:
    """Pickles the tensors of one message, as `pickle.Pickler.reducer_override`.

    In the trainer two tensors share memory where they do in the worker, as those of a stock loader do: a change of the
    one is seen in the other. It is so for views of a storage of which the first that comes covers nearly all.
    """

    def __init__(self) -> None:
        # By the address of their storage.
        self._sent: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if type(value) is torch.UntypedStorage and value.device.type == "cpu":
            return _storage_of, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(value),)
        if type(value) is not torch.Tensor or not _is_plain(value) or not value.numel():
            return carry_tensor(value)
        storage = value.untyped_storage()
        sent = self._sent.get(storage.data_ptr())
        if sent is value:
            return carry_tensor(value)
        if sent is None:
            if value.nbytes == storage.nbytes() and value.is_contiguous():
                self._sent[storage.data_ptr()] = value
                return carry_tensor(value)
            size, rest = divmod(storage.nbytes(), value.itemsize)
            if rest or _extent(value.shape, value.stride()) < NEARLY_WHOLE * size:
                return carry_tensor(value)
            sent = self._sent[storage.data_ptr()] = value.as_strided((size,), (1,), 0)
        return _rebuild_view, (sent, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())


def _storage_of(whole: torch.Tensor) -> torch.UntypedStorage:
    return whole.untyped_storage()


def _rebuild_view(
    whole: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor of its own on the same memory: to autograd a view is another thing."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(whole.untyped_storage(), offset, shape, strides)


def carry_tensor(value: Any) -> Any:
    """Pickle plain CPU tensors through numpy, so that their bytes travel out of band and are written once."""
    if type(value) is not torch.Tensor or not _is_plain(value):
        return NotImplemented
    if not value.is_contiguous():
        return _carry_strided(value)
    # By its own strides a contiguous tensor of one element need not be a row.
    flat = value.as_strided((value.numel(),), (1,))
    raw = flat.view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
    return _rebuild_tensor, (raw, value.dtype, tuple(value.shape))


def _is_plain(value: torch.Tensor) -> bool:
    plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_nested
    return plain and not (value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized)


def _carry_strided(value: torch.Tensor) -> Any:
    """Send the part of the storage that a view looks at; only its elements where most of that part is not its own."""
    shape, strides = tuple(value.shape), value.stride()
    extent = _extent(shape, strides)
    if extent <= 2 * value.numel():
        return _rebuild_strided, (*carry_tensor(value.as_strided((extent,), (1,)))[1], shape, strides)
    for dimension, stride in enumerate(strides):
        if stride == 0:  # expanded
            value = value.narrow(dimension, 0, 1)
    return _rebuild_spread, (*carry_tensor(value.contiguous())[1], shape, _nearer(shape, strides))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _nearer(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides with smaller gaps: dimensions in the same order, next to each other only where they were.

    By that the kernels choose the order in which they add; how wide a gap is, they do not ask.
    """
    near, known = list(strides), -1
    for dimension in sorted(range(len(shape)), key=lambda dimension: strides[dimension]):
        if shape[dimension] == 1 or strides[dimension] == 0:
            continue
        if known < 0:
            near[dimension] = min(2, strides[dimension])
        else:
            is_apart = strides[dimension] != strides[known] * shape[known]
            near[dimension] = near[known] * shape[known] + is_apart
        known = dimension
    return tuple(near)


def _rebuild_strided(
    raw: np.ndarray[Any, Any],
    dtype: torch.dtype,
    held_shape: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor with the strides it had: sums over other strides may round otherwise."""
    return _rebuild_tensor(raw, dtype, held_shape).as_strided(shape, strides)


def _rebuild_spread(
    raw: np.ndarray[Any, Any],
    dtype: torch.dtype,
    packed_shape: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor with gaps between its elements."""
    held = torch.empty(_extent(shape, strides), dtype=dtype)
    held.as_strided(packed_shape, strides).copy_(_rebuild_tensor(raw, dtype, packed_shape))
    return held.as_strided(shape, strides)


def _rebuild_tensor(raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    if not raw.flags.writeable:
        raw = raw.copy()
    flat = torch.from_numpy(raw)
    if flat.data_ptr() % ALIGNED_BYTES:  # a small one, which was inside the pickle
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)
