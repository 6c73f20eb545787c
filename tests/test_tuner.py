"""The loop: when it decides, what it records, and what it never does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work
from scripted import Script, starved, tuner_of

from intune_callbacks.config import POLICIES, TunerConfig
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.record.history import History
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation, PipelineStats


@pytest.mark.parametrize(("policy", "settles_in_s"), [("model-jump", 15.0), ("dqn", 20.0)])
def test_a_starved_run_is_fed(policy: str, settles_in_s: float) -> None:
    loop = FakeLoop(starved(), model_s=0.02)
    tuner = tuner_of(loop.pipeline, policy=make_policy(policy))
    loop.run(tuner, seconds=20.0)
    summary = tuner.summary()
    assert summary.before.verdict == "input-bound"
    assert summary.before.stage == "decode"
    assert summary.before.wait_frac == pytest.approx(0.8, abs=0.02)
    assert summary.before.throughput_samples_per_s == pytest.approx(320, rel=0.05)
    assert summary.after.verdict == "compute-bound"
    assert summary.after.throughput_samples_per_s == pytest.approx(1600, rel=0.02)
    assert summary.before.allocation["decode"] == 1
    assert summary.after.allocation == loop.pipeline.values
    assert summary.changes >= 1
    assert 0.0 < summary.settled_after_s < settles_in_s
    assert summary.frozen is None


def test_a_change_at_the_very_end_leaves_the_figures_of_the_one_before() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script({"decode": 2}, {"decode": 4}))
    loop.run(tuner, seconds=60.0, until=lambda: sum(decision.applied for decision in loop.decisions) == 1)
    assert tuner.summary().after.windows == 0
    loop.run(tuner, seconds=60.0, until=lambda: sum(decision.applied for decision in loop.decisions) == 2)
    summary = tuner.summary()
    assert summary.changes == 2
    assert (summary.after.windows, summary.after.allocation["decode"]) == (1, 2)
    assert summary.after.throughput_samples_per_s > 1.5 * summary.before.throughput_samples_per_s


def test_the_effect_of_a_decision_is_measured_at_the_next_one() -> None:
    history = History()
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, history, Script({"decode": 4, "decode.window": 16}))
    first, second = loop.run(tuner, seconds=8.0)[:2]
    assert first.applied
    assert first.effect is None
    assert (first.before["decode"], first.after["decode"]) == (1, 4)
    assert first.resize_s == pytest.approx(1e-4)
    written = history.decisions[0]
    assert written.effect == pytest.approx(second.observation.samples_per_s / first.observation.samples_per_s)
    assert written.effect == pytest.approx(4.0, rel=0.1)


def test_pauses_are_nobodys_time() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script())
    loop.run(tuner, seconds=6.0)
    t = loop.totals
    loop.totals = StepTotals(t.steps, t.wait_s, t.model_s, t.paused_s + 100.0, t.wall_s + 100.0)
    decisions = loop.run(tuner, seconds=3.0)
    assert decisions[0].observation.elapsed_s < 1.5
    assert decisions[0].observation.batches_per_s == pytest.approx(10.0, rel=0.1)


def test_batches_that_were_ready_before_a_resize_are_not_judged() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script({"decode": 8, "decode.window": 64}))
    first, second = loop.run(tuner, seconds=8.0)[:2]
    judged_from = second.observation.step - second.observation.batches
    assert judged_from - first.observation.step >= 10


def test_a_policy_sees_max_workers_as_the_stages_limit() -> None:
    loop = FakeLoop(starved())
    script = Script()
    loop.run(tuner_of(loop.pipeline, policy=script, max_workers=3), seconds=5.0)
    assert {s.high for s in script.seen[0].stages if s.unit == "workers"} == {3}


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_observe_and_advise_never_resize(mode: str) -> None:
    loop = FakeLoop(starved(), model_s=0.02)
    tuner = tuner_of(loop.pipeline, mode=mode)
    decisions = loop.run(tuner, seconds=30.0)
    tuner.rebind(loop.pipeline)
    tuner.load_state_dict(tuner.state_dict() | {"allocation": {"decode": 7}})
    assert loop.pipeline.resizes == []
    assert not any(d.applied for d in decisions)
    advice = [d.granted for d in decisions if d.granted]
    assert bool(advice) is (mode == "advise")
    if advice:
        assert advice[0]["decode"] >= 5
    assert tuner.summary().changes == 0


def test_a_veto_is_recorded_with_its_numbers() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script({"decode": 60}))
    decision = loop.run(tuner, seconds=5.0)[0]
    assert decision.proposed == {"decode": 60}
    assert decision.after["decode"] == 10
    assert "60.0 busy CPUs asked" in decision.vetoes[0]


def test_a_memory_alarm_comes_before_the_policy() -> None:
    pipeline = FakePipeline(
        {"decode": Work(0.1, item_bytes=0.1 * GB, workers=8, window=64)}, FakeMachine(memory_limit_bytes=10 * GB)
    )
    loop = FakeLoop(pipeline, model_s=0.1)  # the model is slow, the window is full: 6.4 GB of batches
    script = Script()
    tuner = tuner_of(pipeline, policy=script)
    loop.run(tuner, seconds=5.0)
    assert pipeline.resizes == []
    pipeline.machine.memory_used_bytes = 3 * GB
    seen = len(script.seen)
    decision = loop.run(tuner, seconds=1.2)[0]
    assert "memory alarm: 9.40 of 10.00 GB" in decision.reason
    assert pipeline.values["decode.window"] == 8
    assert len(script.seen) == seen
    loop.run(tuner, seconds=10.0)
    assert pipeline.machine.read().memory_used_bytes < 9 * GB
    assert pipeline.values["decode.window"] == 8


def test_what_a_memory_alarm_took_comes_back_with_the_memory() -> None:
    pipeline = FakePipeline(
        {"decode": Work(0.1, item_bytes=0.1 * GB, workers=8, window=64)}, FakeMachine(memory_limit_bytes=10 * GB)
    )
    loop, own = FakeLoop(pipeline, model_s=0.1), dict(pipeline.values)
    tuner = tuner_of(pipeline, policy=Script())
    loop.run(tuner, seconds=5.0)
    pipeline.machine.memory_used_bytes = int(9.5 * GB)  # somebody else takes it
    loop.run(tuner, seconds=20.0)
    assert pipeline.values["decode"] < own["decode"]
    pipeline.machine.memory_used_bytes = 1 * GB
    (restored,) = [decision for decision in loop.run(tuner, seconds=20.0) if decision.applied]
    assert restored.reason == "memory is there again: back to the numbers of the start"
    assert pipeline.values == own
    assert tuner.best == own, "not what the alarm left"


@pytest.mark.parametrize("policy", ["model-jump", "dqn"])
def test_memory_is_never_planned_beyond_the_soft_limit(policy: str) -> None:
    work = Work(0.5, cv=0.9, item_bytes=0.2 * GB, worker_bytes=0.1 * GB, workers=2, window=4)
    pipeline = FakePipeline({"decode": work}, FakeMachine(cpus=32.0, memory_limit_bytes=10 * GB))
    loop = FakeLoop(pipeline, model_s=0.001)
    decisions = loop.run(tuner_of(pipeline, policy=make_policy(policy)), seconds=60.0)
    assert not [veto for d in decisions for veto in d.vetoes if "GB needed" in veto], "they know the limit"
    full = pipeline.values["decode.window"] * work.item_bytes + pipeline.values["decode"] * work.worker_bytes
    assert 1 * GB + full <= 9 * GB
    assert loop.throughput > 6.0  # four of the start; memory, not the policy, is the limit


def test_the_default_policy_plans_with_the_limit_it_was_given() -> None:
    work = Work(0.5, cv=0.9, item_bytes=0.2 * GB, worker_bytes=0.1 * GB, workers=2, window=4)
    pipeline = FakePipeline({"decode": work}, FakeMachine(cpus=32.0, memory_limit_bytes=10 * GB))
    tuner = tuner_of(pipeline, memory_soft_limit=0.5)
    decisions = FakeLoop(pipeline, model_s=0.001).run(tuner, seconds=60.0)
    # What the net tries between two of the policy's allocations, neither it nor the policy has planned.
    planned = [d for d in decisions if not d.reason.startswith("half as far")]
    assert len(planned) > 20 and not [veto for d in planned for veto in d.vetoes if "GB needed" in veto]
    full = pipeline.values["decode.window"] * work.item_bytes + pipeline.values["decode"] * work.worker_bytes
    assert 3 * GB < 1 * GB + full <= 5 * GB


def test_summary_is_plain_json_at_any_moment(tmp_path: Path) -> None:
    loop = FakeLoop(starved(), model_s=0.02)
    tuner = tuner_of(loop.pipeline, History(tmp_path / "history.jsonl"))
    for seconds in (0.0, 3.0, 10.0):
        loop.run(tuner, seconds=seconds)
        json.dumps(tuner.summary().to_json(), allow_nan=False)
        json.dumps(tuner.state_dict(), allow_nan=False)
    tuner.close()
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert len(lines) == len(loop.decisions)


def test_an_empty_pipeline_is_measured_and_left() -> None:
    loop = FakeLoop(starved(), model_s=0.05)

    class Nothing:
        def stages(self) -> tuple[()]:
            return ()

        def stats(self) -> PipelineStats:
            return replace(loop.pipeline.stats(), stages={})

        def resize(self, allocation: Mapping[str, int]) -> Allocation:
            raise AssertionError("nothing to resize")

        def close(self) -> None: ...

    machine = loop.pipeline.machine
    for name in POLICIES:
        tuner = Tuner(Nothing(), TunerConfig(policy=name), probe=machine, clock=machine.clock())
        loop.run(tuner, seconds=10.0)
        assert tuner.frozen is None
        assert tuner.summary().after.verdict == "input-bound"
