"""What our operations count of a stage and at the pipeline's end, and what that says in the terms of `StageStats`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from intune_callbacks.types import StageStats

__all__ = ["SinkReading", "StageCourse", "StageReading"]

OF_REALS = ("busy_s", "busy_s2", "cpu_s", "item_bytes")


@dataclass(frozen=True, slots=True)
class StageReading:
    """Counters of one stage since its pipeline began, over all iterators; take differences.

    Args:
        items: results computed: passed downstream, waiting in the stage's buffer, or lost with an iterator.
        busy_s: wall seconds spent in closures, summed over threads.
        busy_s2: sum of squares of whole calls' seconds, all closures of one element together.
        cpu_s: CPU seconds of `busy_s`.
        closures: pieces of work done; one call of the user's function may be several.
        queued: finished results waiting in the stage's buffer, now.
        window: `parallelism` or `buffer_size` of the newest iterator now, None without a running one or a model.
        limit: workers asked for, 0 when TensorFlow's own pool computes.
        running: closures computing now.
        item_bytes: mean bytes of one result, 0.0 while unknown.
        waiting: closures that wait for a worker, or threads of an interleave for their turn to read, now.
        readers: threads of an interleave that may read at once, 0 while that is not known.
        most: threads an interleave can have, 0 while that is not known.
        ended: the interleave has taken its last input, and gets no more threads.
    """

    items: int = 0
    busy_s: float = 0.0
    busy_s2: float = 0.0
    cpu_s: float = 0.0
    closures: int = 0
    queued: int = 0
    window: int | None = None
    limit: int = 0
    running: int = 0
    item_bytes: float = 0.0
    waiting: int = 0
    readers: int = 0
    most: int = 0
    ended: bool = False

    @classmethod
    def of(cls, values: list[float]) -> StageReading:
        """Return what the library wrote, a number for each field in their order."""
        found: dict[str, Any] = {
            field.name: value if field.name in OF_REALS else int(value)
            for field, value in zip(fields(cls), values, strict=True)
        }
        return cls(**{**found, "window": max(0, found["window"]) or None, "ended": bool(found["ended"])})


@dataclass(frozen=True, slots=True)
class SinkReading:
    """Counters at the pipeline's end since it began, over all iterators; take differences.

    Args:
        delivered: elements handed out.
        wait_s: seconds the consumer was blocked asking for them, the question that found the end included.
        iterators: iterators made.
        samples: in them, by the length of the first tensor that has one; 0 where none has.
    """

    delivered: int = 0
    wait_s: float = 0.0
    iterators: int = 0
    samples: int = 0


class StageCourse:
    """The counters of one worker stage since its pipeline began.

    The native counters do not say what an idle worker waits for. What is known is how long the workers computed, and at
    each reading how much of the window is taken. So the worker seconds without work between two readings are shared
    out: a full window blocks its workers, and where there is room in it they are starved. Each of the two readings
    speaks for half of the time between them. Time without a running iterator is neither.
    """

    def __init__(self) -> None:
        self._last = StageReading()
        self._last_s = self._starved_s = self._blocked_s = 0.0
        self._was_full = 0.0
        self._capacity = 1

    def read(self, reading: StageReading, workers: int, capacity: int, now_s: float) -> None:
        """Take note of a reading; `workers` and `capacity` are those since the last one.

        Args:
            workers: that could compute.
            capacity: results the stage can hold, finished or in progress.
        """
        busy_frac = (reading.queued + reading.running + reading.waiting) / max(1, capacity)
        is_full = 1.0 if busy_frac >= 1.0 else 0.0
        last = self._last
        if reading.window is not None and last.window is not None:
            idle_s = max(0.0, workers * (now_s - self._last_s) - (reading.busy_s - last.busy_s))
            full_frac = 0.5 * (is_full + self._was_full)
            self._blocked_s += idle_s * full_frac
            self._starved_s += idle_s * (1.0 - full_frac)
        self._last, self._last_s, self._was_full, self._capacity = reading, now_s, is_full, max(1, capacity)

    def stats(self) -> StageStats:
        """Return the counters at the last reading."""
        last = self._last
        return StageStats(
            items=last.items,
            busy_s=last.busy_s,
            busy_s2=last.busy_s2,
            cpu_s=last.cpu_s,
            starved_s=self._starved_s,
            blocked_s=self._blocked_s,
            queued=last.queued,
            capacity=self._capacity,
            item_bytes=last.item_bytes,
        )
