"""Reports of runs that were fed, were too short, or became slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.report import Report, Span
from intune_callbacks.session.tuner import Tuner

WHOLE = Span(
    *(30000, None, 20.0, 1.0, 9.0), epochs=6, throughput_samples_per_s=800.0, wait_frac=0.4, first_batch_s=1.25
)


def run(seconds: float = 20.0, model_s: float = 0.02, workers: int = 1, **config: Any) -> Report:
    """The summary of a run of one decode stage that eight CPUs could feed 80 batches/s."""
    pipeline = FakePipeline({"decode": Work(0.1, workers=workers, window=4 * workers)}, FakeMachine(), depth=2)
    loop, machine = FakeLoop(pipeline, model_s=model_s), pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(**config), probe=machine, clock=machine.clock())
    loop.run(tuner, seconds)
    tuner.close()
    return tuner.summary()


def slowed(share: float = 0.66, current: int = 2, **more: Any) -> Report:
    """A run that went from `decode 8` to `decode 2`, and to a share of its speed; `more` is measured of it."""
    summary = run(mode="observe", model_s=0.001, workers=8)
    before, (decode, *others) = summary.before, summary.stages
    assert before.measured is not None and before.throughput_samples_per_s is not None
    return replace(
        summary,
        mode="tune",
        changes=3,
        whole=WHOLE,
        before=replace(before, measured=replace(before.measured, **more)),
        after=replace(before, throughput_samples_per_s=before.throughput_samples_per_s * share),
        stages=(replace(decode, first=8, current=current), *others),
    )
