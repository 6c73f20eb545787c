"""What workers cost: the time to start them, and their private memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import psutil

from intune_callbacks.pipelines.base import begin, cpus_allowed

__all__ = ["Startup", "WorkerMemory"]

# The kernel walks all pages of a process to tell its private memory, 20 ms for a GB: at most so often, and at most so
# small a share of the time.
MEMORY_EVERY_S, MEMORY_SHARE = 5.0, 0.002
# A fork takes so long, plus so much per byte that has to be mapped anew: assumed until one was measured.
FORK_S, FORK_S_PER_BYTE = 0.01, 0.02 / 2**30


class Startup:
    """What starting workers has cost the thread that starts them."""

    def __init__(self) -> None:
        self.count, self.total_s = 0, 0.0
        self._assumed_s: float | None = None

    @property
    def each_s(self) -> float:
        """Seconds for each worker; 0.0 while none was started."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def expected_s(self) -> float:
        """The same; what a fork is assumed to take while none was started."""
        if self.count:
            return self.each_s
        if self._assumed_s is None:
            try:
                held_bytes = float(psutil.Process().memory_info().rss)
            except (OSError, psutil.Error):  # /proc cannot be read, or no file is to be had
                held_bytes = 0.0
            self._assumed_s = FORK_S + FORK_S_PER_BYTE * held_bytes
        return self._assumed_s

    def add(self, count: int, spent_s: float) -> None:
        """Count `count` workers that took `spent_s` seconds together."""
        self.count += count
        self.total_s += spent_s

    def imported(self, pid: int, together: int) -> None:
        """Add what a worker that is no fork has computed before it could be given its first item: mostly imports.

        Args:
            pid: of the worker.
            together: workers that start with it, on as many CPUs as there are.
        """
        try:
            spent = psutil.Process(pid).cpu_times()
        except (OSError, psutil.Error):  # it has ended, or /proc cannot be read
            return
        self.total_s += (spent.user + spent.system) / max(1, min(together, cpus_allowed()))


class WorkerMemory:
    """What one worker costs in private memory, looked up now and then in a thread of its own."""

    def __init__(self) -> None:
        self._due_s, self._bytes = float("-inf"), 0.0

    def read(self, pids: Sequence[int]) -> float:
        """Return the bytes of the largest of the first two of these processes, as they were at an earlier call."""
        if pids and time.monotonic() >= self._due_s:
            self._due_s = float("inf")  # until this look is over
            try:
                begin(threading.Thread(target=self._look, args=(pids[:2],), daemon=True, name="intune-memory"))
            except RuntimeError:  # no thread is to be had: it is not known
                self._due_s = time.monotonic() + MEMORY_EVERY_S
        return self._bytes

    def _look(self, pids: Sequence[int]) -> None:
        begin_s = time.monotonic()
        self._bytes = max(_private_bytes(pid) for pid in pids)
        end_s = time.monotonic()
        self._due_s = end_s + max(MEMORY_EVERY_S, (end_s - begin_s) / MEMORY_SHARE)


def _private_bytes(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return 1024.0 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0.0
