"""What part of a CPU a busy worker of each stage takes: what workers may cost all together is counted with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from intune_callbacks.types import Observation

__all__ = ["CpuShares"]

REMEMBERED_WINDOWS = 20
"""Windows of which the largest share counts. A choice: contention is over within them, other work lasts longer."""
ENOUGH_WINDOWS = 3
"""Windows without new workers from which on those with new ones are left out: docs/adr/0001-cpu-budget-is-use.md."""


class CpuShares:
    """CPU seconds of workers over the seconds they were busy, by stage: the largest share of the last 20 windows.

    The largest, because workers that wait for a CPU take less than they could use. A window in which workers have just
    started, their memory new and their libraries cold, shows up to three times as much as all later ones; it counts
    as long as there are fewer than three others.
    """

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}
        self._warm: dict[str, deque[float]] = {}
        self._cold: dict[str, deque[float]] = {}

    def learn(self, seen: Observation) -> None:
        """Remember the shares of one window."""
        workers = seen.allocation
        for name, r in seen.rates.items():
            if r.items and r.service_s > 0.0:
                has_new = workers.get(name, 0) > self._workers.get(name, 0)
                shares = (self._cold if has_new else self._warm).setdefault(name, deque(maxlen=REMEMBERED_WINDOWS))
                shares.append(min(1.0, r.service_cpu_s / r.service_s))
        self._workers = dict(workers)

    def known(self) -> dict[str, float]:
        """Return stage name -> CPUs one busy worker occupies, 0..1, of all stages that were measured."""
        return {name: self.of(name) for name in self._cold | self._warm}

    def of(self, name: str) -> float:
        """Return the CPUs one busy worker of a stage occupies, 0..1; a whole one until it was measured."""
        warm, cold = self._warm.get(name, ()), self._cold.get(name, ())
        return max(warm if len(warm) >= ENOUGH_WINDOWS else (*warm, *cold), default=1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares seen, by stage: of workers that had just started, and of all others."""
        return {
            "cold": {name: list(shares) for name, shares in self._cold.items()},
            "warm": {name: list(shares) for name, shares in self._warm.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: this is no such state.
        """
        self._cold, self._warm = (
            {str(name): deque(map(float, shares), maxlen=REMEMBERED_WINDOWS) for name, shares in state[part].items()}
            for part in ("cold", "warm")
        )
