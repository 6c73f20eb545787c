"""Items that are hard to move between threads and processes."""

from __future__ import annotations

import dataclasses
import enum
import os
import threading
from typing import Any, NamedTuple

import torch

__all__ = ["RECORD", "RECORDS", "Colour", "Handle", "Pair", "Prickly", "Row", "Slotted", "Tagged"]

RECORD, RECORDS = 16, 512
"""Bytes of a record and number of records in a file."""


class Prickly:
    """An item that answers every question about itself with an error, as a wrapper of device memory may."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Prickly, (self.value,)

    def __len__(self) -> int:
        raise RuntimeError("the device is gone")

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("not allocated")

    @property
    def nbytes(self) -> int:
        raise OSError("no such device")

    def __sizeof__(self) -> int:
        raise MemoryError


class Slotted:
    """An item without a ``__dict__``."""

    __slots__ = ("data", "name")

    def __init__(self, data: torch.Tensor, name: str) -> None:
        self.data, self.name = data, name


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1
    GREEN = 2


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Row:
    """A dataclass."""

    number: int
    values: torch.Tensor
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


class Handle:
    """Serves the process that opened it alone, as an lmdb environment does."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - it stays open as long as the dataset
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._file.close()

    def __getitem__(self, index: int) -> bytes:
        if os.getpid() != self._owner:
            raise RuntimeError("opened by another process")
        with self._lock:
            self._file.seek(RECORD * (index % RECORDS))
            return self._file.read(RECORD)
