"""The loop: when it decides, what it records, that it freezes instead of raising, that it carries over and saves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import POLICIES, TunerConfig
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.record.history import History
from intune_callbacks.tuner import Tuner
from intune_callbacks.types import Allocation, Observation, PipelineStats, Proposal, Stage


class Script:
    """Proposes what it was given, in turn, then nothing."""

    name = "script"

    def __init__(self, *allocations: Allocation) -> None:
        self.allocations = list(allocations)
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> Proposal:
        self.seen.append(observation)
        if not self.allocations:
            return Proposal(reason="nothing left", settled=True)
        return Proposal(self.allocations.pop(0), "as scripted")

    def state_dict(self) -> dict[str, Any]:
        return {"left": len(self.allocations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.allocations = self.allocations[: state["left"]]


def starved(**machine: float) -> FakePipeline:
    """One worker where eight could work: 10 batches/s instead of 80."""
    return FakePipeline({"decode": Work(0.1, cv=0.2)}, FakeMachine(**machine), depth=2)  # type: ignore[arg-type]


def tuner_of(pipeline: FakePipeline, history: History | None = None, policy: Any = None, **config: Any) -> Tuner:
    machine = pipeline.machine
    return Tuner(pipeline, TunerConfig(**config), policy=policy, probe=machine, clock=machine.clock(), history=history)


# -- the loop ------------------------------------------------------------------------------------------------------


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


# -- faults --------------------------------------------------------------------------------------------------------


class Breaks(FakePipeline):
    """Raises in one of its methods from a moment on."""

    broken = ""

    def stats(self) -> PipelineStats:
        self._maybe("stats")
        return super().stats()

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        self._maybe("resize")
        return super().resize(allocation)

    def _maybe(self, where: str) -> None:
        if self.broken == where:
            raise OSError(f"no more {where}")


@pytest.mark.parametrize("where", ["stats", "resize"])
def test_a_broken_pipeline_freezes_the_tuner_once(where: str) -> None:
    pipeline = Breaks({"decode": Work(0.1)}, FakeMachine())
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline)
    pipeline.broken = where
    with pytest.warns(RuntimeWarning, match="^InTune froze") as caught:
        loop.run(tuner, seconds=20.0)
    assert len(caught) == 1
    assert tuner.frozen == f"OSError: no more {where}"
    pipeline.broken = ""
    steps = loop.totals.steps
    assert loop.run(tuner, seconds=20.0) == []
    assert loop.totals.steps > steps, "training goes on"
    assert pipeline.resizes == []
    assert tuner.summary().frozen == tuner.frozen


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), RuntimeError("oops"), RecursionError()])
def test_a_broken_policy_freezes_the_last_good_allocation(error: Exception) -> None:
    class Broken(Script):
        def decide(self, observation: Observation) -> Proposal:
            if not self.allocations:
                raise error
            return super().decide(observation)

    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Broken({"decode": 4}))
    with pytest.warns(RuntimeWarning, match="InTune froze, training goes on"):
        loop.run(tuner, seconds=10.0)
    assert loop.pipeline.values["decode"] == 4
    assert tuner.frozen is not None
    assert tuner.frozen.startswith(type(error).__name__)


def test_a_full_disk_freezes_and_nothing_is_lost_from_memory() -> None:
    class FullDisk(History):
        def add(self, decision: Any) -> None:
            super().add(decision)
            raise OSError(28, "No space left on device")

    history = FullDisk()
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, history)
    with pytest.warns(RuntimeWarning, match="No space left"):
        loop.run(tuner, seconds=10.0)
    assert len(history.decisions) == 1
    tuner.close()  # says nothing a second time


def test_what_could_not_be_started_is_said_with_the_decision() -> None:
    class NoMoreProcesses(FakePipeline):
        why_not = ""

        def resize(self, allocation: Mapping[str, int]) -> Allocation:
            self.why_not = "BlockingIOError: Resource temporarily unavailable"
            return super().resize({name: min(value, 2) for name, value in allocation.items()})

    pipeline = NoMoreProcesses({"decode": Work(0.1)}, FakeMachine())
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, policy=Script({"decode": 6, "decode.window": 12}))
    (decision,) = [d for d in loop.run(tuner, seconds=10.0) if d.applied]
    assert decision.after["decode"] == 2
    assert decision.vetoes[-1] == "not all of it is in force: BlockingIOError: Resource temporarily unavailable"


def test_a_stage_that_is_the_users_to_change_is_measured_and_never_moved() -> None:
    class LeftAlone(FakePipeline):
        def stages(self) -> tuple[Stage, ...]:
            return tuple(replace(stage, when="user") for stage in super().stages())

    for policy in ("dqn", "model-jump", "even"):
        pipeline = LeftAlone({"decode": Work(0.1)}, FakeMachine())
        loop = FakeLoop(pipeline)
        decisions = loop.run(tuner := tuner_of(pipeline, policy=make_policy(policy)), seconds=30.0)
        assert len(decisions) > 10 and pipeline.resizes == [], policy
        assert tuner.frozen is None
        assert not any(decision.proposed for decision in decisions)


def test_nothing_is_raised_where_warnings_are_errors() -> None:
    pipeline = Breaks({"decode": Work(0.1)}, FakeMachine())
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline)
    pipeline.broken = "stats"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(tuner, seconds=10.0)
    assert tuner.frozen is not None


def test_a_keyboard_interrupt_is_not_an_internal_error() -> None:
    class Interrupted(Script):
        def decide(self, observation: Observation) -> Proposal:
            raise KeyboardInterrupt

    loop = FakeLoop(starved())
    with pytest.raises(KeyboardInterrupt):
        loop.run(tuner_of(loop.pipeline, policy=Interrupted()), seconds=10.0)


# -- epochs and checkpoints ----------------------------------------------------------------------------------------


def test_a_new_epochs_pipeline_gets_the_tuned_allocation() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script({"decode": 5, "decode.window": 20}))
    loop.run(tuner, seconds=5.0)
    fresh = FakePipeline({"decode": Work(0.1), "other": Work(0.1)}, loop.pipeline.machine)
    tuner.rebind(fresh)
    assert (fresh.values["decode"], fresh.values["decode.window"], fresh.values["other"]) == (5, 20, 1)
    loop.pipeline = fresh
    assert loop.run(tuner, seconds=5.0)[0].before["decode"] == 5


def test_loaders_that_are_new_in_each_short_epoch_are_tuned_and_their_own_counters_judged() -> None:
    """As with `reload_dataloaders_every_n_epochs=1`: an epoch here is shorter than a window."""
    loop, script = FakeLoop(starved()), Script({}, {}, {"decode": 4, "decode.window": 16})
    tuner, decisions = tuner_of(loop.pipeline, policy=script), []
    for _ in range(12):
        decisions += loop.run(tuner, seconds=0.9)
        fresh = FakePipeline({"decode": Work(0.1, cv=0.2)}, loop.pipeline.machine, depth=2)
        tuner.rebind(fresh)
        loop.pipeline = fresh
    assert any(decision.applied for decision in decisions) and loop.pipeline.values["decode"] == 4
    first = decisions[0].observation
    assert first.elapsed_s >= 1.0 and first.batches_per_s == pytest.approx(10.0, rel=0.2)
    for decision in decisions[:2]:
        assert decision.observation.rates["decode"].service_s == pytest.approx(0.1, rel=0.3)
        assert decision.observation.rates["decode"].items_per_batch == pytest.approx(1.0, abs=0.5)


def test_a_pipeline_that_was_never_changed_is_not_touched_at_an_epoch() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script())
    loop.run(tuner, seconds=5.0)
    fresh = FakePipeline({"decode": Work(0.1, workers=3)}, loop.pipeline.machine)
    tuner.rebind(fresh)
    assert fresh.resizes == []


def test_a_pipeline_that_breaks_at_an_epoch_freezes_the_tuner() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script({"decode": 5}))
    loop.run(tuner, seconds=5.0)
    broken = Breaks({"decode": Work(0.1)}, loop.pipeline.machine)
    broken.broken = "resize"
    with pytest.warns(RuntimeWarning, match="InTune froze"):
        tuner.rebind(broken)


def test_a_checkpoint_brings_allocation_policy_and_history_back() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline)
    loop.run(tuner, seconds=15.0)
    state = json.loads(json.dumps(tuner.state_dict()))
    tuned = dict(loop.pipeline.values)

    again = FakeLoop(starved())
    resumed = tuner_of(again.pipeline)
    resumed.load_state_dict(state)
    assert again.pipeline.values == tuned
    assert resumed.state_dict()["history"] == state["history"]
    assert resumed.state_dict()["policy"] == state["policy"]
    assert resumed.state_dict()["allocation"] == tuned
    assert len(state["history"]) <= 20


def test_a_checkpoint_of_a_bigger_machine_is_cut_to_this_one() -> None:
    big = FakeLoop(starved(cpus=32.0))
    tuner = tuner_of(big.pipeline)
    big.run(tuner, seconds=15.0)
    assert big.pipeline.values["decode"] > 20
    small = starved(cpus=4.0)
    tuner_of(small).load_state_dict(tuner.state_dict())
    assert 4 <= small.values["decode"] <= 5


def test_a_run_without_changes_saves_no_allocation() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script())
    loop.run(tuner, seconds=5.0)
    assert tuner.state_dict()["allocation"] == {}
    assert tuner_of(starved()).state_dict()["allocation"] == {}, "also before the first decision"


@pytest.mark.parametrize("state", [{}, {"guard": 3}, {"guard": {}, "policy": {}, "history": [], "allocation": {}}])
def test_a_state_that_does_not_fit_is_a_warning(state: dict[str, Any]) -> None:
    pipeline = starved()
    with pytest.warns(RuntimeWarning, match="could not restore its state and starts anew"):
        tuner_of(pipeline).load_state_dict(state)
    assert pipeline.resizes == []


def test_another_policys_state_is_left_alone() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script({"decode": 3}))
    loop.run(tuner, seconds=5.0)
    fresh = starved()
    tuner_of(fresh).load_state_dict(tuner.state_dict())
    assert fresh.values["decode"] == 3


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
