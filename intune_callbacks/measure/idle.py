"""How many CPUs nobody used: an item that takes longer than it computes may wait for a read, or for a CPU."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["IdleCpus"]

# Of the numbers behind the name of a CPU in /proc/stat: idle, and idle while something is being read or written.
IDLE, ALL = slice(3, 5), slice(0, 8)
# Ticks of all CPUs together between two readings, a choice: of 20 one more is 5 %, and reading costs a moment.
FEWEST_TICKS = 20


class IdleCpus:
    """CPUs this process may run on and that stood idle, on average since the reading before.

    Source: https://man7.org/linux/man-pages/man5/proc_stat.5.html

    Args:
        root: where ``proc`` is looked up.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = root / "proc" / "stat"
        self._ticks: dict[str, tuple[int, int]] = self._look()
        self._idle: float | None = None

    def read(self) -> float | None:
        """Return how many; None where that cannot be read, or was not yet."""
        now = self._look()
        both = [name for name in now if name in self._ticks]
        spent = {name: now[name][1] - self._ticks[name][1] for name in both}
        if sum(spent.values()) < FEWEST_TICKS:
            return self._idle
        idle = sum((now[name][0] - self._ticks[name][0]) / spent[name] for name in both if spent[name] > 0)
        self._idle, self._ticks = max(0.0, idle), now
        return self._idle

    def _look(self) -> dict[str, tuple[int, int]]:
        """CPU -> ticks idle, and ticks in all."""
        allowed = {f"cpu{n}" for n in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else None
        found = {}
        try:
            for line in self._file.read_text(encoding="ascii").splitlines():
                name, *values = line.split()
                if not name.startswith("cpu"):
                    break
                if name != "cpu" and (allowed is None or name in allowed):
                    ticks = [int(value) for value in values]
                    found[name] = sum(ticks[IDLE]), sum(ticks[ALL])
        except (OSError, ValueError):
            return {}
        return found
