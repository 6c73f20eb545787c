"""Memory that was freed, but that the C library keeps for later."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import psutil

from intune_callbacks.types import Probe, Resources

__all__ = ["LARGE_BYTES", "Freed", "give_back_freed"]

LARGE_BYTES = 1 << 20
"""Blocks of this size and more are given back at once after `map_large_blocks`. A choice: to map each smaller one costs
more than it saves."""
M_MMAP_THRESHOLD = -3
"""The number of the setting in glibc's malloc.h."""
GROWN_BYTES = 32 << 20
"""Where the C library's own threshold stands after it has freed large blocks: its upper limit (mallopt(3))."""
AGAIN_S, LONGEST_S = 2.0, 300.0
"""Seconds between two attempts to give back memory; twice as long after each that brought little. A choice: one takes
milliseconds per GB (malloc_trim(3))."""
PATIENCE_S = 0.5
"""At an alarm an attempt that is under way is waited for so long. A choice: memory that fills up costs the run."""
LITTLE = 0.01
"""An attempt that gives back less than this share of the process's memory brought little. A choice."""


class Freed:
    """Has the C library return what it keeps, where that helps, and no more often than it helps."""

    def __init__(self, wall: Callable[[], float] = time.perf_counter) -> None:
        self._wall = wall
        self._maps = False
        # Apart for an alarm (True): what was tried before one says nothing against trying then.
        self._due_s = {False: float("-inf"), True: float("-inf")}
        self._every_s = {False: AGAIN_S, True: AGAIN_S}
        self._lock = threading.Lock()

    def map_large_blocks(self) -> None:
        """Let the C library map blocks of `LARGE_BYTES` and more one by one until `close`.

        By default it does so only until the first was freed; later ones, up to 32 MB, come from its arenas, one for
        each few threads, which keep what was freed: the memory in use is then twice what is held, and says nothing
        about what another buffer would cost. A mapped block goes back when it is freed; its first use is slower, .5 s
        per GB (mallopt(3)).
        """
        if not self._maps:
            self._maps = _set_threshold(LARGE_BYTES)

    def read(self, probe: Probe, soft_limit: float, item_bytes: float, kept_bytes: int = 0) -> Resources:
        """Return what there is; near the memory limit, after what is only kept for later was given back.

        Args:
            soft_limit: share of its memory that is planned with, 0..1.
            item_bytes: the largest item of the pipeline.
            kept_bytes: of the memory in use, what a cache gives back when it is wanted.
        """
        seen = probe.read()
        limit, used = soft_limit * seen.memory_limit_bytes, seen.memory_used_bytes - kept_bytes
        if used <= limit / 2:
            return seen
        if item_bytes >= LARGE_BYTES:
            self.map_large_blocks()
        return probe.read() if self.give_back(now=used > limit) else seen

    def give_back(self, now: bool) -> bool:
        """Return freed memory to the system, in a thread beside the training, if it is time for that.

        Args:
            now: in this thread, for what is read next decides about an alarm.

        Returns:
            True if the system may have more memory now.
        """
        if self._wall() < self._due_s[now] or not self._lock.acquire(timeout=PATIENCE_S if now else 0.0):
            return False
        if now:
            return self._give_back(now)
        try:
            threading.Thread(target=self._give_back, args=(now,), daemon=True, name="intune-trim").start()
        except RuntimeError:  # no thread is to be had
            self._lock.release()
        return False

    def _give_back(self, now: bool) -> bool:
        try:
            process = psutil.Process()
            before = process.memory_info().rss
            done = give_back_freed()
            helped = done and before - process.memory_info().rss > LITTLE * before
            self._every_s[now] = AGAIN_S if helped else min(2.0 * self._every_s[now], LONGEST_S)
            self._due_s[now] = self._wall() + self._every_s[now]
            return done
        except (OSError, psutil.Error):  # /proc cannot be read, or no file is to be had
            return False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let the C library choose again where blocks come from."""
        if self._maps:
            _set_threshold(GROWN_BYTES)
            self._maps = False


def _set_threshold(size_bytes: int) -> bool:
    mallopt = _glibc("mallopt", ctypes.c_int, ctypes.c_int)
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, size_bytes))


def give_back_freed() -> bool:
    """Let the C library give freed memory back to the system; False where it cannot.

    A process may stand at its limit while half of its memory is free. Takes milliseconds per GB (malloc_trim(3)).
    """
    trim = _glibc("malloc_trim", ctypes.c_size_t)
    return trim is not None and bool(trim(0))


def _glibc(name: str, *arguments: type[ctypes._SimpleCData[int]]) -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None)[name]
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
