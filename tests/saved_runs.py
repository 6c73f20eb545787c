"""What the tests of a saved run share: a pipeline, a run that is saved, a start from it, an edit by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.session.found import found_by, write_found
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.session.warm_start import WarmStart
from intune_callbacks.types import Allocation, Observation, Proposal

VERSIONS = {"intune_callbacks": "0.1.0", "torch": "2.13.0"}
BATCH = 32
COSTS_S = {"read": 0.02, "decode": 0.12, "batch": 0.06}


def three_stages(cpus: float = 32.0) -> FakePipeline:
    each = max(1, int(cpus // 3))
    work = {name: Work(s, workers=each, window=2 * each, high=128, cv=0.2) for name, s in COSTS_S.items()}
    return FakePipeline(work, FakeMachine(cpus), depth=2)


def tuner_of(pipeline: FakePipeline, script: Any = None, **config: Any) -> Tuner:
    machine = pipeline.machine
    return Tuner(pipeline, TunerConfig(**config), policy=script, probe=machine, clock=machine.clock())


def save(folder: Path, tuner: Tuner, **changes: Any) -> Path | None:
    given = {"batch_size": BATCH, "ranks": 1, "versions": VERSIONS} | changes
    found = found_by(tuner, **given)
    return None if found is None else write_found(folder, *found)


def run(folder: Path, pipeline: FakePipeline, seconds: float = 60.0, script: Any = None, **config: Any) -> FakeLoop:
    """Train under a tuner and keep what it found."""
    loop = FakeLoop(pipeline)
    tuner = tuner_of(pipeline, script, **config)
    loop.run(tuner, seconds)
    tuner.close()
    save(folder, tuner)
    return loop


def started(source: Path | str, tuner: Tuner, **changes: Any) -> dict[str, Any]:
    """Return the report's entry of a run that asked to start from `source`."""
    given = {"batch_size": BATCH, "versions": VERSIONS} | changes
    start = WarmStart(str(source), given.pop("rank", 0), given.pop("world", 1))
    start.begin(tuner, **given)
    entry = start.entry
    assert entry is not None and entry["from"] == str(source)
    return entry


def refused(source: Path | str, tuner: Tuner, **changes: Any) -> str:
    """Return why a run did not start from `source`; it warns once and changes nothing."""
    before = [stage.current for stage in tuner.setting()[0]]
    with pytest.warns(RuntimeWarning, match="starts anew, not from") as caught:
        entry = started(source, tuner, **changes)
    assert len(caught) == 1 and entry["why"] in str(caught[0].message)
    assert not entry["used"] and [stage.current for stage in tuner.setting()[0]] == before
    return str(entry["why"])


class Script:
    """Proposes what it was given, in turn, then nothing; never settles."""

    name = "script"

    def __init__(self, *allocations: Allocation) -> None:
        self.left = list(allocations)

    def decide(self, observation: Observation) -> Proposal:
        return Proposal(self.left.pop(0) if self.left else {}, "as scripted")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def edit(folder: Path, *changes: tuple[str, str]) -> None:
    file = folder / "found.yaml"
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)


def line_of(folder: Path, stage: str) -> str:
    lines = (folder / "found.yaml").read_text().splitlines()
    return next(line for line in lines if line.startswith(f'    "{stage}": '))
