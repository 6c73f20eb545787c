"""The physics of the simulated machines, where it is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from views import plain

from intune_callbacks.pretrain.flow import Flow, flow, memory
from intune_callbacks.pretrain.machines import DISK, UDF, Machines

DEEP = 4096.0


def rates(machines: Machines, workers: Any, buffer: float = DEEP, ratio: float = 12.0) -> Flow:
    """Return the flow of allocations [K, stages] on one machine, with wide windows."""
    n = np.zeros((1, len(workers), machines.mask.shape[1]))
    n[0, :, : np.shape(workers)[1]] = workers
    depth = np.full(n.shape[:2], buffer)
    return flow(machines, machines.work_s, n, ratio * n, depth, machines.cpus)


def stage_costs(*work_s: float, cpus: float = 64.0, **given: Any) -> Machines:
    """Return one plain machine with these costs; other fields can be given for its stages."""
    base = plain(1, stages=len(work_s), cpus=int(cpus))
    rows = {"work_s": work_s} | given
    changes = {}
    for name, values in rows.items():
        of = getattr(base, name).copy()
        of[0, : len(work_s)] = values
        changes[name] = of
    limits = {"io_rate": np.full(1, 1e6), "demand": np.full(1, 1e6)}
    return replace(base, **{"cv": np.zeros_like(base.cv)} | limits | changes)


def test_plain_machine_delivers_what_its_slowest_stage_makes() -> None:
    machine = stage_costs(0.2, 0.1, 1.0)
    workers = np.array([[4, 4, 8], [1, 9, 9], [9, 1, 30], [10, 10, 10]], float)
    expected = (workers / [0.2, 0.1, 1.0]).min(1)
    np.testing.assert_allclose(rates(machine, workers).rate[0], expected, rtol=1e-3)
    np.testing.assert_allclose(rates(machine, workers).service_s[0, :, :3], np.tile([0.2, 0.1, 1.0], (4, 1)))


def test_cpus_limit_all_stages_together() -> None:
    machine = stage_costs(0.5, 0.5, cpus=8.0)
    # 1 CPU second a batch on 8 CPUs; twice the workers only crowd.
    got = rates(machine, [[4, 4], [8, 8]]).rate[0]
    assert got[0] == pytest.approx(8.0, rel=0.1)
    assert got[1] < got[0]


def test_stages_of_equal_speed_disturb_each_other_without_buffers() -> None:
    machine = stage_costs(0.5, 0.5, 0.5)
    shallow, deep = (float(rates(machine, [[8, 8, 8]], buffer, ratio=2.0).rate[0, 0]) for buffer in (1.0, 256.0))
    assert shallow < 0.92 * deep
    # One stage alone is slow: nothing to disturb.
    shallow, deep = (float(rates(machine, [[4, 32, 32]], buffer, ratio=2.0).rate[0, 0]) for buffer in (1.0, 256.0))
    assert shallow > 0.98 * deep


def test_gil_gains_nothing_from_more_workers() -> None:
    serial = stage_costs(0.1, 1.0, serial=[0.0, 1.0])
    got = rates(serial, [[8, 1], [8, 4], [8, 32]]).rate[0]
    np.testing.assert_allclose(got, 1.0, rtol=1e-3)
    free = rates(stage_costs(0.1, 1.0), [[8, 1], [8, 4], [8, 32]]).rate[0]
    assert free[2] > 20.0 * free[0]


def test_coherence_makes_more_workers_slower() -> None:
    machine = stage_costs(0.01, 1.0, cpus=256.0, coherence=[0.0, 0.01])
    got = rates(machine, [[8, n] for n in range(1, 100)]).rate[0]
    # n / (1 + kappa n (n - 1)) is largest at 1 / sqrt(kappa).
    assert got.argmax() + 1 == pytest.approx(10, abs=1)


def test_convoy_has_its_best_in_between() -> None:
    machine = replace(stage_costs(0.2, 1.0, 1.0, lock=[0.0, 0.05, 0.05]), convoy=np.full(1, 0.05))
    grid = np.arange(1, 31)
    got = rates(machine, [[24, n, n] for n in grid]).rate[0]
    top = int(grid[got.argmax()])
    assert 3 < top < 25
    assert got[0] < 0.7 * got.max() and got[-1] < 0.9 * got.max()
    # Without the lock more is better to the end.
    alone = rates(replace(machine, lock=np.zeros_like(machine.lock)), [[24, n, n] for n in grid[:20]]).rate[0]
    assert alone.argmax() == 19


def test_disk_and_model_limit_the_rate() -> None:
    machine = replace(stage_costs(0.1, 0.1), kind=np.array([[DISK, UDF, 0, 0, 0, 0]]), io_rate=np.full(1, 20.0))
    np.testing.assert_allclose(rates(machine, [[30, 30], [1, 30]]).rate[0], [20.0, 10.0], rtol=0.01)
    model = replace(stage_costs(0.1, 0.1), demand=np.full(1, 50.0))
    got = rates(model, [[30, 30]])
    assert got.rate[0, 0] == pytest.approx(50.0, rel=0.01)
    assert got.supply[0, 0] == pytest.approx(300.0, rel=0.05)


def test_irregular_work_needs_wide_windows() -> None:
    machine = stage_costs(0.01, 1.0, cv=[0.0, 1.0])
    narrow, wide = (float(rates(machine, [[8, 32]], ratio=ratio).rate[0, 0]) for ratio in (1.0, 12.0))
    assert narrow < 0.7 * wide
    assert wide > 0.85 * 32.0


def test_memory_counts_workers_windows_and_buffers() -> None:
    machine = stage_costs(0.1, 0.1, worker_memory=[0.01, 0.02], item_memory=[0.001, 0.0])
    machine = replace(machine, batch_memory=np.full(1, 0.005))
    n = np.zeros((1, 1, 6))
    n[0, 0, :2] = 3, 4
    used = [float(memory(machine, np.full(1, 0.2), n, 10.0 * n, np.full((1, 1), 8.0), full)[0, 0]) for full in (0, 1)]
    # Base, workers with one item each in hand; then a window of 30 and 8 batches.
    assert used[0] == pytest.approx(0.2 + 3 * 0.011 + 4 * 0.02)
    assert used[1] == pytest.approx(used[0] + 30 * 0.001 + 8 * 0.005)
