"""The report: the fixed keys, honest numbers, and what to do next."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from report_runs import WHOLE, run

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.card import end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Report, write_report
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Hint, StageRates

KEYS = {
    *("verdict", "before", "after", "decisions", "mode", "mode_source", "stages", "versions", "auc", "frozen"),
    *("changes", "settled_after_s", "wall_s", "why", "next", "memory"),
}


def test_the_fixed_keys_are_there_and_json_agrees(tmp_path: Path) -> None:
    written = replace(build_report(run(), mode_source="argument"), auc=0.71)
    report = written.to_json()
    assert set(report) >= KEYS
    for side in ("before", "after"):
        assert {"throughput_samples_per_s", "wait_frac", "allocation", "verdict"} <= set(report[side])
    assert (report["mode_source"], report["auc"]) == ("argument", 0.71)
    path = write_report(tmp_path / "new" / "folder", written)
    assert path.name == "report.json"
    assert json.loads(path.read_text()) == report
    assert Report.from_json(report).to_json() == report
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_what_is_missing_or_foreign_in_a_file_is_left_at_its_default() -> None:
    told = build_report(run()).to_json()
    kept = Report.from_json(told | {"skipped_rows": 3, "pipeline": None})
    assert kept.to_json() == told | {"skipped_rows": 3, "pipeline": None}
    broken = {"changes": "many", "why": None, "before": [], "wall_s": math.nan, "settled_after_s": True, "mode": 3}
    report = Report.from_json(
        told
        | broken
        | {
            "stages": [told["stages"][0] | {"high": 9.0, "first": "x"}, {"name": "read"}, 7],
            "causes": [{"kind": "cpu"}],
        }
    )
    empty = Report()
    for key in broken:
        assert getattr(report, key) == getattr(empty, key), key
    assert (report.stages, report.causes) == ((replace(kept.stages[0], high=9, first=None),), ())
    assert report.after == kept.after
    assert Report.from_json({}) == empty


@pytest.mark.parametrize(
    ("moved", "next_step"),
    [
        ({"prefetch"}, "start the next run with prefetch 16"),
        (set(), "nothing to change: the run ended with the numbers it began with"),
    ],
)
@pytest.mark.parametrize("is_alone", [False, True])
def test_the_next_run_is_told_only_what_was_changed(moved: set[str], next_step: str, is_alone: bool) -> None:
    summary = run()
    rows = [replace(row, first=row.current - (row.name in moved)) for row in summary.stages]
    stages = tuple(row for row in rows if not is_alone or row.unit != "workers")
    assert build_report(replace(summary, stages=stages)).next == next_step


def test_a_window_that_alone_was_changed_is_told_too() -> None:
    summary = run()
    rows = [replace(row, first=row.current) for row in summary.stages]
    wider = [replace(row, first=4, current=24) if row.window_of else row for row in rows]
    decode = next(row.current for row in rows if row.name == "decode")
    told = build_report(replace(summary, stages=tuple(wider))).next
    assert told == f"start the next run with decode {decode} (window 24)"


def test_what_stands_in_the_users_code_is_told_as_it_is_written_there() -> None:
    summary = run()
    rows = [replace(row, first=row.current) for row in summary.stages]
    knobs = {"decode": "DataLoader(num_workers={})", "decode.window": "prefetch_factor={}"}
    written = [replace(row, knob=knobs.get(row.name, "")) for row in rows]
    more = [replace(row, first=2, current=8) if row.name == "decode" else row for row in written]
    told = build_report(replace(summary, stages=tuple(more))).next
    assert told == "start the next run with what is below\nDataLoader(num_workers=8)  # was 2"
    wider = [replace(row, first=2 * 4, current=6 * 4) if row.window_of == "decode" else row for row in written]
    wider = [replace(row, first=4, current=4) if row.name == "decode" else row for row in wider]
    told = build_report(replace(summary, stages=tuple(wider))).next
    assert told == "start the next run with what is below\nDataLoader(num_workers=4, prefetch_factor=6)  # was 4 and 2"


def test_advice_says_the_numbers_to_set() -> None:
    report = build_report(run(mode="advise"))
    assert report.changes == 0
    assert report.next.startswith("set decode ")
    assert "(was 1)" in report.next


def test_workers_that_cannot_be_seen_from_outside_are_said_to_be_measured_in_tune() -> None:
    summary = run(mode="advise")
    measured = summary.after.measured
    assert measured is not None
    blank = {name: StageRates(0, *(0.0,) * 10) for name in measured.rates}
    blind = replace(summary.after, verdict="input-bound", stage=None, measured=replace(measured, rates=blank))
    told = build_report(replace(summary, before=blind, after=blind)).next
    assert told == "run with mode='tune': what the workers of 'decode' do is measured only there"


def test_advice_is_in_the_words_of_the_users_pipeline() -> None:
    summary = run(mode="advise")
    knobs = {"decode": ".map(decode, num_parallel_calls={})", "prefetch": ".prefetch({})  # was tf.data.AUTOTUNE"}
    stages = tuple(replace(row, knob=knobs.get(row.name, "")) for row in summary.stages)
    report = build_report(replace(summary, stages=stages))
    assert report.advice is not None
    head, *code = report.next.splitlines()
    gain = report.advice["gain"]
    assert head == f"paste what is below (expected × {gain:.2f}), or let mode='tune' do it"
    workers = report.advice["allocation"]["decode"]
    assert code == report.advice["lines"] == [f".map(decode, num_parallel_calls={workers})  # was 1"]
    card = end_card(report).splitlines()
    assert card[-2:] == [f"next    {head}", f"        {code[0]}"]


def test_advice_is_computed_and_never_a_trial() -> None:
    """The policy's trials end with a lower number here; the model limits at 5 times the speed of one worker."""
    summary = run(mode="advise")
    trial = {"proposed": {"decode": 2}, "granted": {"decode": 2}, "vetoes": [], "applied": False, "effect": None}
    trial |= {"before": {"decode": 1}, "after": {"decode": 1}}
    advice = build_report(replace(summary, decisions=(*summary.decisions, trial))).advice
    assert advice is not None
    assert advice["allocation"]["decode"] > 4
    pasted = run(mode="observe", workers=advice["allocation"]["decode"])
    rates = [side.after.throughput_samples_per_s or 0.0 for side in (pasted, summary)]  # of the same machine
    got = rates[0] / rates[1]
    assert 1.0 + 0.5 * (advice["gain"] - 1.0) <= got <= 5.1


@pytest.mark.parametrize("mode", ["advise", "observe"])
def test_where_nothing_would_gain_the_report_says_so(mode: str) -> None:
    report = build_report(run(mode=mode, model_s=0.5))
    assert report.advice is None
    assert report.next.startswith("nothing to change: the training waits 0 % of the time for data, and computes 500 ms")
    full = build_report(run(mode=mode, model_s=0.001, workers=9))
    assert full.advice is None
    assert full.next.startswith("nothing to change: the input keeps 8.0 of 8 CPUs busy; with twice as many CPUs, or")


def test_an_observed_run_is_told_what_tuning_would_be() -> None:
    report = build_report(run(mode="observe"))
    assert report.next == "run with mode='tune', or mode='advise' to see what it would do"
    assert report.decisions == ()


@pytest.mark.parametrize("mode", ["advise", "observe"])
def test_what_tuning_would_leave_alone_is_not_promised_of_it(mode: str) -> None:
    summary = run(mode=mode)
    decode, *others = (replace(row, when="user") for row in summary.stages)
    decode = replace(decode, knob="DataLoader(num_workers={})")
    report = build_report(replace(summary, stages=(decode, *others)))
    assert report.advice is not None and "mode='tune'" not in report.next
    head = "paste what is below (expected × " if mode == "advise" else "run with mode='advise' to see what to write"
    assert report.next.startswith(head)


def test_a_limit_of_the_machine_is_named() -> None:
    report = build_report(run(model_s=0.001))
    assert report.verdict == "input-bound"
    says = r"'decode' still limits: the input keeps (7\.9|8\.0) of 8 CPUs busy; with twice as many CPUs"
    assert re.match(says, report.next), report.next
    assert "the model alone would take 32 000 samples/s" in end_card(report)
    full = build_report(run(model_s=0.001, workers=8))  # so it was before the first change, and the card says that
    assert full.changes and full.cause.startswith("the input keeps 8.0 of 8 CPUs busy")
    assert full.next == "'decode' still limits: more CPUs or a cheaper 'decode' would help, other numbers would not"


def test_more_cpus_are_not_advised_where_they_are_idle() -> None:
    """13 us of CPU in 1.4 ms, as of reads: with all of them in flight that can be, CPUs are not what is missing."""
    work = Work(0.0014, cpu_share=0.01, items_per_batch=32, workers=8, window=8, high=8)
    pipeline = FakePipeline({"interleave": work}, FakeMachine(), depth=2)
    loop, machine = FakeLoop(pipeline, model_s=0.0003), pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(mode="advise"), probe=machine, clock=machine.clock())
    loop.run(tuner, 5.0)
    card = end_card(build_report(tuner.summary()))
    assert "each item of 'interleave' waits 1.4 ms for its reads and computes 14 us" in card
    assert "CPUs" not in card.replace("more CPUs do not help", "") and "headroom" not in card


def test_what_more_workers_brought_is_read_from_the_decisions() -> None:
    def decision(before: int, after: int, effect: float | None, **other: int) -> dict[str, Any]:
        moved = {"before": {"decode": before, "read": 1}, "after": {"decode": after, "read": 1} | other}
        return {**moved, "applied": True, "effect": effect, "vetoes": []}

    summary = run(mode="observe", model_s=0.001, workers=2)
    for decisions, kind in (
        ([decision(2, 4, 1.01)], "serial"),
        ([decision(2, 4, 1.01), decision(4, 8, 1.3)], "workers"),
        ([decision(4, 5, 1.01)], "workers"),  # one more of four may be lost in the noise
        ([decision(2, 4, None)], "workers"),
        ([decision(2, 4, 1.01, read=2)], "workers"),
    ):
        assert build_report(replace(summary, decisions=tuple(decisions))).causes[0].kind == kind, decisions


def test_what_was_tried_in_vain_before_a_change_that_stayed_is_no_reason_for_what_was_before_it() -> None:
    tried = {
        "before": {"decode": 2},
        "after": {"decode": 4},
        "applied": True,
        "effect": 0.7,
        "vetoes": [],
        "reason": "",
    }
    summary = replace(run(mode="observe", model_s=0.001, workers=2), mode="tune", changes=2, decisions=(tried,))
    decode, *others = summary.stages
    for current, told in ((6, "computes for"), (2, "brought nothing when tried")):
        report = build_report(replace(summary, stages=(replace(decode, first=2, current=current), *others)))
        assert told in report.cause, (current, report.cause)


def test_versions_name_what_is_used_and_import_nothing() -> None:
    code = (
        "import sys, numpy; from intune_callbacks.record.fingerprint import versions as v; found = v(); "
        "print(*sorted(found)); print(*[m for m in ('torch', 'lightning', 'torchdata') if m in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).splitlines()
    assert out[0].split() == ["intune_callbacks", "numpy", "python"]
    assert out[1] == ""


def test_a_run_has_to_earn_back_the_start_of_workers_that_live_on() -> None:
    """None of the windows holds it, the whole run does."""
    summary = run(mode="observe")
    assert summary.after.measured is not None
    decode, *others = summary.after.measured.stages
    stages = (replace(decode, knob="DataLoader(num_workers={})", once_s=1.5), *others)
    measured = replace(summary.after.measured, stages=stages)

    def gain(steps: int, seam_s: float) -> float:
        whole = replace(WHOLE, steps=steps, seam_s=seam_s, paused_s=0.0)
        side = replace(summary.after, measured=measured)
        return (build_report(replace(summary, before=side, after=side, whole=whole)).advice or {"gain": 1.0})["gain"]

    long, short = gain(100_000, 1.5), gain(100, 1.5)
    assert long > 2.0 and 1.0 < short < 0.6 * long
    assert gain(100, 20.0) < short  # what its start takes in any case does not become less


def test_a_source_that_limits_is_what_to_change() -> None:
    """Its sentence says what would help: it does not stand behind `nothing to change`."""
    hint = Hint("from_generator makes one element at a time; several overlap", "", "serial", "from_generator")
    summary = run(mode="observe", model_s=0.001)
    seen = summary.after.measured
    assert seen is not None
    idle = replace(seen.rates["decode"], busy_frac=0.1, starved_frac=0.9)
    side = replace(summary.after, measured=replace(seen, rates={"decode": idle}))
    report = build_report(replace(summary, before=side, after=side, hints=(hint,)))
    assert report.next.startswith("the workers of 'decode' stand idle 90 % of the time: from_generator makes one ")
