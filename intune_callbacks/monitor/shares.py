"""What part of a CPU a busy worker of each stage takes: what workers may cost all together is counted with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from intune_callbacks.types import Observation

__all__ = ["CpuShares"]

REMEMBERED_WINDOWS = 20
CROWDED = 0.8
"""From this share of the CPUs in use on, workers wait for them: what they take is less than what they could use."""


@dataclass(frozen=True, slots=True)
class _Window:
    cpu_s: float
    busy_s: float
    is_crowded: bool

    @property
    def share(self) -> float:
        return min(1.0, self.cpu_s / self.busy_s)


class CpuShares:
    """CPU seconds of workers over the seconds they were busy, by stage, from the last 20 windows.

    Windows in which CPUs were left count together, by their items: the first ones, with caches cold and libraries just
    loaded, cost up to twice as much as all later ones. Where CPUs were short the share is too low, so each such window
    counts alone, and only if it shows more.
    """

    def __init__(self) -> None:
        self._windows: dict[str, deque[_Window]] = {}
        self._cpus = 0.0

    def learn(self, seen: Observation) -> None:
        """Remember the shares of one window.

        Args:
            seen: the window.
        """
        cpus = seen.resources.cpus
        used = sum(r.items * r.service_cpu_s for r in seen.rates.values()) / max(seen.elapsed_s, 1e-9)
        idle = seen.resources.cpus_idle
        # Of a machine that has just grown the number of CPUs is not that of the whole window.
        is_crowded = used >= CROWDED * min(cpus, self._cpus or cpus)
        is_crowded |= idle is not None and idle <= (1.0 - CROWDED) * cpus
        self._cpus = cpus
        for name, r in seen.rates.items():
            if r.items and r.service_s > 0.0:
                windows = self._windows.setdefault(name, deque(maxlen=REMEMBERED_WINDOWS))
                windows.append(_Window(r.items * r.service_cpu_s, r.items * r.service_s, is_crowded))

    def known(self) -> dict[str, float]:
        """Return stage name -> CPUs one busy worker occupies, 0..1, of all stages that were measured."""
        return {name: self._of(windows) for name, windows in self._windows.items()}

    def of(self, name: str) -> float:
        """Return the CPUs one busy worker of a stage occupies, 0..1; a whole one until it was measured.

        Args:
            name: of the stage.
        """
        windows = self._windows.get(name)
        return self._of(windows) if windows else 1.0

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Return stage name -> [CPU seconds, busy seconds, 1 where CPUs were short] of each window."""
        return {name: [[w.cpu_s, w.busy_s, float(w.is_crowded)] for w in all_] for name, all_ in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            AttributeError, TypeError, ValueError: this is no such state.
        """
        windows = {
            str(name): deque((_Window(float(c), float(b), bool(s)) for c, b, s in rows), maxlen=REMEMBERED_WINDOWS)
            for name, rows in state.items()
        }
        if not all(w.busy_s > 0.0 for rows in windows.values() for w in rows):
            raise ValueError("a window without busy seconds")
        self._windows = windows

    @staticmethod
    def _of(windows: deque[_Window]) -> float:
        free = [w for w in windows if not w.is_crowded]
        busy_s = sum(w.busy_s for w in free)
        mean = min(1.0, sum(w.cpu_s for w in free) / busy_s) if free else 0.0
        return max([mean, *(w.share for w in windows if w.is_crowded)])
