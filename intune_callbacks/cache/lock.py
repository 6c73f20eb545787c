"""A lock that processes and threads share and that ends with whoever holds it."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from contextlib import suppress

__all__ = ["Lock"]

FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock`` of Linux on 64 bits: https://man7.org/linux/man-pages/man2/fcntl_locking.2.html"""
LOCK_WAIT_S, LOCK_POLL_S = 0.002, 0.00005
"""What a writer waits for another one at most, which holds the lock for some 20 us. A choice: a small decode."""


class Lock:
    """A lock of an open file; usable from any thread, and in processes forked from this one.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._handles = descriptor, threading.local()

    def acquire(self, wait_s: float = LOCK_WAIT_S) -> bool:
        """Take it; False where somebody else holds it for as long as `wait_s`, in seconds."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.fcntl(self._handle(), fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
                return True
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(LOCK_POLL_S)

    def release(self) -> None:
        """Let it go."""
        fcntl.fcntl(self._handle(), fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))

    def _handle(self) -> int:
        """Return a descriptor of this thread's own: the locks are those of an open file, not of a process."""
        known: _Handle | None = getattr(self._handles, "known", None)
        if known is None or known.process != os.getpid():
            self._handles.known = known = _Handle(f"/proc/self/fd/{self._descriptor}")
        descriptor: int = known.descriptor
        return descriptor


class _Handle:
    def __init__(self, path: str) -> None:
        self.process, self.descriptor = os.getpid(), os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.descriptor)
