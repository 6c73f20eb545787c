"""What an input needs that has outgrown its machine, and that this is why more workers bring nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.measure.cause import advice, causes
from intune_callbacks.measure.evidence import Evidence
from intune_callbacks.measure.measured import Measured, measured
from intune_callbacks.measure.outgrow import MOST_TIMES, outgrow
from intune_callbacks.measure.predict import promised
from intune_callbacks.record.card import card_rows
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Report
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import StageRates


def seen(model_s: float, cpu_s: float = 0.4, item_bytes: float = 2e6) -> Measured:
    """A batch of one item, on the 8 CPUs of the machine."""
    pipeline = FakePipeline({"decode": Work(cpu_s, workers=8, window=16)}, FakeMachine())
    loop = FakeLoop(pipeline, model_s=model_s)
    found = measured([loop.observe() for _ in range(5)])
    assert found is not None
    return replace(found, rates={name: replace(rate, item_bytes=item_bytes) for name, rate in found.rates.items()})


def test_cpus_for_the_pace_of_the_model() -> None:
    """20 batches/s are made here; for 50, of .4 s CPU each, 20 CPUs are needed, and a tenth to spare."""
    found = outgrow(seen(model_s=0.02))
    assert found is not None
    assert found.cpus == pytest.approx(8.0) and found.cpus_needed in (22, 23)
    assert found.batches_per_s == pytest.approx(20.0, rel=0.05)
    assert found.model_batches_per_s == pytest.approx(50.0, rel=0.05)
    assert found.gain == pytest.approx(promised(2.5), rel=0.05)
    assert found.network_bytes_per_s == pytest.approx(100e6, rel=0.05)
    assert found.sentence.startswith("the model could take 50 batches/s, the CPUs here make ")
    assert found.sentence.endswith(" more would help, also those of other machines, with 100 MB/s over the network")
    half = outgrow(seen(model_s=0.02), share=0.5)
    assert half is not None and 1.0 < half.gain < found.gain


def test_a_model_that_takes_next_to_nothing_does_not_need_a_thousand() -> None:
    found = outgrow(seen(model_s=1e-5))
    assert found is not None and found.cpus_needed == MOST_TIMES * 8
    assert found.gain < promised(MOST_TIMES)


def test_a_model_nearly_as_slow_needs_none() -> None:
    assert outgrow(seen(model_s=0.0499)) is None


def test_what_is_made_while_an_epoch_begins_is_no_pace() -> None:
    assert outgrow(replace(seen(model_s=0.02), seam_s=0.2)) is None


def test_more_than_a_network_carries() -> None:
    found = outgrow(seen(model_s=0.02, item_bytes=100e6))
    assert found is not None
    assert found.sentence.endswith(
        "those of other machines less: 5.0 GB/s would cross the network, 10 GbE carries 1.2 GB/s"
    )


def test_what_is_made_as_soon_as_sent_stays_here() -> None:
    found = outgrow(seen(model_s=1e-5, cpu_s=0.0003, item_bytes=1e3))
    assert found is not None
    assert found.sentence.endswith("not those of other machines: to send what takes 300 us to make would take as long")


def test_few_bytes_and_a_part_of_a_cpu_are_told_as_they_are() -> None:
    """Of .9 CPUs that can be had to 2 it is 1 more; 32 bytes a batch are kilobytes a second."""
    some = seen(model_s=0.02, item_bytes=32.0)
    found = outgrow(replace(some, cpus=0.9, cpus_idle=None, period_s=0.035, rates=slower(some, 0.030)))
    assert found is not None and found.cpus_needed == 2
    assert ": 1 more would help, also those of other machines, with 2 kB/s over the network" in found.sentence


def slower(found: Measured, cpu_s: float) -> dict[str, StageRates]:
    return {name: replace(rate, service_cpu_s=cpu_s, items_per_batch=1.0) for name, rate in found.rates.items()}


def test_a_batch_of_unknown_size() -> None:
    found = outgrow(seen(model_s=0.02, item_bytes=0.0))
    assert found is not None and found.network_bytes_per_s is None
    assert found.sentence.endswith(" more would help")


@pytest.mark.parametrize(("model_s", "is_told"), [(0.02, True), (0.2, False)])
def test_report_and_card(model_s: float, is_told: bool) -> None:
    pipeline = FakePipeline({"decode": Work(0.4, workers=8, window=16)}, FakeMachine())
    loop, machine = FakeLoop(pipeline, model_s=model_s), pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(mode="observe"), probe=machine, clock=machine.clock())
    loop.run(tuner, 30.0)
    report = build_report(tuner.summary())
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again.outgrow == report.outgrow and (report.outgrow is not None) is is_told
    told = [text for label, text in card_rows(report) if label == "also" and "CPUs here make" in text]
    assert len(told) == is_told


def test_where_cpus_are_short_that_is_why_more_workers_brought_nothing() -> None:
    tried = Evidence(tried={"decode": 0.64})
    short = seen(model_s=0.02)
    (cause,) = causes(short, tried)
    assert cause.kind == "cpu" and "; with twice as many CPUs, or" in cause.sentence
    assert advice(short, tried).allocation == {}
    (cause,) = causes(replace(short, cpus=32.0), tried)  # where some are free it is something else
    assert cause.kind == "serial" and "brought nothing when tried" in cause.sentence
