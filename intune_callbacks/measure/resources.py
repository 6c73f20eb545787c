"""What the machine gives this process: CPUs, memory and shared memory, as the container limits them, read live."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from intune_callbacks.config import number_problem
from intune_callbacks.errors import ConfigError
from intune_callbacks.measure.device import GpuProbe
from intune_callbacks.pipelines.base import cpus_allowed
from intune_callbacks.types import Probe, Resources

__all__ = ["Beyond", "IdleCpus", "MachineProbe", "machine_memory"]

# Of the numbers behind the name of a CPU in /proc/stat: idle, and idle while something is being read or written.
IDLE, ALL = slice(3, 5), slice(0, 8)
# Ticks of all CPUs together between two readings, a choice: of 20 one more is 5 %, and reading costs a moment.
FEWEST_TICKS = 20


class MachineProbe:
    """Reads the CPUs and the memory the input pipeline may use; limits that change are seen at the next `read`.

    CPUs: min(affinity, cgroup quota) / local ranks - what the trainer needs, but never less than half of the rank's
    share: on a small machine trainer and pipeline share.

    Memory: the limit is the smallest of the cgroup's, those of the groups around it and the machine's. What is used is
    that limit minus what can still be had at every one of these levels, page cache that the kernel can drop not
    counted; /dev/shm is part of it. With one limit this is the group's usage minus its file pages, the active ones too:
    each page of a file that is read a second time, as in a second epoch, becomes active and is dropped all the same.

    Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max, memory.max, memory.high, memory.current,
    memory.stat) and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, .../scheduler/sched-bwc.html
    (cpu.cfs_quota_us).

    Args:
        local_ranks: training processes on this machine that share it evenly.
        trainer_cpus: CPUs one training loop needs for itself.
        cpus: CPUs the pipeline of this rank may use, instead of measuring them.
        gpu: whose utilisation is read; by default the GPU of this rank (``LOCAL_RANK``).
        root: where ``proc``, ``sys`` and ``dev`` are looked up.

    Raises:
        ConfigError: with all wrong arguments at once.
    """

    def __init__(
        self,
        local_ranks: int = 1,
        trainer_cpus: float = 1.0,
        cpus: float | None = None,
        *,
        gpu: GpuProbe | None = None,
        root: Path = Path("/"),
    ) -> None:
        problems = [
            *number_problem("local_ranks", local_ranks, 1, 1_000_000),
            *number_problem("trainer_cpus", trainer_cpus, 0.0, 4096.0),
            *(number_problem("cpus", cpus, 0.1, 4096.0) if cpus is not None else ()),
        ]
        if problems:
            raise ConfigError(problems)
        self._local_ranks, self._trainer_cpus, self._cpus = local_ranks, trainer_cpus, cpus
        self._gpu = GpuProbe(_local_rank()) if gpu is None else gpu
        self._idle = IdleCpus(root)
        self._shm = str(root / "dev" / "shm")
        groups = list(_groups(root))
        self._quotas = [quota for group in groups if (quota := _quota(group)) is not None]
        self._memories = [memory for group in groups if (memory := _memory(group)) is not None]

    def read(self) -> Resources:
        """Return what there is right now."""
        limit_bytes, used_bytes = self._read_memory()
        idle = self._idle.read()
        cpus, trainer_cpus = self._read_cpus()
        return Resources(
            cpus=cpus,
            memory_limit_bytes=limit_bytes,
            memory_used_bytes=used_bytes,
            shm_free_bytes=_free_bytes(self._shm),
            gpu_utilisation=self._gpu.read(),
            cpus_idle=None if idle is None else idle / self._local_ranks,
            local_ranks=self._local_ranks,
            trainer_cpus=trainer_cpus,
        )

    def _read_cpus(self) -> tuple[float, float]:
        """Return the CPUs of the pipeline, and those left to the training loop; numbers the user gave lend nothing."""
        if self._cpus is not None:
            return self._cpus, 0.0
        limits = [quota.read() for quota in self._quotas]
        share = min([float(cpus_allowed()), *(limit for limit in limits if limit is not None)]) / self._local_ranks
        cpus = max(share - self._trainer_cpus, share / 2)
        return cpus, share - cpus

    def _read_memory(self) -> tuple[int, int]:
        whole_bytes, free_bytes = machine_memory()
        limit_bytes = whole_bytes
        for memory in self._memories:
            reading = memory.read(below=whole_bytes)
            if reading is not None:
                limit_bytes = min(limit_bytes, reading[0])
                free_bytes = min(free_bytes, reading[0] - reading[1])
        return limit_bytes, min(max(limit_bytes - free_bytes, 0), limit_bytes)


class Beyond:
    """What a probe reads, and the CPUs of other machines.

    Args:
        pipeline: returns the one whose workers may be there; it is told how many CPUs there are here.
    """

    def __init__(self, probe: Probe, pipeline: Callable[[], object]) -> None:
        self._probe, self._pipeline = probe, pipeline

    def read(self) -> Resources:
        """Return what there is right now."""
        seen, beyond = self._probe.read(), getattr(self._pipeline(), "beyond", None)
        return seen if beyond is None else replace(seen, remote_cpus=beyond(seen.cpus))


class IdleCpus:
    """CPUs this process may run on and that stood idle, on average since the reading before.

    An item that takes longer than it computes may wait for a read, or for a CPU.

    Source: https://man7.org/linux/man-pages/man5/proc_stat.5.html
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


@dataclass(slots=True)
class _Quota:
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
class _Memory:
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


def _quota(group: Path) -> _Quota | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        if all((group / name).is_file() for name in names):
            return _Quota(tuple(str(group / name) for name in names))
    return None


def _memory(group: Path) -> _Memory | None:
    for limit, usage, of_whole in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        if (group / limit).is_file() and (group / usage).is_file():
            # Above memory.high the kernel slows the group down until it holds less.
            limits = tuple(str(group / name) for name in (limit, "memory.high") if (group / name).is_file())
            file_pages = tuple(f"{of_whole}{kind}_file" for kind in ("inactive", "active"))
            return _Memory(limits, str(group / usage), str(group / "memory.stat"), file_pages)
    return None


def _groups(root: Path) -> Iterator[Path]:
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
    return Path(file).read_text(encoding="ascii", errors="replace")


def machine_memory() -> tuple[int, int]:
    """Return how many bytes of memory the machine has, and how many of them can be had."""
    try:
        machine = psutil.virtual_memory()
        return machine.total, machine.available
    except (OSError, psutil.Error):
        # No /proc/meminfo, as in a service of systemd's with ProcSubset=pid: page cache then counts as used.
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return page_bytes * os.sysconf("SC_PHYS_PAGES"), page_bytes * os.sysconf("SC_AVPHYS_PAGES")


def _local_rank() -> int:
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdigit() else 0


def _free_bytes(folder: str) -> int | None:
    try:
        return psutil.disk_usage(folder).free
    except OSError:
        return None
