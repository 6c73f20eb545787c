"""The DQN as a policy: what it says and keeps, that it survives any measurement, and how to get one."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from agent_runs import COSTS_S, decided, three_stages
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work, best_static
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from policy_runs import five_stages
from views import a_network

from intune_callbacks.config import TunerConfig
from intune_callbacks.decide.dqn import Dqn
from intune_callbacks.decide.network import Network
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.errors import ConfigError, MissingPackage
from intune_callbacks.types import Observation, Resources, StageRates

# -- the policy --------------------------------------------------------------------------------------------------------


def test_is_deterministic() -> None:
    one, two = (decided(Dqn(a_network(1)), FakeLoop(three_stages()), 40) for _ in range(2))
    assert one == two and any(proposal.allocation for proposal in one)


def test_first_looks_then_says_so() -> None:
    loop = FakeLoop(three_stages())
    rare = replace(seen := loop.observe(), rates={n: replace(r, items=1) for n, r in seen.rates.items()})
    policy = Dqn(a_network())
    assert policy.decide(seen).allocation == {}
    proposal = Dqn(a_network()).decide(replace(rare, elapsed_s=10.0))
    assert proposal.allocation == {} and "too few items" in proposal.reason


@pytest.mark.parametrize(("window_s", "windows"), [(1.0, 2), (3.0, 1)])
def test_the_first_jump_comes_after_two_windows_or_a_long_one(window_s: float, windows: int) -> None:
    seen = replace(FakeLoop(three_stages()).observe(), elapsed_s=window_s)
    policy = Dqn(a_network())
    proposals = [policy.decide(seen) for _ in range(windows)]
    assert proposals[-1].allocation and proposals[-1].reason.startswith("jump to the fitted allocation")
    assert not any(proposal.allocation for proposal in proposals[:-1]), "nothing is changed meanwhile, no window either"


@pytest.mark.parametrize(
    ("changes", "is_enough"),
    [
        ({}, True),
        ({"service_cv": 0.6}, False),
        ({"items": 40, "stored": -8}, False),
        ({"items": 40, "stored": 3}, True),
    ],
)
def test_a_short_first_window_is_enough_where_it_is_steady(changes: dict[str, Any], is_enough: bool) -> None:
    """The first epoch of a stranger's benchmark was over in six seconds; the second window took one and a half."""
    seen = FakeLoop(three_stages()).observe()
    even = {name: replace(rates, items=20, stored=0, service_cv=0.05) for name, rates in seen.rates.items()}
    last = next(reversed(even))
    proposal = Dqn(a_network()).decide(replace(seen, rates=even | {last: replace(even[last], **changes)}))
    assert bool(proposal.allocation) == is_enough, proposal.reason


def test_a_first_window_that_emptied_the_buffers_starves_no_stage() -> None:
    """Behind a slow item the line delivers what was made before: the second window tells what a batch takes."""
    wanted = []
    for share in (1.0, 0.2):
        policy, loop = Dqn(), FakeLoop(three_stages())
        first = loop.observe()
        rates = first.rates["decode"]
        few = replace(rates, items=int(share * rates.items), items_per_batch=share * rates.items_per_batch)
        policy.decide(replace(first, rates={**first.rates, "decode": few}))
        wanted.append(policy.decide(loop.observe()).allocation["decode"])
    assert wanted[1] >= 0.7 * wanted[0]  # half of them while the first window alone told the items of a batch


def test_reasons_are_plain_sentences() -> None:
    names = set(COSTS_S) | {"prefetch"}
    for proposal in decided(Dqn(a_network(1)), FakeLoop(three_stages(depth=4)), 50):
        reason = proposal.reason
        assert 5 < len(reason) < 200 and "\n" not in reason and reason[0].islower(), reason
        assert not any(word in reason for word in ("nan", "array", "None", "[", "{", "np.")), reason
        moved = set(proposal.allocation) & names
        assert not moved or all(name in reason for name in moved), (reason, moved)


def test_reasons_name_each_phase() -> None:
    reasons = [p.reason for p in decided(Dqn(a_network(2)), FakeLoop(three_stages()), 50)]
    assert reasons[0].startswith("measuring")
    for beginning in ("jump to the fitted allocation", "move: ", "holding the best allocation measured"):
        assert any(reason.startswith(beginning) for reason in reasons), beginning


def test_settled_means_holding() -> None:
    policy, loop = Dqn(a_network(1)), FakeLoop(three_stages())
    proposals = decided(policy, loop, 70)
    assert all(p.settled == p.reason.startswith("holding") for p in proposals)
    assert sum(p.settled for p in proposals[-25:]) > 10


def test_other_stages_begin_anew() -> None:
    policy, loop = Dqn(a_network(1)), FakeLoop(three_stages())
    assert any(proposal.settled for proposal in decided(policy, loop, 70)[45:])
    other = FakeLoop(FakePipeline({"read": Work(0.05, workers=8), "decode": Work(0.3, workers=8)}, FakeMachine(16.0)))
    again = decided(policy, other, 14)
    assert not any(p.settled for p in again[:4])
    assert any(p.reason.startswith("jump") for p in again[:5])
    assert all(set(p.allocation) <= {"read", "read.window", "decode", "decode.window"} for p in again)
    assert other.throughput >= 0.8 * best_static(other.pipeline)


def test_workers_that_mostly_wait_leave_the_training_loop_its_cpu() -> None:
    """One CPU, and workers that take .07 of it: one more for rounding is .07 of a CPU, not a whole one."""
    pipeline = FakePipeline({"load": Work(1.4, cpu_share=0.07, workers=4, high=64)}, FakeMachine(1.0))
    proposals = decided(Dqn(), loop := FakeLoop(pipeline), 40)
    assert loop.throughput > 2.5 * 4 / 1.4
    assert max([p.allocation.get("load", 0) for p in proposals]) <= 17


def test_what_is_there_already_is_not_given_up_for_the_training_loop() -> None:
    pipeline = FakePipeline({"load": Work(1.4, cpu_share=0.07, workers=24, high=64)}, FakeMachine(1.0))
    assert all(p.allocation.get("load", 24) >= 24 for p in decided(Dqn(), FakeLoop(pipeline), 20))


def test_state_survives_json_and_spares_the_first_look() -> None:
    old, loop = Dqn(a_network(1)), FakeLoop(three_stages())
    decided(old, loop, 30)
    state = json.loads(json.dumps(old.state_dict(), allow_nan=False))
    new = Dqn(a_network(1))
    new.load_state_dict(state)
    assert new.state_dict() == old.state_dict()
    seen = loop.observe()
    rare = replace(seen, rates={n: replace(r, items=1) for n, r in seen.rates.items()})
    assert "too few items" not in new.decide(replace(rare, elapsed_s=10.0)).reason
    # Crowded or not, the CPUs of a busy worker are known from before.
    assert new.state_dict()["shares"]["warm"] == old.state_dict()["shares"]["warm"]


def test_a_stage_without_a_window_and_a_free_buffer() -> None:
    class Bare(FakePipeline):
        def stages(self) -> Any:
            return tuple(s for s in super().stages() if s.name != "decode.window")

    costs = {n: Work(s, workers=10, window=512 if n == "decode" else 20, high=128) for n, s in COSTS_S.items()}
    loop = FakeLoop(pipeline := Bare(costs, FakeMachine(32.0), depth=2))
    before = loop.throughput
    proposals = decided(Dqn(), loop, 40)
    assert loop.throughput > 1.3 * before
    assert not any("decode.window" in p.allocation for p in proposals)
    # Sixteen batches are asked for when jumping.
    assert pipeline.values["prefetch"] > 2


def test_memory_is_left_alone_where_it_is_short() -> None:
    loop = FakeLoop(pipeline := three_stages(worker_bytes=1.0 * GB))
    pipeline.machine.memory_limit_bytes = 40 * GB
    pipeline.machine.memory_used_bytes = 4 * GB
    for _ in range(40):
        decided(Dqn(), loop, 1)
        assert pipeline.machine.read().memory_used_bytes <= 0.92 * 40 * GB


# -- any measurement ---------------------------------------------------------------------------------------------------

ODD = st.sampled_from([0.0, -1.0, 1e-9, 1e9, math.inf, math.nan])
OF_RATES = [f.name for f in fields(StageRates) if f.name != "items"]
OF_OBSERVATION = ["elapsed_s", "batches_per_s", "samples_per_s", "wait_frac", "model_s", "at_s"]


@st.composite
def odd_observations(draw: Any) -> Observation:
    seen = FakeLoop(three_stages(depth=4)).observe()
    wrong = draw(st.dictionaries(st.sampled_from(OF_OBSERVATION), ODD, max_size=3))
    rates = {}
    for name, r in seen.rates.items():
        rates[name] = replace(r, **draw(st.dictionaries(st.sampled_from(OF_RATES), ODD, max_size=3)))
        if draw(st.booleans()):
            rates[name] = replace(rates[name], items=draw(st.sampled_from([0, 1, 10**12])))
    resources = Resources(
        draw(st.sampled_from([32.0, 0.0, math.nan, math.inf, 1e-9])), draw(st.sampled_from([0, GB])), GB
    )
    batches = draw(st.sampled_from([0, 1, 30]))
    return replace(seen, rates=rates, resources=resources, batches=batches, **wrong)


@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(odd_observations(), min_size=1, max_size=4))
def test_any_measurement_gives_an_allocation(odd: list[Observation]) -> None:
    policy, loop = Dqn(a_network(1), ShellConfig(jumps=(2,))), FakeLoop(three_stages(depth=4))
    for observation in odd:
        for seen in (loop.observe(), loop.observe(), observation):
            proposal = policy.decide(seen)
            for name, value in proposal.allocation.items():
                stage = next(s for s in seen.stages if s.name == name)
                assert isinstance(value, int) and value >= 0
                assert stage.unit == "items" or stage.low <= value <= stage.high
            assert proposal.reason


def test_one_broken_reading_is_soon_forgotten() -> None:
    policy, loop = Dqn(), FakeLoop(pipeline := three_stages())
    seen = loop.observe()
    decided(policy, loop, 1)
    broken = {n: replace(r, service_s=math.nan, service_cpu_s=math.nan) for n, r in seen.rates.items()}
    policy.decide(replace(seen, rates=broken))
    decided(policy, loop, 40)
    assert loop.throughput >= 0.85 * best_static(pipeline)


def test_windows_are_kept_on_a_machine_that_shrinks() -> None:
    """One that is cut holds up the stages before it, and their CPUs idle: it is a loss without a need of memory."""
    pipeline = five_stages(64.0)
    policy, loop = make_policy("model-jump"), FakeLoop(pipeline)
    decided(policy, loop, 40)
    wide = {stage.name: stage.current for stage in pipeline.stages()}
    pipeline.machine.cpus = 24.0
    decided(policy, loop, 40)
    for stage in pipeline.stages():
        if stage.window_of is None:
            assert stage.current < wide[stage.name]
        else:
            assert stage.current >= wide[stage.name]
    pipeline.machine.cpus = 4.0
    decided(policy, loop, 40)
    assert any(stage.window_of and stage.current < wide[stage.name] for stage in pipeline.stages())


@pytest.mark.parametrize("name", ["dqn", "model-jump"])
def test_a_buffer_behind_a_stage_that_always_computes_is_left_alone(name: str) -> None:
    """DLIO's tf.data loader reads with one generator: its prefetch was changed 21 times, and was empty all along."""
    for high, changed in ((1, False), (64, True)):
        pipeline = FakePipeline({"read": Work(0.1, cpu_share=0.1, high=high)}, FakeMachine(), depth=2)
        decided(make_policy(name), FakeLoop(pipeline, model_s=0.03, jitter=0.0), 60)
        assert any(values.get("prefetch", 0) > 2 for values in pipeline.resizes) == changed


# -- ways to get one ---------------------------------------------------------------------------------------------------


def test_make_policy_knows_it() -> None:
    policy = make_policy("dqn")
    assert isinstance(policy, Dqn) and policy.name == "dqn"
    with pytest.raises(ConfigError, match=r"'dqm'.*did you mean 'dqn'"):
        make_policy("dqm")


def test_fine_tuning_is_for_the_dqn_only() -> None:
    assert TunerConfig(fine_tune=True).policy == "dqn"
    with pytest.raises(ConfigError, match=r"fine_tune=True: policy='even' does not learn; expected policy='dqn'"):
        TunerConfig(policy="even", fine_tune=True)
    with pytest.raises(ConfigError, match=r"fine_tune='yes': expected True or False"):
        TunerConfig(fine_tune="yes")  # type: ignore[arg-type]


def test_fine_tuning_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "intune_callbacks.decide.online", None)
    with pytest.raises(MissingPackage, match="torch"):
        make_policy("dqn", fine_tune=True)


def test_weights_of_another_version_are_refused() -> None:
    good = a_network()
    arrays = {name: getattr(good, name) for name in ("w1", "b1", "w2", "b2", "w3", "b3")}
    with pytest.raises(ValueError, match=r"do not fit this version of the agent: w1 is \(7, 16\), expected"):
        Network.of(arrays | {"w1": np.zeros((7, 16))})
