"""Which process writes a history, so that who reads it can tell whether that one is still there."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_gone", "this_process"]

PROC = Path("/proc")
STATE, BEGUN = 0, 19
"""Places in /proc/PID/stat behind the name, which may hold spaces; the second is a time, in ticks since the boot."""


def this_process() -> dict[str, Any] | None:
    """Return what names this process and no other; None where the system does not tell."""
    return _named(os.getpid())  # a fork is another one


def is_gone(process: Any) -> bool:
    """Return whether it is certain that a process has ended: one of another machine, or container, is not known.

    Args:
        process: as `this_process` returned it, or whatever stands in its place in a file.
    """
    pid = process.get("pid") if isinstance(process, Mapping) else None
    if type(pid) is not int or not 0 < pid < 1 << 31 or process.get("machine") != _machine():
        return False
    try:
        os.kill(pid, 0)  # asks only; /proc may hide the processes of others
    except ProcessLookupError:
        return True
    except OSError:
        pass
    fields = _fields(pid)
    # One that has ended and that its parent has not asked for yet is still listed.
    return fields is not None and (fields[STATE] in "ZX" or fields[BEGUN] != process.get("begun"))


@functools.lru_cache(maxsize=1)
def _named(pid: int) -> dict[str, Any] | None:
    fields, machine = _fields(pid), _machine()
    return None if fields is None or machine is None else {"pid": pid, "begun": fields[BEGUN], "machine": machine}


def _machine() -> str | None:
    """Return what is the same for processes that know each other by the same numbers."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text()
        seen = f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except (OSError, ValueError):
        return None
    return hashlib.sha256(seen.encode()).hexdigest()[:12]


def _fields(pid: int) -> list[str] | None:
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()
    except (OSError, ValueError):
        return None
    return fields if len(fields) > BEGUN else None
