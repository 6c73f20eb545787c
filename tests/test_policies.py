"""The policies: what they choose on a machine whose best allocation is known, and when they keep still."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work, best_static
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from policy_runs import FIVE, five_stages, fraction_of_best, tuner_of

from intune_callbacks.config import POLICIES
from intune_callbacks.decide.dqn import ModelJump
from intune_callbacks.decide.policies import EvenSplit, make_policy
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.errors import ConfigError
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.types import Resources

# -- ModelJump -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpus", [8.0, 32.0, 128.0])
def test_model_jump_reaches_the_best_from_an_even_split(cpus: float) -> None:
    loop = FakeLoop(five_stages(cpus))
    assert fraction_of_best(loop) < 0.5
    decisions = loop.run(tuner_of(loop.pipeline), seconds=25.0)
    assert fraction_of_best(loop) >= 0.97
    assert sum(d.applied for d in decisions) <= 5
    assert decisions[-1].settled


class TwoCpus(FakeMachine):
    """One for the input, one for the training, whoever is in need of it."""

    trainer_cpus = 1.0

    def read(self) -> Resources:
        return replace(super().read(), cpus=self.cpus - 1.0, trainer_cpus=self.trainer_cpus)


@pytest.mark.parametrize("policy", ["dqn", "model-jump"])
def test_a_training_that_mostly_waits_leaves_its_cpu_to_the_input(policy: str) -> None:
    """Two workers that sleep half of the time were left alone on two CPUs, where eight are twice as fast."""
    reached = {}
    for trainer_cpus in (1.0, 0.0):
        machine = TwoCpus(cpus=2.0)
        machine.trainer_cpus = trainer_cpus
        pipeline = FakePipeline({"load": Work(0.2, cpu_share=0.5)}, machine)
        tuner = tuner_of(pipeline, policy=make_policy(policy))
        FakeLoop(pipeline, model_s=0.02).run(tuner, seconds=25.0)
        reached[trainer_cpus] = pipeline.values["load"]
    assert reached[0.0] <= 3 < 4 <= reached[1.0] <= 6, reached


works = st.builds(
    Work,
    service_s=st.floats(0.02, 0.5),
    cpu_share=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    serial=st.sampled_from([0.0, 0.0, 1.0]),
    cv=st.sampled_from([0.0, 0.3, 0.9]),
    items_per_batch=st.sampled_from([0.25, 1.0, 4.0]),
    workers=st.integers(1, 4),
    window=st.integers(4, 8),
    high=st.just(32),
)


# Without the phase that explains: it traces every line of a thousand virtual batches.
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(
    work=st.lists(works, min_size=1, max_size=5),
    cpus=st.sampled_from([2.0, 4.0, 8.0, 32.0, 64.0]),
    model_s=st.sampled_from([0.0, 0.0, 0.03, 0.3]),
    seed=st.integers(0, 1000),
)
def test_model_jump_gets_near_the_best_of_any_pipeline(
    work: list[Work], cpus: float, model_s: float, seed: int
) -> None:
    pipeline = FakePipeline({f"s{i}": w for i, w in enumerate(work)}, FakeMachine(cpus), seed=seed)
    loop = FakeLoop(pipeline, model_s=model_s, seed=seed)
    found = loop.throughput
    tuner = tuner_of(pipeline)
    while len(loop.decisions) < 40:
        loop.run(tuner, seconds=60.0, until=lambda: len(loop.decisions) >= 40)
    assert tuner.frozen is None
    # Of 400 drawn evenly the mean was .996 and the worst .933; hypothesis looks for worse ones and found .915.
    assert fraction_of_best(loop) >= 0.88
    assert loop.throughput >= 0.95 * found  # what was lost by less than 3 % and noise is kept


def test_model_jump_is_near_the_best_on_average() -> None:
    draw, reached = random.Random(1), []
    for seed in range(40):
        work = {
            f"s{i}": Work(
                draw.uniform(0.02, 0.5), draw.choice([0.05, 0.5, 0.9, 1.0]), draw.choice([0.0, 0.0, 1.0]),
                draw.choice([0.0, 0.3, 0.9]), draw.choice([0.25, 1.0, 4.0]),
                workers=draw.randint(1, 4), window=6, high=32,
            )
            for i in range(draw.randint(1, 5))
        }  # fmt: skip
        loop = FakeLoop(FakePipeline(work, FakeMachine(draw.choice([2.0, 8.0, 32.0])), seed=seed), seed=seed)
        tuner = tuner_of(loop.pipeline)
        while len(loop.decisions) < 40:
            loop.run(tuner, seconds=60.0, until=lambda loop=loop: len(loop.decisions) >= 40)
        reached.append(fraction_of_best(loop))
    assert sum(reached) / len(reached) >= 0.98, sorted(reached)[:5]
    assert min(reached) >= 0.92


def test_model_jump_stops_where_a_lock_makes_workers_useless() -> None:
    pipeline = FakePipeline({"a": Work(0.1, cpu_share=0.2, serial=0.3, workers=2, high=256)}, FakeMachine(cpus=64.0))
    loop = FakeLoop(pipeline)
    loop.run(tuner_of(pipeline), seconds=60.0)
    # 33.3 batches/s with endlessly many workers, of which the 64 CPUs have room for 320.
    assert loop.throughput >= 0.9 * 33.3
    assert pipeline.values["a"] <= 80


def test_model_jump_follows_the_machine_without_a_restart() -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline)
    for number, cpus in enumerate((32.0, 64.0, 32.0)):
        pipeline.machine.cpus = cpus
        decisions = loop.run(tuner, seconds=20.0)
        assert fraction_of_best(loop) >= 0.9
        # A worker counts with the part of a CPU it takes, and here some of them wait.
        assert sum(pipeline.values[name] for name in FIVE) <= 1.2 * busy_limit(cpus, len(FIVE))
        if number:
            assert decisions[0].applied, "the first decision after the resize jumps"


def test_model_jump_leaves_a_compute_bound_loop_alone() -> None:
    pipeline = five_stages(8.0)
    loop = FakeLoop(pipeline, model_s=1.5 / pipeline.supply())
    tuner = tuner_of(pipeline)
    loop.run(tuner, seconds=300.0)
    assert pipeline.resizes == []
    assert loop.decisions[-1].settled


def test_model_jump_does_not_take_workers_from_a_compute_bound_loop_that_has_too_many() -> None:
    pipeline = FakePipeline({"decode": Work(0.1, workers=64, window=256)}, FakeMachine(cpus=8.0))
    loop = FakeLoop(pipeline, model_s=0.05)
    loop.run(tuner_of(pipeline), seconds=60.0)
    assert pipeline.resizes == []


def test_model_jump_feeds_the_model_and_no_more() -> None:
    pipeline = five_stages(64.0, seconds=0.4)
    loop = FakeLoop(pipeline, model_s=0.02)
    loop.run(tuner_of(pipeline), seconds=30.0)
    assert loop.throughput == pytest.approx(50.0)
    # It began with 60 workers, which nobody needs to take away; 50 batches/s need 2 more where it is slowest.
    assert sum(pipeline.values[name] for name in FIVE) <= 64


def test_model_jump_takes_back_what_the_model_got_wrong() -> None:
    """More than eight workers thrash: no fit of a smooth curve sees that coming."""

    class Thrashing(FakePipeline):
        def capacity(self, name: str, values: object) -> float:
            good = super().capacity(name, values)  # type: ignore[arg-type]
            return good * (0.1 if values[name] > 8 else 1.0)  # type: ignore[index]

    pipeline = Thrashing({"read": Work(0.1, cpu_share=0.01, workers=8, window=32)}, FakeMachine(8.0))
    loop = FakeLoop(pipeline)
    decisions = loop.run(tuner_of(pipeline), seconds=20.0)
    assert any(d.after["read"] > 8 for d in decisions)
    assert any("back to the best allocation measured" in d.reason for d in decisions)
    assert pipeline.values["read"] == 8
    assert pipeline.values["read.window"] == 32


def test_model_jump_wakes_on_a_lasting_drop_and_not_on_a_short_one() -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline)
    loop.run(tuner, seconds=15.0)
    heavy = pipeline.work["copy"]
    pipeline.work["copy"] = replace(heavy, service_s=0.3)
    decisions = list(loop.run(tuner, seconds=1.5))
    pipeline.work["copy"] = heavy
    decisions += loop.run(tuner, seconds=10.0)
    assert not any(d.reason.startswith("jump") for d in decisions)
    assert fraction_of_best(loop) >= 0.95

    pipeline.work["copy"] = replace(heavy, service_s=0.3)
    loop.run(tuner, seconds=15.0)
    assert fraction_of_best(loop) >= 0.95


@pytest.mark.parametrize("policy", ["dqn", "model-jump"])
@pytest.mark.parametrize(
    ("stage", "factor", "after_s"), [("copy", 15.0, 22.0), ("copy", 4.0, 60.0), ("read", 8.0, 60.0)]
)
def test_work_that_becomes_many_times_as_heavy_gets_its_workers(
    policy: str, stage: str, factor: float, after_s: float
) -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, make_policy(policy))
    loop.run(tuner, seconds=after_s)
    work = pipeline.work[stage]
    pipeline.work[stage] = replace(work, service_s=factor * work.service_s)
    assert fraction_of_best(loop) < 0.5
    loop.run(tuner, seconds=30.0)
    assert fraction_of_best(loop) >= 0.95


@pytest.mark.parametrize("every_s", [2.0, 4.0])
def test_work_that_goes_to_and_fro_is_not_followed_every_time(every_s: float) -> None:
    pipeline = five_stages(32.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, make_policy("dqn"))
    loop.run(tuner, seconds=30.0)
    light, before = pipeline.work["copy"], len(pipeline.resizes)
    batches, best = 0, 0.0
    for number in range(int(240.0 / every_s)):
        pipeline.work["copy"] = light if number % 2 else replace(light, service_s=4.0 * light.service_s)
        best += every_s * best_static(pipeline)
        batches += sum(decision.observation.batches for decision in loop.run(tuner, seconds=every_s))
    assert len(pipeline.resizes) - before <= 35
    assert batches >= 0.85 * best


def test_model_jump_looks_again_less_and_less_often() -> None:
    pipeline = five_stages(8.0)
    policy = ModelJump()
    FakeLoop(pipeline).run(tuner_of(pipeline, policy), seconds=400.0)
    c = ShellConfig()
    assert policy.state_dict()["shell"]["wait"] == c.longest > c.look


def test_idle_workers_the_user_asked_for_are_left() -> None:
    pipeline = FakePipeline(
        {"decode": Work(0.01, workers=16, window=64, worker_bytes=0.2 * GB)}, FakeMachine(cpus=32.0)
    )
    loop = FakeLoop(pipeline, model_s=0.05)
    loop.run(tuner_of(pipeline), seconds=600.0)
    assert pipeline.resizes == []
    assert loop.throughput == pytest.approx(20.0)


def test_a_batch_every_few_seconds_is_tuned_too() -> None:
    pipeline = FakePipeline({"decode": Work(8.0, workers=1, window=4, items_per_batch=1.0)}, FakeMachine(cpus=8.0))
    loop = FakeLoop(pipeline)
    loop.run(tuner_of(pipeline), seconds=400.0)
    assert fraction_of_best(loop) >= 0.93


# -- the others ----------------------------------------------------------------------------------------------------


def test_even_split_follows_the_size() -> None:
    pipeline = five_stages(10.0)
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, EvenSplit())
    loop.run(tuner, seconds=10.0)
    assert {pipeline.values[name] for name in FIVE} == {2}
    pipeline.machine.cpus = 40.0
    loop.run(tuner, seconds=10.0)
    assert {pipeline.values[name] for name in FIVE} == {8}
    assert {pipeline.values[f"{name}.window"] for name in FIVE} == {16}


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_grows_a_compute_bound_pipeline(name: str) -> None:
    if name == "even":
        pytest.skip("the even split does not look at the load")
    pipeline = five_stages(8.0)
    loop = FakeLoop(pipeline, model_s=2.0 / pipeline.supply())
    loop.run(tuner_of(pipeline, make_policy(name)), 60.0)
    assert pipeline.resizes == []


@pytest.mark.parametrize("name", POLICIES)
def test_state_goes_through_json_and_back(name: str) -> None:
    pipeline = five_stages(8.0)
    policy = make_policy(name)
    FakeLoop(pipeline).run(tuner_of(pipeline, policy), seconds=10.0)
    state = json.loads(json.dumps(policy.state_dict()))
    again = make_policy(name)
    again.load_state_dict(state)
    assert json.loads(json.dumps(again.state_dict())) == state


def test_make_policy_names_the_nearest() -> None:
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(ConfigError, match="did you mean 'model-jump'"):
        make_policy("modeljump")
