"""Limits of the control groups a process is in, and what is left of the memory below them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["GroupMemory", "MemoryProbe", "Quota", "groups", "machine_memory", "memory_of", "quota_of"]


class MemoryProbe:
    """Reads the memory that is there, see `intune_callbacks.measure.resources.MachineProbe`, and nothing else.

    Args:
        root: where ``proc`` and ``sys`` are looked up.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._memories = [memory for group in groups(root) if (memory := memory_of(group)) is not None]

    def read(self) -> tuple[int, int]:
        """Return the limit, and what is in use against it, in bytes."""
        whole_bytes, free_bytes = machine_memory()
        limit_bytes = whole_bytes
        for memory in self._memories:
            reading = memory.read(below=whole_bytes)
            if reading is not None:
                limit_bytes = min(limit_bytes, reading[0])
                free_bytes = min(free_bytes, reading[0] - reading[1])
        return limit_bytes, min(max(limit_bytes - free_bytes, 0), limit_bytes)


@dataclass(slots=True)
class Quota:
    """CPU time per period of one control group; in v2 one file holds both, in v1 there are two."""

    files: tuple[str, ...]
    last: float | None = None

    def read(self) -> float | None:
        """Return the CPUs; None without a limit. A limit that cannot be read now is the one of before."""
        try:
            quota_us, period_us = " ".join(_text(file) for file in self.files).split()
            limited = quota_us != "max" and int(quota_us) > 0
            self.last = int(quota_us) / int(period_us) if limited else None
        except (OSError, ValueError, ZeroDivisionError):
            pass
        return self.last


@dataclass(slots=True)
class GroupMemory:
    """Limit and usage of one control group."""

    limits: tuple[str, ...]
    usage: str
    stat: str
    file_pages: tuple[str, ...]
    last: tuple[int, int] | None = None

    def read(self, below: int) -> tuple[int, int] | None:
        """Return limit and unreclaimable usage in bytes; None if the group has no limit smaller than `below`.

        What cannot be read now is as it was before.
        """
        try:
            found = [int(text) for file in self.limits if (text := _text(file).strip()) != "max"]
            if not found or min(found) >= below:
                self.last = None
                return None
            usage_bytes = int(_text(self.usage))
            # memory.stat is ordered by kind, one "name bytes" per line.
            stat = "\n" + _text(self.stat)
            parts = [stat.partition(f"\n{name} ") for name in self.file_pages]
            self.last = min(found), usage_bytes - sum(int(rest.split(None, 1)[0]) for _, named, rest in parts if named)
        except (OSError, ValueError, IndexError):
            pass
        return self.last


def quota_of(group: Path) -> Quota | None:
    """Return the CPU limit of a control group, None where it can have none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        if all((group / name).is_file() for name in names):
            return Quota(tuple(str(group / name) for name in names))
    return None


def memory_of(group: Path) -> GroupMemory | None:
    """Return the memory limit of a control group, None where it can have none."""
    for limit, usage, of_whole in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        if (group / limit).is_file() and (group / usage).is_file():
            # Above memory.high the kernel slows the group down until it holds less.
            limits = tuple(str(group / name) for name in (limit, "memory.high") if (group / name).is_file())
            file_pages = tuple(f"{of_whole}{kind}_file" for kind in ("inactive", "active"))
            return GroupMemory(limits, str(group / usage), str(group / "memory.stat"), file_pages)
    return None


def groups(root: Path) -> Iterator[Path]:
    """Yield the folder of every control group this process is in, and of the groups around it."""
    try:
        memberships = _text(str(root / "proc/self/cgroup")).splitlines()
        mounts = _text(str(root / "proc/self/mountinfo")).splitlines()
    except OSError:  # not Linux
        return
    paths = {}
    for line in memberships:  # hierarchy:controllers:path, without controllers for v2
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:  # ... root mount-point options ... - type source super-options
        fields, _, rest = line.partition(" - ")
        kind, *_, options = rest.split()
        mount_root, mount_point = fields.split()[3:5]
        mounted = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for controller in ("", "cpu", "memory"):
            if controller in mounted and controller in paths:
                yield from _up(root / mount_point.lstrip("/"), mount_root, paths[controller])


def _up(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    prefix = mount_root.rstrip("/")
    if (path == prefix or path.startswith(prefix + "/")) and ".." not in path:
        parts = [part for part in path[len(prefix) :].split("/") if part]
    elif set(mount_root.split("/")) <= {"", ".."}:  # seen from a namespace: the mount is a group around this one
        parts = []
    else:  # another container's group, mounted here for other purposes
        return
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _text(file: str) -> str:
    # Read between two batches: unbuffered, and without a Path, at a third of the time.
    with open(file, "rb", buffering=0) as opened:
        return opened.read().decode("ascii", errors="replace")


def machine_memory() -> tuple[int, int]:
    """Return how many bytes of memory the machine has, and how many of them can be had."""
    try:
        machine = psutil.virtual_memory()
        return machine.total, machine.available
    except (OSError, psutil.Error):
        # No /proc/meminfo, as in a service of systemd's with ProcSubset=pid: page cache then counts as used.
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return page_bytes * os.sysconf("SC_PHYS_PAGES"), page_bytes * os.sysconf("SC_AVPHYS_PAGES")
