"""A run that became slower: whether a change did that, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from report_runs import run, slowed

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.card import card_rows, end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Report
from intune_callbacks.session.tuner import Tuner


def test_a_run_that_memory_made_slower_is_not_told_to_take_its_own_numbers_again() -> None:
    summary = slowed()
    alarm = {"before": {}, "after": {}, "vetoes": [], "effect": None, "reason": "memory alarm: 9 of 10 GB used"}
    # After many changes the product of what each brought says little.
    after = replace(summary.after, brought=1.2)
    report = build_report(replace(summary, after=after, decisions=({**alarm, "applied": True},)))
    assert report.verdict == "slower than before"
    assert report.next.startswith("memory was short: make room in it or, ")
    over = {**alarm, "applied": True, "reason": "memory is there again: back to the numbers of the start"}
    report = build_report(replace(summary, decisions=({**alarm, "applied": True}, over)))
    assert report.next.startswith("keep your own numbers (decode 8): ")
    report = build_report(replace(summary, decisions=({**alarm, "applied": False},)))
    assert report.next.startswith("keep your own numbers (decode 8): ")


def test_an_alarm_that_is_over_does_not_hold_the_input_back() -> None:
    summary = run(mode="observe")
    known = {"before": {}, "after": {}, "effect": None, "applied": True}
    alarm = {**known, "reason": "memory alarm: 9 of 10 GB used", "vetoes": ["memory alarm: 9 of 10 GB used"]}
    over = {**known, "reason": "memory is there again: back to the numbers of the start", "vetoes": []}
    for decisions, is_held in (((alarm,), True), ((alarm, over), False), ((over, alarm), True)):
        causes = build_report(replace(summary, decisions=decisions)).causes
        assert ("memory" in [cause.kind for cause in causes]) is is_held


def test_a_slower_run_whose_numbers_are_back_is_not_blamed_on_them() -> None:
    summary = slowed(current=8)
    change = {"before": {"decode": 8}, "applied": True, "vetoes": [], "effect": None, "reason": ""}
    more, less = ({**change, "after": {"decode": workers}} for workers in (12, 4))
    assert build_report(replace(summary, decisions=(more,))).verdict != "slower than before"
    report = build_report(replace(summary, decisions=(more, less)))
    assert "InTune went back to the numbers of the start, after 3 changes" in report.why
    assert report.next.startswith("run with mode='observe', which changes nothing, and see whether it is faster")


class OtherWork(FakeLoop):
    """After a while the model takes `later_s` for a batch, or the items that many times as long."""

    later_s, heavier = 0.3, 1.0

    def change(self) -> None:
        self.model_s = self.later_s
        for name, work in self.pipeline.work.items():
            self.pipeline.work[name] = replace(work, service_s=work.service_s * self.heavier)


def at_other_work(later_s: float, heavier: float = 1.0) -> Report:
    """The report of a run that was fed, and has had other work from a while after that on."""
    pipeline = FakePipeline({"decode": Work(0.1, cpu_share=0.1, workers=2, window=8)}, FakeMachine(), depth=2)
    loop, machine = OtherWork(pipeline, model_s=0.02), pipeline.machine
    loop.later_s, loop.heavier = later_s, heavier
    tuner = Tuner(pipeline, TunerConfig(), probe=machine, clock=machine.clock())
    loop.run(tuner, 40.0)
    loop.change()
    loop.run(tuner, 200.0)
    tuner.close()
    return build_report(tuner.summary())


def test_a_model_that_takes_longer_later_is_not_blamed_on_a_change() -> None:
    report = at_other_work(later_s=0.3)
    first, last = report.before.throughput_samples_per_s, report.after.throughput_samples_per_s
    assert report.changes and first and last and last < 0.8 * first
    assert report.verdict == "compute-bound"
    assert report.why.endswith(
        "; later it became slower, but not by a change: the model takes 300 ms for each batch, 20 ms before"
    )
    assert "keep your own numbers" not in end_card(report)
    assert "brought" not in report.to_json()["after"]


@pytest.mark.parametrize(
    ("current", "model_s", "idle", "blamed"),
    [
        (8, 0.09, 0.0, False),  # these are the user's own numbers
        (8, 0.02, 0.0, True),  # it waits for data longer than before
        (12, 0.09, 5.0, False),
        (12, 0.09, 0.1, True),  # workers may have taken the model's CPUs
        (2, 0.09, 0.1, False),  # fewer workers take fewer
    ],
)
def test_time_that_the_model_takes_is_blamed_only_on_workers_that_crowd_it(
    current: int, model_s: float, idle: float, blamed: bool
) -> None:
    change = {"before": {}, "after": {"decode": 4}, "applied": True, "vetoes": [], "effect": None, "reason": ""}
    summary = replace(slowed(current=current), decisions=(change,))
    seen = summary.after.measured
    assert seen is not None
    slow = replace(seen, period_s=seen.period_s + 0.1, model_s=seen.model_s + model_s, cpus_idle=idle)
    report = build_report(replace(summary, after=replace(summary.after, brought=0.5, measured=slow)))
    assert (report.verdict == "slower than before") is blamed


def test_a_machine_that_gave_up_cpus_is_no_fault_of_the_changes_that_followed() -> None:
    summary = slowed()
    seen = summary.after.measured
    assert seen is not None
    fewer = replace(summary.after, brought=0.5, measured=replace(seen, cpus=seen.cpus / 4.0))
    report = build_report(replace(summary, after=fewer))
    assert report.verdict != "slower than before"
    assert report.why.endswith("; later it became slower, but not by a change: it had 2 CPUs, and 8 before")


def test_items_that_become_heavier_are_not_blamed_on_the_changes_that_follow() -> None:
    report = at_other_work(later_s=0.02, heavier=40.0)
    first, last = report.before.throughput_samples_per_s, report.after.throughput_samples_per_s
    assert first and last and last < 0.8 * first
    assert report.verdict != "slower than before"
    assert "; later it became slower, but not by a change" in report.why


class Stalls(FakePipeline):
    """Every 200th batch takes 300 times as long as the others."""

    def capacity(self, name: str, values: Mapping[str, int]) -> float:
        return super().capacity(name, values) / (300.0 if self.delivered % 200 == 199 else 1.0)


def test_a_loop_that_seldom_waits_but_long_is_not_told_that_the_model_is_the_limit() -> None:
    pipeline = Stalls({"decode": Work(0.1, workers=4, window=16)}, FakeMachine(), depth=2)
    loop, machine = FakeLoop(pipeline, model_s=0.05), pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(mode="observe"), probe=machine, clock=machine.clock())
    loop.run(tuner, 200.0)
    tuner.close()
    report = build_report(tuner.summary())
    assert report.after.wait_frac is not None and report.after.wait_frac > 0.3
    rows = dict(card_rows(report))
    assert rows["InTune"].startswith("INPUT-BOUND ")
    assert rows["why"].endswith(" % of the time for data, but unevenly: 0 % in most windows")
    assert rows["cause"].startswith("most batches are there in time, and some come far later: ")
    assert "the model is the limit" not in end_card(report)
    assert Report.from_json(report.to_json()) == report
