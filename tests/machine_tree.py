"""A made-up machine: the files of /proc, /sys and /dev that say what it has."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from intune_callbacks.measure.resources import MachineProbe

GIB = 1 << 30
TOTAL, AVAILABLE = 64 * GIB, 48 * GIB


class NoGpu:
    def read(self) -> float | None:
        return None


class Machine:
    """A root folder with /proc, /sys and /dev, on a machine with 16 CPUs and 64 GiB."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.affinity, self.available = 16, AVAILABLE
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(self.affinity)), raising=False)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL, available=self.available))

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, path: str = "/", mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}")
        self.write(
            "proc/self/mountinfo", f"30 24 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup rw"
        )

    def v1(self, path: str = "/", mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"5:memory:{path}\n4:cpu,cpuacct:{path}\n3:cpuset:{path}\n0::{path}")
        self.write(
            "proc/self/mountinfo",
            "24 1 0:22 / /sys rw - sysfs sysfs rw\n"
            f"31 30 0:27 {mount_root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"32 30 0:28 {mount_root} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
            f"33 30 0:29 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            f"34 30 0:30 {mount_root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        )

    def v2_memory(self, group: str, limit: object, current: int, inactive_file: int = 0, active_file: int = 0) -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", current)
        files = f"active_file {active_file}\ninactive_file {inactive_file}"
        self.write(f"{folder}/memory.stat", f"anon 7\nfile 9\n{files}\nslab 3")

    def probe(self, **arguments: object) -> MachineProbe:
        return MachineProbe(gpu=NoGpu(), root=self.root, **arguments)  # type: ignore[arg-type]

    def cpus(self, **arguments: object) -> float:
        return self.probe(**{"trainer_cpus": 0.0, **arguments}).read().cpus

    def memory(self) -> tuple[int, int]:
        seen = self.probe().read()
        return seen.memory_limit_bytes, seen.memory_used_bytes
