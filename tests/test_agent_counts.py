"""What is counted of a live pipeline: items per batch, and when there are enough of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.measure.counts import StageCounts
from intune_callbacks.types import Stage


def test_what_fills_a_wider_window_is_not_taken_for_demand() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=8)}, FakeMachine(cpus=64.0))
    loop, counts = FakeLoop(pipeline), StageCounts()
    for _ in range(3):
        counts.learn(loop.observe())
    pipeline.resize({"a": 8, "a.window": 64})
    seen = loop.observe()
    made = replace(seen.rates["a"], items=3 * seen.batches)
    for _ in range(3):
        counts.learn(replace(seen, rates={"a": replace(made, stored=2 * seen.batches)}))
    assert counts.of_stages()["a"].items_per_batch == pytest.approx(1.0)
    for _ in range(120):
        counts.learn(replace(seen, rates={"a": made}))
    assert counts.of_stages()["a"].items_per_batch == pytest.approx(3.0), "what lasts is demand"


def test_items_behind_a_slow_one_count() -> None:
    """In order, one slow item holds back all behind it: they are made in a window that delivers next to nothing."""
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=64)}, FakeMachine(cpus=64.0))
    seen, counts = FakeLoop(pipeline).observe(), StageCounts()
    for _ in range(40):
        for batches, items in ((2, 26), (16, 10), (15, 10), (15, 2)):
            rates = {"a": replace(seen.rates["a"], items=items)}
            counts.learn(replace(seen, rates=rates, batches=batches))
    assert counts.of_stages()["a"].items_per_batch == pytest.approx(1.0, abs=0.02)


def test_what_the_first_windows_filled_is_not_remembered() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=64)}, FakeMachine(cpus=64.0))
    seen, counts = FakeLoop(pipeline).observe(), StageCounts()
    counts.learn(replace(seen, rates={"a": replace(seen.rates["a"], items=40 * seen.batches)}))
    assert counts.of_stages()["a"].items_per_batch == pytest.approx(40.0), "nothing else is known yet"
    for _ in range(5):
        counts.learn(seen)
    assert counts.of_stages()["a"].items_per_batch == pytest.approx(1.0, abs=0.1)


def test_a_long_drain_is_not_taken_for_less_demand() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=8)}, FakeMachine(cpus=64.0))
    loop, counts = FakeLoop(pipeline), StageCounts()
    for _ in range(60):
        counts.learn(loop.observe())
    seen = loop.observe()
    # A window of hundreds of results that was cut to a few: half of what is delivered was made before.
    draining = replace(seen, rates={"a": replace(seen.rates["a"], items=seen.batches // 2)})
    for _ in range(20):
        counts.learn(draining)
    assert counts.of_stages()["a"].items_per_batch > 0.85


def test_counts_are_taken_while_only_a_buffer_grows() -> None:
    pipeline = FakePipeline({"a": Work(0.1, workers=2, window=64)}, FakeMachine(cpus=64.0))
    loop, counts = FakeLoop(pipeline), StageCounts()
    seen = loop.observe()
    buffer = Stage("prefetch", "memory", "batches", 1, 4096, 2)

    def learn(items_per_batch: float, depth: int) -> None:
        rates = {"a": replace(seen.rates["a"], items=round(items_per_batch * seen.batches))}
        counts.learn(replace(seen, rates=rates, stages=(*seen.stages, replace(buffer, current=depth))))

    learn(0.5, 2)
    for window in range(12):
        learn(1.0, 2 + window * (seen.batches // 10))
    assert counts.of_stages()["a"].items_per_batch == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("reading", ["service_s", "service_cpu_s", "service_cv"])
def test_what_could_not_be_measured_is_not_learnt(reading: str, odd: float) -> None:
    loop, counts = FakeLoop(FakePipeline({"a": Work(0.1)}, FakeMachine())), StageCounts()
    seen = loop.observe()
    counts.learn(seen)
    known = counts.state_dict()["stages"]
    counts.learn(replace(seen, rates={"a": replace(seen.rates["a"], **{reading: odd})}))
    assert counts.state_dict()["stages"] == known


def test_other_work_has_to_show_itself_anew() -> None:
    pipeline = FakePipeline({"a": Work(0.02, cpu_share=0.1, workers=4, window=16)}, FakeMachine(cpus=64.0))
    loop, counts = FakeLoop(pipeline), StageCounts()
    for _ in range(20):
        counts.learn(loop.observe())
    seen = loop.observe()
    assert counts.is_reliable(seen)
    few = replace(seen.rates["a"], items=2)
    counts.learn(replace(seen, rates={"a": few}))
    assert counts.is_reliable(seen), "few items of the same work"
    counts.learn(replace(seen, rates={"a": replace(few, service_cpu_s=3.0 * few.service_cpu_s)}))
    assert not counts.is_reliable(seen)
