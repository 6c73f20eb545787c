"""What a worker stage has done so far, and how many bytes its results hold."""

from __future__ import annotations

from intune_callbacks.types import StageStats

__all__ = ["Counters", "nbytes"]

# The size of a result is looked at for the first few and then now and then: walking a batch costs microseconds.
SIZED_FIRST, SIZED_EVERY = 4, 16


def nbytes(value: object, depth: int = 4) -> int:
    """Return the bytes held by the arrays and byte strings of a batch (in lists, tuples, dicts, dataclasses)."""
    try:
        size = getattr(value, "nbytes", None)
    except Exception:  # torch says RuntimeError of a sparse tensor
        size = None
    if isinstance(size, int):
        return size
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    fields = getattr(value, "__dataclass_fields__", None)
    if depth and fields is not None:
        return sum(nbytes(getattr(value, name, None), depth - 1) for name in fields)
    if depth and isinstance(value, dict):
        return sum(nbytes(v, depth - 1) for v in value.values())
    if depth and isinstance(value, (list, tuple)):
        # Long plain lists are homogeneous in practice: one element stands for all.
        if len(value) > 64:
            return nbytes(value[0], depth - 1) * len(value)
        return sum(nbytes(v, depth - 1) for v in value)
    return 8 if isinstance(value, (int, float, bool)) else 0


class Counters:
    """What a stage has done so far; successive engines of one stage (epochs) add to the same counters."""

    def __init__(self) -> None:
        self.items = 0
        self.busy_s = self.busy_s2 = self.cpu_s = self.starved_s = self.blocked_s = 0.0
        self.item_bytes = 0.0

    def computed(self, busy_s: float, cpu_s: float, value: object) -> None:
        """Add one computed result."""
        self.items += 1
        self.busy_s += busy_s
        self.busy_s2 += busy_s * busy_s
        self.cpu_s += cpu_s
        if self.items <= SIZED_FIRST or self.items % SIZED_EVERY == 0:
            size = float(nbytes(value))
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
        )
