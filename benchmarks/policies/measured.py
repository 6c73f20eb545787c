"""What an allocation really delivered, and how sure that is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean, stdev

from intune_callbacks.types import Allocation, Observation

__all__ = ["Measured"]


class Measured:
    """What one allocation really delivered, over the last windows it was in force.

    Args:
        allocation: the allocation.
        keep: windows that count.
    """

    def __init__(self, allocation: Mapping[str, int], keep: int = 10) -> None:
        self.allocation: Allocation = dict(allocation)
        self._windows: deque[tuple[int, float, float]] = deque(maxlen=keep)

    def add(self, observation: Observation) -> None:
        """Take one window of this allocation."""
        # The slowest stage paces the batches: its irregularity over the items of the window is the window's noise.
        noise = max((r.service_cv / math.sqrt(r.items) for r in observation.rates.values() if r.items), default=0.0)
        self._windows.append((observation.batches, observation.elapsed_s, noise))

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def rate(self) -> float:
        """Batches per second over all windows."""
        elapsed_s = self.elapsed_s
        return sum(batches for batches, _, _ in self._windows) / elapsed_s if elapsed_s > 0.0 else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds measured."""
        return sum(elapsed for _, elapsed, _ in self._windows)

    @property
    def noise(self) -> float:
        """Relative standard error of `rate`."""
        return self.window_noise / math.sqrt(max(1, len(self._windows)))

    @property
    def window_noise(self) -> float:
        """Relative error of one window, from the stages' irregularity until four windows show their own spread.

        Results that leave in order come in bursts: the spread can be several times what the irregularity alone makes.
        """
        if not self._windows:
            return 1.0
        expected = fmean(noise for _, _, noise in self._windows)
        seen = [batches / elapsed for batches, elapsed, _ in self._windows if elapsed > 0.0]
        return max(stdev(seen) / fmean(seen) if len(seen) > 3 and fmean(seen) > 0.0 else expected, 0.01)

    def ratio_to(self, other: Measured) -> tuple[float, float]:
        """Return rate / other's rate, and the standard error of that ratio."""
        ratio = self.rate / other.rate if other.rate > 0.0 else math.inf
        return ratio, math.hypot(self.noise, other.noise)
