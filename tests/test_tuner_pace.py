"""When the loop decides: in batches and in seconds, on quick pipelines and on slow ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from test_tuner import Script, starved, tuner_of


def test_no_decision_before_warm_up_and_then_at_the_configured_pace() -> None:
    loop = FakeLoop(starved())
    tuner = tuner_of(loop.pipeline, policy=Script(), warmup_batches=30, decide_every_s=2.0, decide_every_batches=10)
    steps = [d.observation.step for d in loop.run(tuner, seconds=15.0)]
    assert 49 <= steps[0] <= 54  # 30 of warm-up, then 2 s at 10 batches/s
    assert all(19 <= later - earlier <= 23 for earlier, later in pairwise(steps))


def test_fewest_batches_count_when_batches_are_quick_and_seconds_when_they_are_slow() -> None:
    pipeline = FakePipeline({"decode": Work(0.001)}, FakeMachine())
    quick = FakeLoop(pipeline)
    decisions = quick.run(tuner_of(pipeline, policy=Script(), decide_every_s=0.0, decide_every_batches=50), seconds=1.0)
    assert {d.observation.batches for d in decisions} == {50}

    pipeline = FakePipeline({"decode": Work(7.0)}, FakeMachine())
    slow = FakeLoop(pipeline)
    decisions = slow.run(tuner_of(pipeline, policy=Script()), seconds=100.0)
    assert len(decisions) >= 5
    assert all(d.observation.batches == 2 for d in decisions)


@pytest.mark.parametrize("batch_s", [0.4, 1.0, 2.0])
def test_a_slow_pipeline_is_tuned_after_some_batches_and_not_after_the_usual_number(batch_s: float) -> None:
    """A stranger's fit of 110 s began with four workers where sixteen were right, and each second there cost two."""
    pipeline = FakePipeline({"decode": Work(batch_s)}, FakeMachine())
    loop = FakeLoop(pipeline)
    begin_s = pipeline.machine.now_s
    decisions = loop.run(tuner_of(pipeline), seconds=60.0)
    first = next(d for d in decisions if d.applied)
    assert first.after["decode"] > 1
    assert first.observation.batches >= 4
    assert first.observation.at_s - begin_s < max(6.0, 6.5 * batch_s)
    # Later windows are as long as they are said to be.
    later = decisions[decisions.index(first) + 1 :]
    assert later
    assert all(d.observation.batches >= 5 for d in later)
