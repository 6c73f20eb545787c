"""Runs for the tests of the page: a real tuner on pipelines with a virtual clock, written where a callback writes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes import GB, MB, FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.history import History
from intune_callbacks.record.report import write_report
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Observation, Proposal

STAGES = {
    "read": Work(0.02, cpu_share=0.2, item_bytes=4.0 * MB),
    "decode": Work(0.1, cv=0.5, item_bytes=20.0 * MB),
    "augment": Work(0.06, item_bytes=20.0 * MB),
    "collate": Work(0.01, item_bytes=600.0 * MB),
}
OFTEN: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}


class Restless:
    """A policy that never holds: every decision moves a stage, back and forth, or asks for far too much."""

    name = "restless"

    def __init__(self) -> None:
        self.random = random.Random(0)

    def decide(self, observation: Observation) -> Proposal:
        stage = self.random.choice([stage for stage in observation.stages if stage.window_of is None])
        wanted = self.random.choice((1, 2, 3, 4, stage.high))
        return Proposal({stage.name: wanted}, f"{stage.name} shall have {wanted}, by draw {self.random.random():.12f}")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def make_run(
    folder: Path,
    decisions: int = 60,
    *,
    stages: Mapping[str, Work] = STAGES,
    restless: bool = False,
    model_s: float = 0.02,
    **config: Any,
) -> dict[str, Any]:
    """Train until there are so many decisions, on a machine resized now and then; return what `report.json` holds."""
    machine = FakeMachine(cpus=16.0, memory_limit_bytes=64 * GB)
    pipeline = FakePipeline(stages, machine, depth=2)
    tuner = Tuner(
        pipeline,
        TunerConfig(**{**OFTEN, **config}),
        policy=Restless() if restless else None,
        probe=machine,
        clock=machine.clock(),
        history=History(folder / "history.jsonl"),
    )
    if restless:  # nor does anybody stop it
        tuner._net.permit.grant = lambda wanted, seen: (wanted, "")  # type: ignore[method-assign]
        tuner._net.back = lambda: None  # type: ignore[method-assign]
    loop, draw = FakeLoop(pipeline, model_s=model_s, jitter=0.15), random.Random(1)
    while len(loop.decisions) < decisions:
        loop.run(tuner, 5.0, until=lambda: len(loop.decisions) >= decisions)
        if draw.random() < 0.1:
            machine.cpus = draw.choice((4.0, 8.0, 16.0, 24.0))
        if draw.random() < 0.05:
            machine.memory_limit_bytes = draw.choice((8, 32, 64)) * GB
    tuner.close()
    report = build_report(tuner.summary(), mode_source="argument")
    write_report(folder, report)
    return report.to_json()
