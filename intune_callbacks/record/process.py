"""Which process writes a history, so that another one on this machine can see whether it is still there."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["has_ended", "this_process"]

PROC = Path("/proc")


def this_process() -> str:
    """Return its machine since it was started, its place there, its id and when it began; empty where nobody knows."""
    pid = os.getpid()
    begun = _begun(pid)
    return f"{_space()} {pid} {begun}" if begun else ""


def has_ended(told: Any) -> bool:
    """Return whether the process whose `this_process` was told has ended; False where that cannot be seen here."""
    parts = told.split() if isinstance(told, str) else []
    return len(parts) == 3 and parts[0] == _space() and parts[1].isdecimal() and _begun(int(parts[1])) != parts[2]


def _begun(pid: int) -> str:
    """Return the tick in which a process began, since its machine did; empty where it is not there any more."""
    try:
        state, *rest = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


@lru_cache
def _space() -> str:
    """Return what tells apart machines, and containers on one: the same id is another process in each."""
    try:
        return f"{(PROC / 'sys/kernel/random/boot_id').read_text().strip()}/{os.stat(PROC / 'self/ns/pid').st_ino}"
    except OSError:
        return ""
