"""The DQN as a policy: it reaches the best of known machines under the real tuner, and survives any measurement."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work, best_static
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from views import a_network, plain

from benchmarks.policies.sim_pipeline import SimPipeline
from intune_callbacks.config import TunerConfig
from intune_callbacks.decide.dqn import Dqn
from intune_callbacks.decide.network import Network
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.errors import ConfigError, MissingPackage
from intune_callbacks.pretrain.oracle import best
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Observation, Proposal, Resources, StageRates

COSTS_S = {"read": 0.02, "decode": 0.12, "batch": 0.06}


def three_stages(cpus: float = 32.0, depth: int | None = None, **changes: Any) -> FakePipeline:
    each = max(1, int(cpus // 3))
    work = {n: Work(s, workers=each, window=2 * each, high=128, **changes) for n, s in COSTS_S.items()}
    return FakePipeline(work, FakeMachine(cpus), depth)


def tuner_of(pipeline: FakePipeline, policy: Dqn | None = None, **config: Any) -> Tuner:
    machine = pipeline.machine
    return Tuner(pipeline, TunerConfig(**config), policy=policy, probe=machine, clock=machine.clock())


def decided(policy: Dqn, loop: FakeLoop, decisions: int) -> list[Proposal]:
    """Run a policy without a tuner; its wishes come true at once."""
    proposals = []
    for _ in range(decisions):
        proposals.append(policy.decide(loop.observe()))
        if proposals[-1].allocation:
            loop.pipeline.resize(proposals[-1].allocation)
    return proposals


# -- under the real tuner ----------------------------------------------------------------------------------------------


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
