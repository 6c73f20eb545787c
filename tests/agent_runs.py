"""Pipelines of three stages for the agent, and its wishes that come true at once."""

from __future__ import annotations

from typing import Any

from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.decide.dqn import Dqn
from intune_callbacks.types import Proposal

COSTS_S = {"read": 0.02, "decode": 0.12, "batch": 0.06}


def three_stages(cpus: float = 32.0, depth: int | None = None, **changes: Any) -> FakePipeline:
    each = max(1, int(cpus // 3))
    work = {n: Work(s, workers=each, window=2 * each, high=128, **changes) for n, s in COSTS_S.items()}
    return FakePipeline(work, FakeMachine(cpus), depth)


def decided(policy: Dqn, loop: FakeLoop, decisions: int) -> list[Proposal]:
    """Run a policy without a tuner; its wishes come true at once."""
    proposals = []
    for _ in range(decisions):
        proposals.append(policy.decide(loop.observe()))
        if proposals[-1].allocation:
            loop.pipeline.resize(proposals[-1].allocation)
    return proposals
