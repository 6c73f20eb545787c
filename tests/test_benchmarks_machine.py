"""The emulated machine against theory."""

from __future__ import annotations

import itertools
import statistics
import threading
import time

import pytest
from busy_machine import three_attempts

from benchmarks.emulated import SHARES, VirtualMachine, irregular, water_fill


def busy(machine: VirtualMachine, threads: int, calls: int, seconds: float) -> float:
    """Run `calls` calls in each of `threads` threads and return the wall seconds it took."""
    workers = [
        threading.Thread(target=lambda: [machine.compute("work", seconds) for _ in range(calls)])
        for _ in range(threads)
    ]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    return time.perf_counter() - begin


@pytest.mark.parametrize(("cpus", "threads"), [(1, 3), (4, 2), (4, 12), (8, 32)])
@three_attempts
def test_machine_gives_what_its_cpus_can(cpus: int, threads: int) -> None:
    machine = VirtualMachine(cpus)
    took = busy(machine, threads, 6, 0.02)
    # Work-conserving: the calls of `threads` threads share min(cpus, threads) CPUs.
    ideal = threads * 6 * 0.02 / min(cpus, threads)
    usage = machine.usage()
    assert ideal <= took < ideal * 1.15 * max(1.0, usage.sleep_inflation)
    assert usage.calls == threads * 6
    assert usage.asked_s == pytest.approx(threads * 6 * 0.02)
    assert usage.held_s >= usage.asked_s


def test_pipeline_of_one_worker_each_runs_at_its_slowest_stage() -> None:
    machine, work_s = VirtualMachine(8), 0.2
    made: list[float] = []

    def stage(share: float, taken: threading.Semaphore, given: threading.Semaphore, last: bool) -> None:
        for _ in range(12):
            taken.acquire()
            machine.compute("stage", work_s * share)
            given.release()
            if last:
                made.append(time.perf_counter())

    gates = [threading.Semaphore(12), *(threading.Semaphore(0) for _ in SHARES)]
    threads = [
        threading.Thread(target=stage, args=(share, gates[i], gates[i + 1], i == len(SHARES) - 1))
        for i, share in enumerate(SHARES.values())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    interval = statistics.median(b - a for a, b in itertools.pairwise(made[2:]))
    assert interval == pytest.approx(work_s * max(SHARES.values()), rel=0.08)


@three_attempts
def test_machine_grows_and_shrinks_under_way() -> None:
    machine = VirtualMachine(1)
    threading.Timer(0.1, machine.resize, [8]).start()
    # 16 calls of 25 ms: four fit into the first 100 ms on one CPU, the other twelve into two rounds on eight.
    took = busy(machine, 16, 1, 0.025)
    assert 0.125 <= took < 0.25
    machine.resize(2)
    assert busy(machine, 8, 1, 0.02) >= 4 * 0.02
    assert machine.probe().read().cpus == 2.0
    assert machine.usage().utilisation <= 1.0


def test_virtual_cpu_time_belongs_to_the_thread_that_held_the_cpu() -> None:
    machine = VirtualMachine(1)
    seen: dict[str, float] = {}

    def work(name: str, seconds: float) -> None:
        machine.compute(name, seconds)
        seen[name] = machine.clock.cpu()

    threads = [threading.Thread(target=work, args=pair) for pair in (("short", 0.02), ("long", 0.06))]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    wall_s = time.perf_counter() - begin_s
    # One of them waited for the other: with that wait, both together would have more than there was.
    assert seen["short"] >= 0.02 and seen["long"] >= 0.06
    assert sum(seen.values()) == pytest.approx(machine.usage().held_s) and sum(seen.values()) <= wall_s
    assert machine.thread_time() == 0.0
    assert machine.stage_seconds() == {"short": 0.02, "long": 0.06}


def test_zero_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match="cpus=0: a virtual machine needs at least 1 CPU"):
        VirtualMachine(0)
    machine = VirtualMachine(1)
    with pytest.raises(ValueError, match="at least 1 CPU"):
        machine.resize(0)


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.8])
def test_irregular_costs_have_mean_one_and_the_asked_spread(sigma: float) -> None:
    import math

    factors = [irregular(7, index, sigma) for index in range(20_000)]
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=0.03)
    assert statistics.pstdev(math.log(factor) for factor in factors) == pytest.approx(sigma, abs=0.02)


def test_irregular_costs_depend_on_seed_and_item_only() -> None:
    assert irregular(1, 5, 0.8) == irregular(1, 5, 0.8)
    assert len({irregular(seed, index, 0.8) for seed in range(8) for index in range(64)}) == 8 * 64


def test_water_filling_is_the_best_split() -> None:
    assert water_fill(32, SHARES) == {"disk": 5, "shuffle": 4, "udf": 13, "batch": 8, "prefetch": 2}
    assert water_fill(3, SHARES) == dict.fromkeys(SHARES, 1)
