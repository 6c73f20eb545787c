"""What the machine gives this process: CPUs, memory and shared memory, as the container limits them, read live."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from intune_callbacks.config import number_problem
from intune_callbacks.errors import ConfigError
from intune_callbacks.measure.cgroups import MemoryProbe, groups, quota_of
from intune_callbacks.measure.device import GpuProbe
from intune_callbacks.pipelines.base import cpus_allowed
from intune_callbacks.types import Probe, Resources

__all__ = ["Beyond", "IdleCpus", "MachineProbe"]

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
        self._quotas = [quota for group in groups(root) if (quota := quota_of(group)) is not None]
        self._memory = MemoryProbe(root)

    def read(self) -> Resources:
        """Return what there is right now."""
        limit_bytes, used_bytes = self._memory.read()
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


def _local_rank() -> int:
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdigit() else 0


def _free_bytes(folder: str) -> int | None:
    try:
        return psutil.disk_usage(folder).free
    except OSError:
        return None
