"""Idle CPUs: those this process may run on, since the reading before, from what the kernel counts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from intune_callbacks.measure.resources import IdleCpus, MachineProbe

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity to read here")


def write(root: Path, *cpus: tuple[int, ...]) -> None:
    """One line per CPU: ticks of user, nice, system, idle, iowait."""
    (root / "proc").mkdir(exist_ok=True)
    lines = [f"cpu{n} {' '.join(map(str, ticks))} 0 0 0 0 0" for n, ticks in enumerate(cpus)]
    (root / "proc" / "stat").write_text("cpu  1 2 3 4 5\n" + "\n".join(lines) + "\nintr 12 0 0\nctxt 99\n")


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_what_was_idle_between_two_readings(tmp_path: Path) -> None:
    write(tmp_path, (50, 0, 0, 50, 0), (0, 0, 0, 100, 0), (0, 0, 0, 100, 0))
    idle = IdleCpus(tmp_path)
    assert idle.read() is None  # nothing has passed yet
    # CPU 0: a quarter idle, half of that during reads; CPU 1: busy; CPU 2 is not ours.
    write(tmp_path, (110, 0, 15, 62, 13), (60, 40, 0, 100, 0), (0, 0, 0, 200, 0))
    assert idle.read() == pytest.approx(0.25)
    write(tmp_path, (111, 0, 15, 62, 13), (60, 40, 0, 101, 0), (0, 0, 0, 200, 0))
    assert idle.read() == pytest.approx(0.25)  # two ticks say nothing
    write(tmp_path, (111, 0, 15, 162, 13), (60, 40, 0, 200, 0), (0, 0, 0, 200, 0))
    assert idle.read() == pytest.approx(100 / 101 + 1.0, abs=0.02)


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    idle = IdleCpus(tmp_path)
    assert idle.read() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text("cpu0 a b c\n")
    assert idle.read() is None
    assert MachineProbe(root=tmp_path).read().cpus_idle is None


def test_ranks_share_what_is_idle(tmp_path: Path) -> None:
    write(tmp_path, (0, 0, 0, 0, 0), (0, 0, 0, 0, 0))
    probe = MachineProbe(local_ranks=2, root=tmp_path)
    write(tmp_path, (10, 0, 0, 90, 0), (10, 0, 0, 90, 0))
    assert probe.read().cpus_idle == pytest.approx(0.9)


def test_this_machine_is_read_quickly() -> None:
    idle = IdleCpus()
    if not Path("/proc/stat").exists():
        pytest.skip("no /proc/stat here")
    begin_s = time.process_time()
    for _ in range(20):
        idle.read()
    assert (time.process_time() - begin_s) / 20 < 0.01
