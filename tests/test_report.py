"""The report: the fixed keys, honest numbers, and a card that says the verdict first."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.card import card_rows, end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Report, Span, StageRow, write_report
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Hint
from intune_callbacks.words import COLUMNS, wrapped

KEYS = {
    *("verdict", "before", "after", "decisions", "mode", "mode_source", "stages", "versions", "auc", "frozen"),
    *("changes", "settled_after_s", "wall_s", "why", "next", "memory"),
}


def run(seconds: float = 20.0, model_s: float = 0.02, workers: int = 1, **config: Any) -> Report:
    """The summary of a run of one decode stage that eight CPUs could feed 80 batches/s."""
    pipeline = FakePipeline({"decode": Work(0.1, workers=workers, window=4 * workers)}, FakeMachine(), depth=2)
    loop, machine = FakeLoop(pipeline, model_s=model_s), pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(**config), probe=machine, clock=machine.clock())
    loop.run(tuner, seconds)
    tuner.close()
    return tuner.summary()


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


def unfolded(report: Report) -> list[str]:
    """Return the rows of the end card, each sentence in one line."""
    return [f"{label:<6}  {text}" for label, text in card_rows(report)]


def test_the_card_of_a_run_that_was_fed() -> None:
    report = build_report(run())
    lines = unfolded(report)
    assert lines[0].startswith("InTune  INPUT-BOUND -> COMPUTE-BOUND")
    assert f"{report.changes} change" in lines[0]
    assert "settled after" in lines[0]
    assert "'decode'" in lines[1]
    assert lines[1].startswith("why     the trainer waited 80 % of each step on")
    assert lines[2].startswith(
        "cause   each batch of 'decode' computes for 100 ms in 1 worker, while 7.0 of 8 CPUs are f"
    )
    assert lines[3].startswith("before  ")
    assert "decode 1 · prefetch 2" in lines[3]
    assert "RAM 1.0 of 64 GB" in lines[3]
    assert "wait 80 %" in lines[3] and "wait 0 %" in lines[4]
    assert "1 600 samples/s" in lines[4]
    assert f"decode {report.after.allocation['decode']}" in lines[4]
    card = end_card(report)
    assert "headroom" not in card and "the model alone" not in card
    assert lines[5].startswith("whole   ") and "samples/s in 20 s" in lines[5]
    assert lines[5].endswith("\n1 600 samples/s at last, 1 341 in the whole run")
    assert lines[6].startswith("next    start the next run with decode ")
    assert max(len(line) for line in card.splitlines()) < 100


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


def test_a_loop_that_does_not_wait_is_told_that_nothing_was_changed() -> None:
    card = end_card(build_report(run(model_s=0.5)))
    assert card.startswith("InTune  COMPUTE-BOUND ")
    assert "why     the input pipeline is not the bottleneck; nothing was changed" in card
    assert "before" not in card


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


def test_advice_says_the_numbers_to_set() -> None:
    report = build_report(run(mode="advise"))
    assert report.changes == 0
    assert report.next.startswith("set decode ")
    assert "(was 1)" in report.next


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


def test_a_run_that_was_too_short_says_so() -> None:
    report = build_report(run(seconds=1.0))
    assert report.verdict == "too short"
    card = end_card(report)
    assert "TOO SHORT" in card
    assert "not measured" in card


def test_a_note_is_what_to_do_next() -> None:
    assert end_card(build_report(run(), note="wrap the source in a ParallelMapper")).endswith("in a ParallelMapper")


def test_a_frozen_run_says_why() -> None:
    summary = replace(run(), frozen="OSError: gone")
    card = end_card(build_report(summary))
    assert "frozen  OSError: gone" in card
    assert card.splitlines()[-1].startswith("next    the allocation stayed where it was")


@pytest.mark.parametrize(("own_bytes", "told"), [(85e6, "85 MB"), (1.25e9, "1.2 GB"), (1e6, ""), (None, "")])
def test_what_worker_processes_hold_is_told_where_it_is_much(own_bytes: float | None, told: str) -> None:
    summary = run()
    summary = replace(summary, memory=replace(summary.memory, worker_bytes=own_bytes))
    rows = [text for label, text in card_rows(build_report(summary)) if label == "also"]
    assert rows == ([f"each worker process holds {told} of memory of its own"] if told else [])


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


WHOLE = Span(
    *(30000, None, 20.0, 1.0, 9.0), epochs=6, throughput_samples_per_s=800.0, wait_frac=0.4, first_batch_s=1.25
)


def test_the_whole_run_is_the_figure() -> None:
    report = build_report(replace(run(), whole=WHOLE))
    head, *rest = end_card(report).splitlines()
    assert re.split(r"\s{2,}", head)[-1].startswith("800 samples/s in 20 s, ")
    at = next(i for i, line in enumerate(rest) if line.startswith("whole "))
    assert rest[at] == "whole   800 samples/s in 20 s   wait 40 %   first batch after 1.2 s"
    assert rest[at + 1] == "        1 600 samples/s while it runs, 800 with the start of each epoch"
    assert report.whole == WHOLE
    assert "whole" not in end_card(build_report(replace(run(), whole=None)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"throughput_samples_per_s": 1500.0}, None),
        (
            {"seam_s": 1.0, "paused_s": 9.0},
            "1 600 samples/s while it runs, 800 with its start and its pauses",
        ),
        ({"seam_s": 0.5, "paused_s": 0.1}, "1 600 samples/s at last, 800 in the whole run"),
    ],
)
def test_what_lies_between_the_two_figures(changes: dict[str, float], told: str | None) -> None:
    rows = dict(card_rows(build_report(replace(run(), whole=replace(WHOLE, **changes)))))
    assert rows["whole"].partition("\n")[2] == (told or "")


def test_the_start_of_workers_each_epoch_is_said_with_the_line() -> None:
    summary = replace(run(mode="observe", model_s=0.2), whole=replace(WHOLE, throughput_samples_per_s=80.0))
    knob: dict[str, Any] = {"knob": "DataLoader(num_workers={})"}
    assert summary.after.measured is not None
    first, *others = summary.after.measured.stages
    measured = replace(summary.after.measured, stages=(replace(first, startup_s=0.1, **knob), *others))
    before, after = (replace(side, measured=measured) for side in (summary.before, summary.after))
    rows_with_knob = (replace(summary.stages[0], **knob), *summary.stages[1:])
    summary = replace(summary, before=before, after=after, stages=rows_with_knob)
    rows = dict(card_rows(build_report(summary)))
    assert rows["whole"].endswith(
        "\n160 samples/s while it runs, 80 with the start of each epoch: persistent_workers=True"
    )
    folded = wrapped(end_card(build_report(summary))).splitlines()
    assert "persistent_workers=True" in " ".join(folded) and max(map(len, folded)) <= COLUMNS
    assert rows["also"].startswith("each epoch begins with 1.5 s of starting 1 worker anew, ")
    report = build_report(replace(summary, mode="advise"))
    assert report.next.splitlines()[1:] == ["DataLoader(num_workers=1, persistent_workers=True)  # was 1"]


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


def test_a_run_that_became_slower_is_told_first_with_the_remedy() -> None:
    report = build_report(slowed())
    assert report.verdict == "slower than before"
    lines = unfolded(report)
    assert lines[0].startswith("InTune  SLOWER THAN BEFORE  ")
    assert re.fullmatch(
        r"why     1 \d{3} samples/s after 2 \d{3} before \(× 0\.66\): InTune set decode 8 -> 2, after 3 changes",
        lines[1],
    )
    assert lines[2].startswith("cause   the input keeps ")
    assert lines[-1] == "next    keep your own numbers (decode 8): run with mode='observe', which changes nothing"
    assert report.advice is None


def test_a_run_that_memory_made_slower_is_not_told_to_take_its_own_numbers_again() -> None:
    summary = slowed()
    alarm = {"before": {}, "after": {}, "vetoes": [], "effect": None, "reason": "memory alarm: 9 of 10 GB used"}
    # After many changes the product of what each brought says little.
    after = replace(summary.after, brought=1.2)
    report = build_report(replace(summary, after=after, decisions=({**alarm, "applied": True},)))
    assert report.verdict == "slower than before"
    assert report.next.startswith("memory was short: make room in it or, ")
    report = build_report(replace(summary, decisions=({**alarm, "applied": False},)))
    assert report.next.startswith("keep your own numbers (decode 8): ")


def test_a_slower_run_whose_numbers_are_back_is_not_blamed_on_them() -> None:
    report = build_report(slowed(current=8))
    assert "InTune went back to the numbers of the start, after 3 changes" in report.why
    assert report.next.startswith("run with mode='observe', which changes nothing, and see whether it is faster")


def test_noise_is_not_slower(tmp_path: Path) -> None:
    assert build_report(slowed(0.98)).verdict != "slower than before"
    assert build_report(replace(slowed(0.66), changes=0)).verdict != "slower than before"
    brief = slowed(verdict="too short")  # a few batches that were in stock
    assert build_report(brief).verdict != "slower than before"
    assert build_report(slowed(0.9)).verdict == "slower than before"
    noisy = slowed(0.9, noise=0.06)
    assert build_report(noisy).verdict != "slower than before"
    (tmp_path / "found.yaml").write_text("")
    assert "warm_start" not in end_card(build_report(slowed()), tmp_path)
    assert "warm_start" in end_card(build_report(noisy), tmp_path)


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
        (2, 0.09, 5.0, False),
        (2, 0.09, 0.1, True),  # workers may have taken the model's CPUs
    ],
)
def test_time_that_the_model_takes_is_blamed_only_on_workers_that_crowd_it(
    current: int, model_s: float, idle: float, blamed: bool
) -> None:
    summary = slowed(current=current)
    seen = summary.after.measured
    assert seen is not None
    slow = replace(seen, period_s=seen.period_s + 0.1, model_s=seen.model_s + model_s, cpus_idle=idle)
    report = build_report(replace(summary, after=replace(summary.after, brought=0.5, measured=slow)))
    assert (report.verdict == "slower than before") is blamed


def test_items_that_become_heavier_are_not_blamed_on_the_changes_that_follow() -> None:
    report = at_other_work(later_s=0.02, heavier=40.0)
    first, last = report.before.throughput_samples_per_s, report.after.throughput_samples_per_s
    assert first and last and last < 0.8 * first
    assert report.verdict != "slower than before"
    assert "; later it became slower, but not by a change" in report.why


def test_hints_are_kept_and_those_that_matter_are_on_the_card() -> None:
    hints = Hint("shuffle holds all 50000 samples", ".shuffle(2048)", "shuffle"), Hint("two prefetches", "", "prefetch")
    report = build_report(replace(run(), whole=WHOLE, hints=hints))
    assert report.hints == hints
    assert report.to_json()["hints"][1] == {"what": "two prefetches", "line": "", "kind": "prefetch", "stage": ""}
    rows = dict(card_rows(report))
    assert rows["also"] == "shuffle holds all 50000 samples: the first batch came after 1.2 s (expected × 1.35)"
    assert "two prefetches" not in end_card(report)


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


@pytest.mark.parametrize(("seconds", "told"), [(42.0, "42 s"), (185.0, "3 min 5 s"), (7800.0, "2 h 10 min")])
def test_durations_are_readable(seconds: float, told: str) -> None:
    assert told in end_card(build_report(replace(run(), wall_s=seconds)))


def test_versions_name_what_is_used_and_import_nothing() -> None:
    code = (
        "import sys, numpy; from intune_callbacks.record.versions import versions as v; found = v(); "
        "print(*sorted(found)); print(*[m for m in ('torch', 'lightning', 'torchdata') if m in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).splitlines()
    assert out[0].split() == ["intune_callbacks", "numpy", "python"]
    assert out[1] == ""


def test_the_gpus_share_stands_beside_the_wait() -> None:
    summary = run(mode="observe")
    summary = replace(summary, after=replace(summary.after, wait_frac=0.6, exposed_wait_frac=0.02))
    assert "wait 60 % (GPU idle 2 %)" in end_card(build_report(summary))


def test_the_source_of_the_mode_is_told_when_somebody_chose_it() -> None:
    assert "mode  " not in end_card(build_report(run()))
    assert "mode    observe, from INTUNE_MODE" in end_card(build_report(run(mode="observe"), mode_source="INTUNE_MODE"))


def test_the_card_names_the_files_that_were_written(tmp_path: Path) -> None:
    report = build_report(run())
    assert "files" not in end_card(report, tmp_path)
    write_report(tmp_path, report)
    (tmp_path / "history.jsonl").write_text("")
    assert f"files   report.json, history.jsonl in {tmp_path}" in end_card(report, tmp_path)
    assert "warm_start" not in end_card(report, tmp_path)
    (tmp_path / "found.yaml").write_text("")
    assert end_card(report, tmp_path).endswith(f'\n        or begin it where this one ended: warm_start="{tmp_path}"')
    assert "warm_start" not in end_card(replace(report, frozen="ValueError: x"), tmp_path)
    assert "warm_start" not in end_card(replace(report, changes=0), tmp_path)


def test_a_window_is_shown_where_it_alone_changed() -> None:
    def row(name: str, first: int, current: int, window_of: str | None = None) -> StageRow:
        return StageRow(name, "cpu", "workers", 1, 99, current, window_of=window_of, first=first)

    stages = (
        row("read", 1, 8),
        row("read.window", 2, 16, "read"),
        row("parse", 1, 1),
        row("parse.window", 2, 5, "parse"),
    )
    card = end_card(build_report(replace(run(), stages=stages)))
    assert "read 1 · parse 1 (window 2)" in card
    assert "read 8 · parse 1 (window 5)" in card
