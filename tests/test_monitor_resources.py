"""MachineProbe against made-up cgroup v1 and v2 trees whose numbers change while it looks."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
from machine_tree import AVAILABLE, GIB, TOTAL, Machine, NoGpu

from intune_callbacks.errors import ConfigError
from intune_callbacks.measure.resources import MachineProbe
from intune_callbacks.types import Resources


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_cgroups_the_machine_is_the_limit(machine: Machine) -> None:
    seen = machine.probe().read()
    assert seen == Resources(
        cpus=15.0,
        memory_limit_bytes=TOTAL,
        memory_used_bytes=TOTAL - AVAILABLE,
        shm_free_bytes=None,
        gpu_utilisation=None,
        trainer_cpus=1.0,
    )


def test_without_meminfo_the_kernel_is_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", unread)
    found = machine.probe().read()
    assert found.memory_limit_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found.memory_used_bytes < found.memory_limit_bytes


def test_shared_memory_is_looked_up_where_it_exists(machine: Machine) -> None:
    (machine.root / "dev/shm").mkdir(parents=True)
    room = os.statvfs(machine.root)
    free = machine.probe().read().shm_free_bytes
    assert free is not None
    assert free == pytest.approx(room.f_bavail * room.f_frsize, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "cpus"),
    [
        ({"trainer_cpus": 1.0}, 15.0),
        ({"trainer_cpus": 1.0, "local_ranks": 4}, 3.0),
        ({"trainer_cpus": 3.0, "local_ranks": 4}, 2.0),  # never less than half of the share of 4
        ({"trainer_cpus": 0.0, "local_ranks": 64}, 0.25),
        ({"cpus": 6.0, "local_ranks": 4}, 6.0),  # what the user says is not divided again
    ],
)
def test_ranks_and_trainer_share_the_cpus(machine: Machine, arguments: dict[str, float], cpus: float) -> None:
    assert machine.probe(**arguments).read().cpus == cpus


@pytest.mark.parametrize(("affinity", "cpus"), [(1, 0.5), (2, 1.0), (3, 2.0)])
def test_small_machines_are_shared_with_the_trainer(machine: Machine, affinity: int, cpus: float) -> None:
    machine.affinity = affinity
    assert machine.probe().read().cpus == cpus


def test_affinity_is_read_live(machine: Machine) -> None:
    probe = machine.probe(trainer_cpus=0.0)
    assert probe.read().cpus == 16
    machine.affinity = 4
    assert probe.read().cpus == 4


def test_v2_quota_is_the_smallest_up_the_tree(machine: Machine) -> None:
    machine.v2("/pod/container")
    machine.write("sys/fs/cgroup/cgroup.procs", "")
    machine.write("sys/fs/cgroup/pod/cpu.max", "200000 100000")
    machine.write("sys/fs/cgroup/pod/container/cpu.max", "800000 100000")
    assert machine.cpus() == 2.0
    machine.write("sys/fs/cgroup/pod/cpu.max", "max 100000")
    assert machine.cpus() == 8.0
    machine.write("sys/fs/cgroup/pod/container/cpu.max", "6400000 100000")
    assert machine.cpus() == 16.0  # more quota than CPUs


def test_v2_quota_is_read_live(machine: Machine) -> None:
    machine.v2()
    machine.write("sys/fs/cgroup/cpu.max", "max 100000")
    probe = machine.probe(trainer_cpus=0.0)
    seen = []
    for text in ("max 100000", "400000 100000", "50000 100000", "1200000 100000", "max 100000"):
        machine.write("sys/fs/cgroup/cpu.max", text)
        seen.append(probe.read().cpus)
    assert seen == [16.0, 4.0, 0.5, 12.0, 16.0]


def test_what_cannot_be_read_any_more_still_limits(machine: Machine) -> None:
    machine.v2()
    machine.write("sys/fs/cgroup/cpu.max", "400000 100000")
    machine.v2_memory("", 8 * GIB, GIB)
    probe = machine.probe(trainer_cpus=0.0)
    assert (probe.read().cpus, probe.read().memory_limit_bytes) == (4.0, 8 * GIB)
    machine.write("sys/fs/cgroup/cpu.max", "")
    machine.write("sys/fs/cgroup/memory.current", "")
    assert (probe.read().cpus, probe.read().memory_limit_bytes) == (4.0, 8 * GIB)
    for file in (machine.root / "sys/fs/cgroup").iterdir():
        file.unlink()
    assert (probe.read().cpus, probe.read().memory_limit_bytes) == (4.0, 8 * GIB)


def test_files_longer_than_a_page_are_read_whole(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.v2()
    machine.write("sys/fs/cgroup/cpu.max", "400000 100000")
    machine.v2_memory("", 8 * GIB, 2 * GIB, inactive_file=GIB)
    own = (machine.root / "proc/self/mountinfo").read_text().strip()
    overlay = "".join(f"{100 + k} 24 0:{k} / /volumes/{'long' * 9}{k} rw - tmpfs tmpfs rw\n" for k in range(100))
    machine.write("proc/self/mountinfo", overlay + own)
    stock = os.read
    # As the kernel does it for such files.
    monkeypatch.setattr(os, "read", lambda descriptor, most: stock(descriptor, min(most, 4000)))
    assert machine.cpus() == 4.0
    assert machine.memory() == (8 * GIB, GIB)


def test_the_mark_from_which_the_kernel_slows_a_group_down_is_a_limit(machine: Machine) -> None:
    machine.v2()
    machine.v2_memory("", 8 * GIB, GIB)
    machine.write("sys/fs/cgroup/memory.high", "max")
    probe = machine.probe()
    assert probe.read().memory_limit_bytes == 8 * GIB
    machine.write("sys/fs/cgroup/memory.high", 3 * GIB)
    assert (probe.read().memory_limit_bytes, probe.read().memory_used_bytes) == (3 * GIB, GIB)
    machine.write("sys/fs/cgroup/memory.max", "max")
    assert probe.read().memory_limit_bytes == 3 * GIB


def test_how_many_share_the_memory_is_told(machine: Machine) -> None:
    assert machine.probe(local_ranks=4).read().local_ranks == 4


def test_v1_quota_is_read_live_and_up_the_tree(machine: Machine) -> None:
    machine.v1("/pod/container")
    for group, quota in (("", -1), ("pod/", 300000), ("pod/container/", 600000)):
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{group}cpu.cfs_quota_us", quota)
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{group}cpu.cfs_period_us", 100000)
    probe = machine.probe(trainer_cpus=0.0)
    assert probe.read().cpus == 3.0
    machine.write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us", -1)
    assert probe.read().cpus == 6.0
    machine.write("sys/fs/cgroup/cpu,cpuacct/pod/container/cpu.cfs_period_us", 50000)
    assert probe.read().cpus == 12.0


def test_v2_memory_counts_no_page_cache_that_can_be_dropped(machine: Machine) -> None:
    machine.v2("/box")
    machine.v2_memory("box", 8 * GIB, 6 * GIB, inactive_file=2 * GIB)
    probe = machine.probe()
    seen = probe.read()
    assert (seen.memory_limit_bytes, seen.memory_used_bytes) == (8 * GIB, 4 * GIB)
    machine.v2_memory("box", 16 * GIB, 7 * GIB, inactive_file=GIB)
    seen = probe.read()
    assert (seen.memory_limit_bytes, seen.memory_used_bytes) == (16 * GIB, 6 * GIB)


def test_files_that_were_read_twice_are_no_memory_in_use(machine: Machine) -> None:
    """From its second epoch on, a dataset in files stands among the active pages, and fills the group to its limit."""
    machine.v2("/box")
    machine.v2_memory("box", 16 * GIB, 16 * GIB, inactive_file=GIB, active_file=12 * GIB)
    assert machine.memory() == (16 * GIB, 3 * GIB)


def test_v1_memory(machine: Machine) -> None:
    machine.v1("/box")
    for group, limit in (("", 9223372036854771712), ("box/", 8 * GIB)):
        folder = f"sys/fs/cgroup/memory/{group}"
        machine.write(f"{folder}memory.limit_in_bytes", limit)
        machine.write(f"{folder}memory.usage_in_bytes", 5 * GIB)
        machine.write(f"{folder}memory.stat", f"inactive_file {3 * GIB}\ntotal_cache 4\ntotal_inactive_file {GIB}")
    assert machine.memory() == (8 * GIB, 4 * GIB)
    for group in ("", "box/"):
        with (machine.root / f"sys/fs/cgroup/memory/{group}memory.stat").open("a") as stat:
            stat.write(f"\ntotal_active_file {2 * GIB}\n")
    assert machine.memory() == (8 * GIB, 2 * GIB)


@pytest.mark.parametrize("limit", ["max", TOTAL, 2 * TOTAL, "nonsense"])
def test_a_group_without_a_real_limit_leaves_the_machines(machine: Machine, limit: object) -> None:
    machine.v2()
    machine.v2_memory("", limit, 60 * GIB)
    assert machine.memory() == (TOTAL, TOTAL - AVAILABLE)


def test_memory_that_neighbours_took_counts_as_used(machine: Machine) -> None:
    machine.v2("/pod/box")
    machine.v2_memory("pod", 16 * GIB, 15 * GIB)
    machine.v2_memory("pod/box", 8 * GIB, 2 * GIB)
    assert machine.memory() == (8 * GIB, 7 * GIB)  # 1 GiB is left in the pod
    machine.available = GIB // 2
    assert machine.memory() == (8 * GIB, 8 * GIB - GIB // 2)


def test_usage_beyond_the_limit_reads_as_full(machine: Machine) -> None:
    machine.v2()
    machine.v2_memory("", 8 * GIB, 9 * GIB)
    assert machine.memory() == (8 * GIB, 8 * GIB)


def test_a_container_that_sees_the_hosts_path_finds_its_own_group(machine: Machine) -> None:
    machine.v1("/docker/abc", mount_root="/docker/abc")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 200000)
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    assert machine.cpus() == 2.0


@pytest.mark.parametrize(("mount_root", "cpus"), [("/", 2.0), ("/..", 2.0), ("/other", 16.0), ("/bo", 16.0)])
def test_only_groups_around_this_process_count(machine: Machine, mount_root: str, cpus: float) -> None:
    machine.v2("/box", mount_root=mount_root)
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.cpus() == cpus


def test_a_path_outside_of_the_namespace_reads_the_mount(machine: Machine) -> None:
    machine.v2("/../elsewhere")
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    machine.write("sys/fs/elsewhere/cpu.max", "100000 100000")
    assert machine.cpus() == 2.0


def test_all_wrong_arguments_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        MachineProbe(local_ranks=0, trainer_cpus=-1.0, cpus=0.0, gpu=NoGpu())  # type: ignore[arg-type]
    assert [problem.split("=")[0] for problem in error.value.problems] == ["local_ranks", "trainer_cpus", "cpus"]


def test_the_real_machine_can_be_read() -> None:
    seen = MachineProbe().read()
    assert seen.cpus > 0
    assert 0 < seen.memory_used_bytes < seen.memory_limit_bytes <= psutil.virtual_memory().total


def test_the_first_look_of_a_process_starts_no_thread() -> None:
    """The memory bandwidth was once measured beside the first steps: .1 s of a fit of four."""
    look = (
        "import threading; started = []; threading.Thread.start = started.append\n"
        "from intune_callbacks.measure.resources import MachineProbe\n"
        "MachineProbe().read(); print(started)"
    )
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"


def test_what_was_warned_of_once_does_not_come_again() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("the user's", stacklevel=1)
            MachineProbe()
    assert len(told) == 1
