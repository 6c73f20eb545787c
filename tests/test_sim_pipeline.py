"""A simulated machine behind the protocols: the real tuner runs on it, and no time passes."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.policies.sim_pipeline import SimPipeline
from intune_callbacks.config import TunerConfig
from intune_callbacks.pretrain.machines import Machines, sample
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Pipeline


def machine(seed: int = 0, **changes: float) -> Machines:
    """Return a machine of 32 CPUs and three stages that makes some batches a second."""
    plain = sample(1, np.random.default_rng(seed), stages=3, cpus=32, plain=True)
    work_s = 3.0 * plain.work_s / plain.work_s.sum()
    drawn = replace(plain, work_s=work_s, io_rate=np.full(1, 1e3), demand=np.full(1, 1e3))
    return replace(drawn, **{name: np.full(1, value) for name, value in changes.items()})


def workers(pipeline: SimPipeline) -> dict[str, int]:
    return {stage.name: stage.current for stage in pipeline.stages() if stage.unit == "workers"}


def train(pipeline: SimPipeline, tuner: Tuner, until_s: float) -> None:
    while pipeline.clock.wall() < until_s:
        tuner.batch(pipeline.step(), samples=1)


def test_the_real_tuner_tunes_it_on_a_virtual_clock() -> None:
    begin = time.perf_counter()
    pipeline = SimPipeline(machine())
    pipeline.resize({"s0": 24, "s1": 4, "s2": 4})
    uneven = pipeline.rate
    tuner = Tuner(pipeline, TunerConfig(), probe=pipeline, clock=pipeline.clock)
    train(pipeline, tuner, 60.0)
    assert tuner.frozen is None
    assert pipeline.rate > 1.2 * uneven
    assert sum(workers(pipeline).values()) <= 1.15 * 32 + 3
    assert pipeline.clock.wall() >= 60.0 and time.perf_counter() - begin < 20.0


def test_the_tuner_follows_a_machine_that_grows() -> None:
    pipeline = SimPipeline(machine(), sizes={40: 2.0})
    tuner = Tuner(pipeline, TunerConfig(), probe=pipeline, clock=pipeline.clock)
    train(pipeline, tuner, 30.0)
    small = pipeline.rate
    train(pipeline, tuner, 90.0)
    assert pipeline.read().cpus == 64.0
    assert pipeline.rate > 1.5 * small


def test_counters_grow_by_what_a_batch_takes() -> None:
    quiet = machine(rate_noise=0.0)
    pipeline = SimPipeline(replace(quiet, stage_noise=0.0 * quiet.stage_noise), seed=4)
    readings = [pipeline.stats()]
    for _ in range(200):
        pipeline.step()
        readings.append(pipeline.stats())
    for before, after in itertools.pairwise(readings):
        assert after.delivered == before.delivered + 1 and after.at_s > before.at_s
        for name, now in after.stages.items():
            last = before.stages[name]
            assert now.items == last.items + 1
            assert now.busy_s > last.busy_s and now.cpu_s > last.cpu_s
            assert now.starved_s >= last.starved_s and now.blocked_s >= last.blocked_s
            assert 0 <= now.queued <= now.capacity
    elapsed_s = readings[-1].at_s - readings[0].at_s
    for name, count in workers(pipeline).items():
        done, cv = readings[-1].stages[name], float(machine().cv[0, int(name[1])])
        # Busy and idle seconds are those of all workers, and the squares give the irregularity back.
        assert done.busy_s + done.starved_s + done.blocked_s == pytest.approx(count * elapsed_s, rel=0.02)
        mean_s = done.busy_s / done.items
        assert np.sqrt(done.busy_s2 / done.items / mean_s**2 - 1.0) == pytest.approx(cv, abs=0.1)


def test_the_rate_is_what_the_clock_shows() -> None:
    pipeline = SimPipeline(machine(rate_noise=0.0))
    for _ in range(300):
        totals = pipeline.step()
    assert totals.steps / totals.wall_s == pytest.approx(pipeline.rate, rel=0.03)
    assert totals.wait_s + totals.model_s == pytest.approx(totals.wall_s)


def test_a_slow_model_does_not_wait() -> None:
    pipeline = SimPipeline(machine(demand=0.5))
    for _ in range(50):
        totals = pipeline.step()
    assert totals.wait_s < 0.05 * totals.wall_s
    # The same pipeline with a fast model waits for nearly all of its time.
    fast = SimPipeline(machine(demand=1000.0))
    for _ in range(50):
        totals = fast.step()
    assert totals.wait_s > 0.9 * totals.wall_s


def test_resize_clamps_and_answers_for_every_stage() -> None:
    roomy = machine()
    pipeline = SimPipeline(
        replace(roomy, worker_memory=0.01 * roomy.worker_memory, item_memory=0.0 * roomy.item_memory)
    )
    assert isinstance(pipeline, Pipeline)
    applied = pipeline.resize({"s1": 10**6, "s2": 7, "s2.window": 40, "no such stage": 3})
    assert applied == {stage.name: stage.current for stage in pipeline.stages()}
    assert applied["s1"] == max(s.high for s in pipeline.stages() if s.unit == "workers")
    assert (applied["s2"], applied["s2.window"]) == (7, 40)


def test_the_same_seed_gives_the_same_run() -> None:
    def totals(seed: int) -> float:
        pipeline = SimPipeline(machine(), seed)
        return [pipeline.step() for _ in range(50)][-1].wall_s

    assert totals(1) == totals(1) != totals(2)


def test_out_of_memory_is_the_end() -> None:
    pipeline = SimPipeline(machine(base=0.9, batch_memory=0.01, has_buffer=True, demand=1.0))
    with pytest.raises(MemoryError, match=r"ran out of memory after \d+ s: workers .*, buffer 200"):
        pipeline.resize({"buffer": 200})


def test_one_machine_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"2 machines given, expected 1"):
        SimPipeline(sample(2, np.random.default_rng(0)))
