"""A starved pipeline, its tuner, and a policy that does as it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fakes import FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.history import History
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation, Observation, Proposal


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
