"""A loader that is only looked at: the modes `observe` and `advise` change nothing, not even the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from intune_callbacks.types import Allocation, Clock, PipelineStats, Stage, StageStats

__all__ = ["WINDOW_KNOB", "WORKERS_KNOB", "WatchedLoader"]

WORKERS_KNOB, WINDOW_KNOB = "DataLoader(num_workers={})", "prefetch_factor={}"

# A fetch that took longer than this found no batch ready.
BLOCKED_S = 0.0005


class _TimedIterator:
    """Hands on the batches of the iterator behind it and times each fetch."""

    def __init__(self, inner: Iterator[Any], owner: WatchedLoader) -> None:
        self._inner, self._owner = inner, owner

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        begin_s = self._owner.clock.wall()
        batch = next(self._inner)
        self._owner.fetched(begin_s)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedLoader:
    """One stage, `load`, with the user's numbers, seen from outside.

    The time of one batch is estimated: without workers it is the time of the fetch; with `n` workers that are all
    busy, as they are when the fetch had to wait, it is n times the time between two batches.

    Args:
        workers: what the user set; 0 computes in the training loop.
        window: batches in flight.
        clock: wall and CPU clock.
        remark: what to know before the number of workers is changed by hand.
    """

    def __init__(self, workers: int, window: int, *, clock: Clock, remark: str = "") -> None:
        self.clock, self._workers, self._window = clock, workers, max(1, window)
        remark = remark or ("" if workers else "was 0")  # a stage begins at 1
        self._knob = f"{WORKERS_KNOB}  # {remark}" if remark else WORKERS_KNOB
        self._items, self._busy_s, self._busy_s2 = 0, 0.0, 0.0
        self._service_s = 0.0
        self._last_s: float | None = None

    def prepare(self) -> None:
        """Nothing is changed before the first `iter()`."""

    def adopt(self, iterator: Any) -> Any:
        """Return the iterator behind a stopwatch."""
        return iterator if isinstance(iterator, _TimedIterator) else _TimedIterator(iterator, self)

    def fetched(self, begin_s: float) -> None:
        """Count one batch whose fetch began at `begin_s`, wall seconds."""
        now_s = self.clock.wall()
        waited_s = now_s - begin_s
        if self._workers == 0:
            self._service_s = waited_s
        elif waited_s > BLOCKED_S and self._last_s is not None:
            self._service_s = self._workers * (now_s - self._last_s)
        self._last_s = now_s
        self._items += 1
        self._busy_s += self._service_s
        self._busy_s2 += self._service_s**2

    def stages(self) -> tuple[Stage, ...]:
        workers = max(1, self._workers)
        return (
            Stage("load", "cpu", "workers", 1, 64, workers, when="epoch", knob=self._knob),
            Stage(
                "load.window",
                "memory",
                "items",
                1,
                4096,
                self._window,
                window_of="load",
                when="epoch",
                knob=WINDOW_KNOB if self._workers else "",
            ),
        )

    def stats(self) -> PipelineStats:
        reading = StageStats(self._items, self._busy_s, self._busy_s2, self._busy_s, 0.0, 0.0, 0, self._window)
        return PipelineStats(self.clock.wall(), self._items, {"load": reading})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        return {stage.name: stage.current for stage in self.stages()}

    def release(self) -> None:
        """Nothing was patched."""

    def close(self) -> None:
        """Nothing was started."""
