"""The loop freezes instead of raising, carries over to a new epoch's pipeline, saves and goes on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from scripted import Script, starved, tuner_of

from intune_callbacks.decide.policies import make_policy
from intune_callbacks.record.history import History
from intune_callbacks.types import Allocation, Observation, PipelineStats, Proposal, Stage

# -- faults ------------------------------------------------------------------------------------------------------------


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


# -- epochs and checkpoints --------------------------------------------------------------------------------------------


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
