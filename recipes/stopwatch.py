"""The clock of a run: the same for a tuned and an untuned one, no part of the tuner."""

from __future__ import annotations

__all__ = ["Marks"]


class Marks:
    """The moments at which steps ended: the same for a tuned and an untuned run, and independent of the tuner."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        self._samples: list[int] = []

    def mark(self, at_s: float, wait_s: float, samples: int) -> None:
        """Note the end of a step.

        Args:
            at_s: wall clock, seconds.
            wait_s: seconds waited for data since the start.
            samples: samples of the step.
        """
        self._marks.append((at_s, wait_s))
        self._samples.append(samples)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self._marks)

    @property
    def samples(self) -> int:
        """Samples so far."""
        return sum(self._samples)

    @property
    def wall_s(self) -> float:
        """Seconds from the end of the first step to the end of the last one."""
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    def steady(self) -> tuple[int, int, float, float]:
        """Return steps, samples, wall seconds and data wait seconds of the second half of the steps.

        The first half is the time to start up and, for a tuned run, to find its allocation.
        """
        first = self.steps // 2
        if first < 1:
            return 0, 0, 0.0, 0.0
        (begin_s, begin_wait_s), (end_s, end_wait_s) = self._marks[first - 1], self._marks[-1]
        return self.steps - first, sum(self._samples[first:]), end_s - begin_s, end_wait_s - begin_wait_s
