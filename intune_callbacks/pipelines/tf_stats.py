"""Say what a stage is and does in the terms of others: `StageStats`, and the line the user wrote."""

from __future__ import annotations

from intune_callbacks.pipelines.tf_native import StageReading
from intune_callbacks.pipelines.tf_rewrite import GraphStage
from intune_callbacks.types import StageStats

__all__ = ["StageCourse", "knob_of"]


def knob_of(stage: GraphStage, threads: int = 0) -> str:
    """Return how the user writes the number of a stage, or where it is out of reach; see `intune_callbacks.Stage`.

    Args:
        stage: which.
        threads: of TensorFlow, that the stage computes on with so many workers at most; 0 for any.
    """
    if stage.library:
        return f"# inside {stage.library}"
    what = "..." if stage.kind == "batch" else stage.name.split("#")[0]
    code = ".prefetch({})" if stage.kind == "prefetch" else f".{stage.kind}({what}, num_parallel_calls={{}})"
    remarks = ["was tf.data.AUTOTUNE"] if stage.automatic else []
    if stage.kind == "map" and 0 < threads < stage.value and not stage.unbounded:
        remarks.append(f"was {stage.value} on {threads} threads: options.threading.private_threadpool_size too")
    return f"{code}  # {'; '.join(remarks)}" if remarks else code


class StageCourse:
    """The counters of one worker stage since its pipeline began.

    The native counters do not say what an idle worker waits for. What is known is how long the workers computed, and at
    each reading how much of the window is taken. So the worker seconds without work between two readings are shared
    out: a full window blocks its workers, and where there is room in it they are starved. Each of the two readings
    speaks for half of the time between them. Time without a running iterator is neither.
    """

    def __init__(self) -> None:
        self._last: StageReading | None = None
        self._last_s = self._starved_s = self._blocked_s = 0.0
        self._was_full = 0.0
        self._capacity = 1

    def read(self, reading: StageReading, workers: int, capacity: int, now_s: float) -> None:
        """Take note of a reading; `workers` and `capacity` are those since the last one.

        Args:
            reading: of the native counters.
            workers: that could compute.
            capacity: results the stage can hold, finished or in progress.
            now_s: wall clock, seconds.
        """
        busy_frac = (reading.queued + reading.running + reading.waiting) / max(1, capacity)
        is_full = 1.0 if busy_frac >= 1.0 else 0.0
        last = self._last or StageReading(0, 0.0, 0.0, 0.0, 0, 0, None, 0, 0, 0.0, 0, 0.0)
        if reading.window is not None and last.window is not None:
            idle_s = max(0.0, workers * (now_s - self._last_s) - (reading.busy_s - last.busy_s))
            full_frac = 0.5 * (is_full + self._was_full)
            self._blocked_s += idle_s * full_frac
            self._starved_s += idle_s * (1.0 - full_frac)
        self._last, self._last_s, self._was_full, self._capacity = reading, now_s, is_full, max(1, capacity)

    def stats(self) -> StageStats:
        """Return the counters at the last reading."""
        last = self._last
        if last is None:
            return StageStats(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, self._capacity)
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
