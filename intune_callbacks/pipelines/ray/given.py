"""What a worker on another machine is given: function and dataset, pickled once, and what each iterator changes."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from intune_callbacks.errors import MissingPackage
from intune_callbacks.pipelines.workers.wire import Reducer, packed

__all__ = ["Package", "check_packages", "image"]

OUT_OF_BAND_BYTES = 4096  # below this an array is cheaper inside the pickle
MOST_BYTES = 8 << 30
"""A dataset that holds more is not sent: each machine would need as much memory. A choice."""


def check_packages() -> None:
    """Look for what workers on other machines need; nothing is imported.

    Raises:
        MissingPackage: it is not installed.
    """
    from importlib.util import find_spec

    for name in ("ray", "cloudpickle"):
        if find_spec(name) is None:
            raise MissingPackage(name, "ray")


class Package:
    """Function and start of a worker, as bytes; arrays apart, so that the workers of a machine share them.

    Args:
        what: both.
        reducer: pickling of special types.

    Raises:
        Exception: it cannot be pickled.
        ValueError: it is too large.
    """

    def __init__(self, what: object, reducer: Reducer | None) -> None:
        file = io.BytesIO()
        buffers: list[Any] = []
        _pickler(file, buffers, reducer).dump(what)
        self._parts: list[Any] = [file.getbuffer(), *buffers]
        self.sizes = [len(part) for part in self._parts]
        if sum(self.sizes) > MOST_BYTES:
            raise ValueError(f"the dataset holds {sum(self.sizes) / 1e9:.0f} GB: open files in the workers instead")

    def key(self) -> tuple[int, ...]:
        """Return what is another one where the bytes are others; takes a second for some GB."""
        checksum = 0
        for part in self._parts:
            checksum = zlib.crc32(part, checksum)
        return checksum, *self.sizes

    def file(self) -> int:
        """Return the descriptor of a file in memory that holds it, for whom to close."""
        descriptor = os.memfd_create("intune-given")
        with os.fdopen(os.dup(descriptor), "wb") as file:
            for part in self._parts:
                file.write(part)
        return descriptor

    @staticmethod
    def parts_of(descriptor: int, sizes: list[int]) -> list[np.ndarray[Any, Any]]:
        """Return the parts of what `file` has written, mapped."""
        whole = mmap.mmap(descriptor, sum(sizes), access=mmap.ACCESS_READ)
        begins = np.cumsum([0, *sizes])
        return [np.frombuffer(whole, np.uint8, size, begin) for begin, size in zip(begins[:-1], sizes, strict=True)]


def _pickler(file: io.BytesIO, buffers: list[Any], reducer: Reducer | None) -> Any:
    """Return what pickles what the user's script itself defines by value: no other process has that script."""
    import cloudpickle

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    reduce: Callable[[Any], Any] = (lambda value: NotImplemented) if reducer is None else reducer()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, np.memmap):
                return _mapped(value)
            made = reduce(value)
            return super().reducer_override(value) if made is NotImplemented else made

    return Pickler(file, protocol=5, buffer_callback=out_of_band)


def _mapped(value: Any) -> Any:
    """Have a file mapped anew there: by value all of it would be read here."""
    if not isinstance(value.base, mmap.mmap) or value.filename is None:
        raise TypeError("a part of a np.memmap cannot be sent: keep the whole one in the dataset, and take parts of it")
    order = "C" if value.flags.c_contiguous else "F"
    # What a worker writes is its own.
    return np.memmap, (os.path.abspath(value.filename), value.dtype, "c", value.offset, value.shape, order)


def image(value: object, reducer: Reducer | None) -> bytes:
    """Return bytes that are the same for equal values."""
    try:
        return b"".join(packed(value, reducer, fast=True))
    except (RecursionError, ValueError):  # it holds itself
        return b"".join(packed(value, reducer))
