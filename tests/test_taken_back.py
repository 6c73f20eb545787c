"""Policies that are told that a trial failed, and stages whose work is done in the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from views import a_network

from intune_callbacks.config import POLICIES
from intune_callbacks.decide.dqn import Dqn
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.types import Allocation, Policy, Stage

COSTS_S = {"read": 0.02, "decode": 0.12, "batch": 0.06}


def narrow(workers: int = 2) -> FakePipeline:
    """A pipeline that starts with few workers on a machine of many CPUs: every policy wants more."""
    work = {name: Work(s, workers=workers, window=2 * workers) for name, s in COSTS_S.items()}
    return FakePipeline(work, FakeMachine(32.0))


class InLoop(FakePipeline):
    """`decode` may have no worker at all: then it computes in the training loop, somewhat slower than one worker."""

    def __init__(self, workers: int, high: int = 64) -> None:
        work = {name: Work(s, workers=workers if name == "decode" else 2, window=8) for name, s in COSTS_S.items()}
        work["decode"] = replace(work["decode"], high=high)
        super().__init__(work, FakeMachine(32.0))

    def stages(self) -> tuple[Stage, ...]:
        return tuple(replace(s, low=0) if s.name == "decode" else s for s in super().stages())

    def capacity(self, name: str, values: Mapping[str, int]) -> float:
        asleep = values[name] == 0
        return super().capacity(name, {**values, name: max(1, values[name])}) * (0.7 if asleep else 1.0)


def proposals(policy: Policy, loop: FakeLoop, decisions: int, granted: bool = True) -> list[Allocation]:
    """Return what a policy wants to change, decision by decision."""
    wanted = []
    for _ in range(decisions):
        seen = loop.observe()
        allocation = policy.decide(seen).allocation
        wanted.append({name: n for name, n in allocation.items() if seen.allocation[name] != n})
        if granted:
            loop.pipeline.resize(allocation)
    return wanted


# -- a trial that failed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [2, 30], ids=["as wide as needed", "too narrow"])
def test_dqn_holds_what_it_was_brought_back_to(windows: int) -> None:
    loop = FakeLoop(pipeline := narrow())
    start = dict(pipeline.values)
    policy = Dqn()
    assert any(proposals(policy, loop, 12))
    failed = dict(pipeline.values)
    pipeline.work = {name: replace(work, cv=windows / 40) for name, work in pipeline.work.items()}
    pipeline.resize(start)
    policy.taken_back(failed, 0.7)
    assert not any(proposals(policy, loop, 2 * ShellConfig().look - 1))
    assert policy.decide(loop.observe()).allocation != {n: v for n, v in failed.items() if v != start[n]}


def test_what_failed_is_known_to_the_next_run() -> None:
    loop = FakeLoop(pipeline := narrow())
    start = dict(pipeline.values)
    first = Dqn()
    proposals(first, loop, 12)
    failed = dict(pipeline.values)
    pipeline.resize(start)
    first.taken_back(failed, 0.7)
    proposals(first, loop, 3)
    second = Dqn()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert not any(proposals(second, loop, ShellConfig().look - 5))


@pytest.mark.parametrize("name", ["model-jump", "even"])
def test_what_failed_is_not_asked_for_again(name: str) -> None:
    loop = FakeLoop(pipeline := narrow())
    start = dict(pipeline.values)
    policy = make_policy(name)
    for _ in range(10):
        wanted = policy.decide(loop.observe()).allocation
        if any(pipeline.values[stage] != n for stage, n in wanted.items()):
            break
    pipeline.resize(wanted)
    if name != "even":
        policy.decide(loop.observe())
    failed = dict(pipeline.values)
    assert failed != start
    pipeline.resize(start)
    policy.taken_back(failed, 0.7)
    asked = [{**start, **wanted} for wanted in proposals(policy, loop, 60, granted=False)]
    assert failed not in asked


@pytest.mark.parametrize("name", POLICIES)
def test_a_failure_before_the_first_decision_is_no_error(name: str) -> None:
    policy = make_policy(name)
    policy.taken_back({"read": 3}, 0.5)
    assert proposals(policy, FakeLoop(narrow()), 10)


@pytest.mark.parametrize("name", ["dqn", "model-jump"])
def test_what_is_never_granted_is_not_asked_for_in_every_decision(name: str) -> None:
    wanted = proposals(make_policy(name), FakeLoop(narrow()), 120, granted=False)
    assert any(wanted) and sum(map(bool, wanted[60:])) < 8


# -- no worker at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_no_policy_takes_the_last_worker(name: str, workers: int) -> None:
    wanted = proposals(make_policy(name), FakeLoop(InLoop(workers)), 80)
    assert any(wanted)
    assert all(changes.get("decode", 1) >= 1 for changes in wanted)


def test_a_first_worker_is_asked_for_in_a_jump_and_not_in_between() -> None:
    loop = FakeLoop(pipeline := InLoop(0, high=1))
    policy = Dqn(a_network(1))
    reasons = []
    for _ in range(60):
        proposal = policy.decide(loop.observe())
        if proposal.allocation.get("decode") is not None:
            reasons.append(proposal.reason)
            assert proposal.allocation["decode"] == 1
        pipeline.resize({n: v for n, v in proposal.allocation.items() if n != "decode"})
    assert reasons and all("decode 0>1" in reason for reason in reasons)
    assert all(reason.startswith(("jump", "measuring the best")) for reason in reasons), reasons
    pipeline.resize({"decode": 1})
    assert not any("decode" in changes for changes in proposals(policy, loop, 20))


def test_a_first_worker_that_gave_less_is_not_asked_for_again() -> None:
    def asked(failed: bool) -> int:
        loop = FakeLoop(InLoop(0, high=1))
        policy = Dqn(a_network(1))
        proposals(policy, loop, 3, granted=False)
        if failed:
            policy.taken_back({"decode": 1}, 0.9)
        # On another machine everything is looked at anew, but for this.
        loop.pipeline.machine.cpus = 64.0
        return sum("decode" in changes for changes in proposals(policy, loop, 60, granted=False))

    assert asked(failed=True) == 0 < asked(failed=False)


def test_a_stage_that_can_have_no_worker_is_left_alone() -> None:
    wanted: list[Any] = proposals(Dqn(), FakeLoop(InLoop(0, high=0)), 60)
    assert not any("decode" in changes for changes in wanted)
