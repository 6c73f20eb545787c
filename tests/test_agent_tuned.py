"""The DQN under the real tuner: it reaches the best of known machines, and then keeps still."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agent_runs import decided, three_stages
from fakes import FakeLoop, FakeMachine, FakePipeline, Work, best_static
from views import plain

from benchmarks.policies.sim_pipeline import SimPipeline
from intune_callbacks.config import TunerConfig
from intune_callbacks.decide.dqn import Dqn
from intune_callbacks.pretrain.oracle import best
from intune_callbacks.session.tuner import Tuner


def tuner_of(pipeline: FakePipeline, policy: Dqn | None = None, **config: Any) -> Tuner:
    machine = pipeline.machine
    return Tuner(pipeline, TunerConfig(**config), policy=policy, probe=machine, clock=machine.clock())


@pytest.mark.parametrize(("cpus", "depth"), [(16.0, None), (32.0, 4), (64.0, None)])
def test_reaches_the_best_of_a_known_pipeline(cpus: float, depth: int | None) -> None:
    loop = FakeLoop(pipeline := three_stages(cpus, depth))
    before = loop.throughput / best_static(pipeline)
    tuner = tuner_of(pipeline, Dqn())
    loop.run(tuner, 90.0)
    assert tuner.frozen is None
    assert before < 0.75 and loop.throughput >= 0.9 * best_static(pipeline)
    assert not any(decision.vetoes for decision in loop.decisions)


NEEDED = 11
"""Workers of 1.1 s for ten batches a second."""


def test_a_model_that_stalls_for_a_window_is_no_reason_for_fewer_workers() -> None:
    pipeline = FakePipeline({"load": Work(1.1, cpu_share=0.13, workers=4, window=8, high=128)}, FakeMachine(2.0))
    loop, policy = FakeLoop(pipeline, model_s=0.1), Dqn()
    decided(policy, loop, 5)
    assert pipeline.stages()[0].current >= NEEDED
    loop.model_s = 0.6  # beside workers that start, or on a machine that does something else
    decided(policy, loop, 2)
    loop.model_s = 0.1
    decided(policy, loop, 5)
    assert pipeline.stages()[0].current >= NEEDED


def test_is_the_policy_of_a_tuner_that_is_told_nothing_else() -> None:
    loop = FakeLoop(pipeline := three_stages())
    tuner = tuner_of(pipeline)
    assert tuner.summary().policy == "dqn"
    loop.run(tuner, 60.0)
    assert tuner.frozen is None and loop.throughput >= 0.9 * best_static(pipeline)


@pytest.mark.parametrize("seed", range(3))
def test_reaches_the_oracle_of_plain_simulated_machines(seed: int) -> None:
    drawn = plain(1, seed=seed, stages=4, cpus=32)
    machine = replace(drawn, work_s=3.0 * drawn.work_s / drawn.work_s.sum(), io_rate=np.full(1, 1e3))
    machine = replace(machine, demand=np.full(1, 1e3))
    pipeline = SimPipeline(machine, seed)
    tuner = Tuner(pipeline, TunerConfig(policy="dqn"), probe=pipeline, clock=pipeline.clock)
    while pipeline.clock.wall() < 90.0:
        tuner.batch(pipeline.step(), samples=1)
    top = best(machine, machine.work_s, machine.base, machine.cpus)[0][0]
    assert tuner.frozen is None
    assert pipeline.rate >= 0.9 * top


def test_follows_a_machine_that_grows_and_shrinks() -> None:
    loop = FakeLoop(pipeline := three_stages(16.0))
    tuner = tuner_of(pipeline, Dqn())
    for cpus in (16.0, 64.0, 16.0):
        pipeline.machine.cpus = cpus
        loop.run(tuner, 60.0)
        assert loop.throughput >= 0.88 * best_static(pipeline), cpus
    assert tuner.frozen is None


def test_all_of_it_can_be_written_down() -> None:
    loop = FakeLoop(three_stages())
    tuner = tuner_of(loop.pipeline, Dqn())
    loop.run(tuner, 30.0)
    assert json.loads(json.dumps(tuner.summary().to_json(), allow_nan=False))["decisions"]
    assert json.loads(json.dumps(tuner.state_dict(), allow_nan=False))["policy"]["name"] == "dqn"


def test_settles_and_then_keeps_still() -> None:
    loop = FakeLoop(pipeline := three_stages(), jitter=0.01)
    tuner = tuner_of(pipeline, Dqn())
    loop.run(tuner, 50.0)
    assert all(decision.settled for decision in loop.run(tuner, 15.0))
    late = loop.run(tuner, 60.0)
    assert sum(decision.applied for decision in late) <= 0.2 * len(late)
