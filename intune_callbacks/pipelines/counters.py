"""What a worker stage has done so far, and how many bytes its results hold."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from intune_callbacks.types import StageStats

__all__ = ["Counters", "nbytes"]

# The size of a result is looked at for the first few and then now and then: walking a batch costs microseconds.
SIZED_FIRST, SIZED_EVERY = 4, 16
# How deep, how many elements of a long sequence, how many containers in all: a choice, for the walk shall be short.
DEPTH, SAMPLED, MOST_CONTAINERS = 6, 16, 200
NO_DATA = (type, range, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
COO = ("_indices", "_values")
COMPRESSED = ("crow_indices", "ccol_indices", "row_indices", "col_indices", "values")


def nbytes(value: object) -> int:
    """Return the bytes held by the arrays, strings and images of a batch, whatever contains them; never raises.

    Looked into are sequences, mappings and the attributes of objects (dataclasses, `KeyedJaggedTensor`,
    `BatchEncoding`, PyG's `Data`); of a long sequence, sixteen elements stand for all.

    Returns:
        0 where nothing of known size was found.
    """
    try:
        return _held(value, DEPTH, set())
    except Exception:  # anything may stand in a batch, also what raises when it is looked at
        return 0


def _held(value: Any, depth: int, seen: set[int]) -> int:
    if value is None or isinstance(value, NO_DATA):
        return 0
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (bool, int, float, complex)):
        return 8
    size = _own(value)
    if size is not None:
        return size
    if not depth or id(value) in seen or len(seen) > MOST_CONTAINERS:
        return 0
    seen.add(id(value))
    parts = _parts(value)
    chosen = parts if len(parts) <= 4 * SAMPLED else parts[:: len(parts) // SAMPLED]
    held = 0
    for part in chosen:
        try:
            held += _held(part, depth - 1, seen)
        except Exception:  # the other parts have a size all the same
            continue
    return held * len(parts) // len(chosen) if chosen else 0


def _own(value: Any) -> int | None:
    """Return the size an array, tensor or image states; None where it states none."""
    if getattr(value, "is_sparse", False):
        return sum(_stated(getattr(value, name)) for name in COO)
    if "sparse" in str(getattr(value, "layout", "")):  # torch's other layouts state the size of a dense tensor
        return sum(_stated(getattr(value, name, None)) for name in COMPRESSED)
    try:
        return operator.index(value.nbytes)
    except Exception:  # no such attribute, or one that raises
        pass
    if hasattr(value, "getbands"):  # a Pillow image
        return int(value.width * value.height * len(value.getbands()))
    return None


def _stated(part: Any) -> int:
    try:
        return operator.index(part().nbytes)
    except Exception:  # this layout has no such part
        return 0


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    named = [getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)]
    return [*named, *getattr(value, "__dict__", {}).values()]


class Counters:
    """What a stage has done so far; successive engines of one stage (epochs) add to the same counters."""

    def __init__(self) -> None:
        self.items = 0
        self.pulled_s = 0.0  # the thread that trains gives them indices: no time of theirs
        self.busy_s = self.busy_s2 = self.cpu_s = self.starved_s = self.blocked_s = self.held_s = 0.0
        self.item_bytes = 0.0

    def computed(self, busy_s: float, cpu_s: float, value: object, size_bytes: int | None = None) -> None:
        """Add one computed result; its size is looked up where it is not given."""
        self.items += 1
        self.busy_s += busy_s
        self.busy_s2 += busy_s * busy_s
        self.cpu_s += cpu_s
        if self.items <= SIZED_FIRST or self.items % SIZED_EVERY == 0:
            size = float(nbytes(value) if size_bytes is None else size_bytes)
            self.item_bytes = size if self.items == 1 else self.item_bytes + 0.25 * (size - self.item_bytes)

    def reading(self, queued: int, capacity: int, worker_bytes: float = 0.0) -> StageStats:
        """Return the counters with the present fill of the window and the bytes one more worker costs."""
        return StageStats(
            items=self.items,
            busy_s=self.busy_s,
            busy_s2=self.busy_s2,
            cpu_s=self.cpu_s,
            starved_s=self.starved_s,
            blocked_s=self.blocked_s,
            queued=queued,
            capacity=capacity,
            item_bytes=self.item_bytes,
            worker_bytes=worker_bytes,
            held_s=self.held_s,
        )
