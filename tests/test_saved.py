"""What a run leaves for the next one, and what the next one makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work, best_static
from saved_runs import BATCH, Script, edit, line_of, refused, run, save, started, three_stages, tuner_of

from intune_callbacks.config import POLICIES
from intune_callbacks.session.found import parse_found
from intune_callbacks.types import Observation, Proposal

# -- what is written ---------------------------------------------------------------------------------------------------


def test_found_yaml_says_what_was_found_and_where(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    loop = run(tmp_path / "x", three_stages())
    text = (tmp_path / "x" / "found.yaml").read_text()
    found = yaml.safe_load(text)
    assert found == parse_found(text)
    assert text.startswith("# What InTune found") and f'warm_start="{tmp_path}/x"' in text
    values = {name: entry["value"] for name, entry in found["allocation"].items()}
    assert values == loop.pipeline.values
    assert found["allocation"]["decode.window"] | {"value": 0} == {"value": 0, "unit": "items", "before": 20}
    assert found["settled"] is True and found["started_from"] is None
    assert found["after"]["throughput_samples_per_s"] == pytest.approx(BATCH * loop.throughput, rel=0.1)
    assert found["after"]["throughput_samples_per_s"] > 1.5 * found["before"]["throughput_samples_per_s"]
    assert found["fingerprint"]["versions"] == {"intune_callbacks": "0.1", "torch": "2.13"}
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == ["found.yaml", "state.json"]


def test_a_run_that_ends_on_a_trial_keeps_the_best_it_measured(tmp_path: Path) -> None:
    good = {"decode": 8, "decode.window": 64}
    pipeline = FakePipeline({"decode": Work(0.1)}, FakeMachine(), depth=2)
    run(tmp_path, pipeline, 30.0, Script({}, good, {}, {}, {}, {"decode": 2}, {}, {"decode": 3}, {}))
    found = parse_found((tmp_path / "found.yaml").read_text())
    assert found["allocation"]["decode"]["value"] == 8 and found["settled"] is False
    assert found["after"]["throughput_samples_per_s"] > 2000
    again = FakePipeline({"decode": Work(0.1)}, FakeMachine(), depth=2)
    assert started(tmp_path, tuner_of(again, Script()))["used"]
    assert again.values["decode"] == 8


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_a_run_that_changed_nothing_on_purpose_leaves_nothing(tmp_path: Path, mode: str) -> None:
    run(tmp_path, three_stages(), mode=mode)
    assert list(tmp_path.iterdir()) == []


def test_a_run_too_short_to_be_measured_does_not_replace_another(copied: Path) -> None:
    before = (copied / "found.yaml").read_bytes()
    run(copied, three_stages(), 0.1)
    assert (copied / "found.yaml").read_bytes() == before


def test_a_frozen_run_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Script):
        def decide(self, observation: Observation) -> Proposal:
            if observation.step > 200:
                raise ZeroDivisionError
            return Proposal()

    with pytest.warns(RuntimeWarning, match="InTune froze"):
        run(tmp_path, three_stages(), 20.0, Broken())
    assert list(tmp_path.iterdir()) == []


# -- a start from it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warm_start_is_where_the_run_before_ended(tmp_path: Path, policy: str) -> None:
    before = run(tmp_path, three_stages(), policy=policy)
    again = FakeLoop(three_stages())
    cold = again.throughput
    tuner = tuner_of(again.pipeline, policy=policy)
    assert started(tmp_path, tuner) | {"from": ""} == {"from": "", "used": True, "why": "the fingerprint is the same"}
    assert again.pipeline.values == before.pipeline.values
    assert again.throughput >= 0.95 * before.throughput, "before the first decision"
    assert policy == "even" or again.throughput > 1.3 * cold
    for decision in again.run(tuner, 12.0):
        assert decision.after == decision.before, decision.reason
        assert again.throughput >= 0.95 * before.throughput


@pytest.mark.parametrize("policy", ["dqn", "model-jump"])
def test_what_was_held_is_held(saved: Path, tmp_path: Path, policy: str) -> None:
    run(tmp_path, three_stages(), policy=policy)
    loop = FakeLoop(three_stages())
    tuner = tuner_of(loop.pipeline, policy=policy)
    assert started(tmp_path, tuner)["used"]
    decisions = loop.run(tuner, 20.0)
    asked = [d for d in decisions if not d.reason.startswith("only measuring")]
    assert len(asked) > 10
    assert all(d.settled and d.reason.startswith("holding") and not d.proposed for d in asked)
    # The cold start measures, jumps and moves.
    cold = FakeLoop(three_stages())
    assert sum(d.applied for d in cold.run(tuner_of(cold.pipeline, policy=policy), 20.0)) >= 1


def test_a_short_run_goes_on_where_it_was_without_halving_the_workers_again(tmp_path: Path) -> None:
    before = run(tmp_path, three_stages(), 8.0)
    assert parse_found((tmp_path / "found.yaml").read_text())["settled"] is False
    again = FakeLoop(three_stages())
    tuner = tuner_of(again.pipeline)
    assert started(tmp_path, tuner)["used"]
    reasons = []
    for decision in again.run(tuner, 60.0):
        reasons.append(decision.reason)
        assert again.throughput >= 0.9 * before.throughput, decision.reason
    assert not any(reason.startswith("fewer workers") for reason in reasons)
    assert any(reason.startswith("holding") for reason in reasons)


def test_a_held_allocation_that_is_not_as_fast_any_more_is_left(tmp_path: Path) -> None:
    run(tmp_path, three_stages())
    slower = three_stages()
    slower.work["read"] = replace(slower.work["read"], service_s=0.1)
    loop = FakeLoop(slower)
    tuner = tuner_of(slower)
    assert started(tmp_path, tuner)["used"]
    held = loop.throughput
    loop.run(tuner, 60.0)
    assert loop.throughput > 1.3 * held
    assert loop.throughput > 0.85 * best_static(slower)


def test_a_state_of_another_machine_is_learned_anew() -> None:
    big = FakeLoop(three_stages(64.0))
    tuner = tuner_of(big.pipeline)
    big.run(tuner, 60.0)
    small = FakeLoop(three_stages(16.0))
    resumed = tuner_of(small.pipeline)
    resumed.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert any(d.reason.startswith("jump") for d in small.run(resumed, 8.0)), "not what another machine held"
    small.run(resumed, 60.0)
    assert small.throughput >= 0.88 * best_static(small.pipeline)


def test_what_was_only_advised_is_not_held() -> None:
    loop = FakeLoop(three_stages())
    advised = tuner_of(loop.pipeline, mode="advise")
    loop.run(advised, 60.0)
    again = FakeLoop(three_stages())
    tuner = tuner_of(again.pipeline)
    tuner.load_state_dict(advised.state_dict())
    again.run(tuner, 15.0)
    assert again.throughput > 1.3 * loop.throughput


def test_a_second_warm_start_follows_the_first(tmp_path: Path) -> None:
    run(tmp_path / "a", three_stages())
    loop = FakeLoop(three_stages())
    tuner = tuner_of(loop.pipeline)
    assert started(tmp_path / "a", tuner)["used"]
    loop.run(tuner, 5.0)
    tuner.close()
    save(tmp_path / "b", tuner, started_from=str(tmp_path / "a"))
    third = three_stages()
    assert started(tmp_path / "b" / "found.yaml", tuner_of(third))["used"]
    assert third.values == loop.pipeline.values
    assert parse_found((tmp_path / "b" / "found.yaml").read_text())["started_from"] == str(tmp_path / "a")


# -- edited by hand ----------------------------------------------------------------------------------------------------


def test_an_edited_value_counts_as_far_as_the_machine_allows(copied: Path) -> None:
    edit(copied, (line_of(copied, "read"), '\n    # by hand\n  "read":  7,'))
    pipeline = three_stages()
    assert started(copied, tuner_of(pipeline))["used"]
    assert pipeline.values["read"] == 7
    edit(copied, ('"read":  7', '"read": 120'))
    pipeline = three_stages()
    entry = started(copied, tuner_of(pipeline))
    assert entry["used"] and pipeline.values["read"] < 100
    assert f"the machine allows read {pipeline.values['read']}" in entry["why"]


def test_an_edit_that_is_slower_is_taken_back_at_once(copied: Path) -> None:
    edit(copied, (line_of(copied, "decode"), '"decode": 9,'))
    known = FakeLoop(three_stages())
    tuner = tuner_of(known.pipeline)
    assert started(copied, tuner)["used"]
    slow = known.throughput
    known.run(tuner, 5.0)
    assert known.throughput > 2.0 * slow


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('"raed": {"value": 3},', "allocation: there is no stage 'raed'"),
        ('"read": "many",', "allocation: 'read' is 'many', expected a whole number"),
        ('"read": -1,', "allocation: 'read' is -1, expected a whole number"),
        ('"read": 2.5,', "allocation: 'read' is 2.5, expected a whole number"),
        ('"read": [1,', "found.yaml cannot be read: Expecting ',' delimiter: line 15"),
        ('"decode": 4,', "found.yaml cannot be read: 'decode' is there twice"),
    ],
)
def test_a_wrong_value_is_named(copied: Path, line: str, why: str) -> None:
    edit(copied, (line_of(copied, "read"), line))
    assert why in refused(copied, tuner_of(three_stages()))
