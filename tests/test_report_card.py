"""The card says the verdict first, and of the whole run what a reader has to know."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from report_runs import WHOLE, run, slowed
from scripted import Script, tuner_of

from intune_callbacks.record.card import card_rows, end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Report, StageRow, write_report
from intune_callbacks.types import Hint
from intune_callbacks.words import COLUMNS, wrapped


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
    assert lines[5].endswith("\n1 600 samples/s at last, 1 405 in the whole run")
    assert lines[6].startswith("next    start the next run with decode ")
    assert max(len(line) for line in card.splitlines()) < 100


def test_figures_of_numbers_that_a_last_change_replaced_are_said_to_be_of_those() -> None:
    report = build_report(run())
    decode, *others = report.stages
    told = "measured with"
    assert told not in end_card(report)
    card = end_card(replace(report, stages=(replace(decode, current=decode.current + 1), *others)))
    after = card[card.index("after  ") : card.index("whole  ")]
    assert f"decode {decode.current + 1} · prefetch" in after.splitlines()[0]
    assert f"\n        {told} decode {decode.current}, for the last change came shortly before the end" in after


def test_why_a_run_that_still_waits_counts_as_fed_is_told() -> None:
    summary = run()
    why = build_report(summary).why
    told = (
        "the trainer waited 27 % of the time, but 2 % in most windows: there the input pipeline is not the bottleneck"
    )
    report = build_report(replace(summary, after=replace(summary.after, wait_frac=0.27, why=told)))
    assert report.why == f"{why}; afterwards {told}"
    gpu = replace(summary.after, wait_frac=0.27, exposed_wait_frac=0.01, why=told)
    assert build_report(replace(summary, after=gpu)).why == why


def test_a_loop_that_does_not_wait_is_told_that_nothing_was_changed() -> None:
    card = end_card(build_report(run(model_s=0.5)))
    assert card.startswith("InTune  COMPUTE-BOUND ")
    assert "why     the input pipeline is not the bottleneck; nothing was changed" in card
    assert "before" not in card


def test_a_balanced_run_is_not_said_to_have_no_bottleneck() -> None:
    report = build_report(run(model_s=0.5))
    some = replace(report, verdict="balanced", why="the trainer waited 18 % of each step; both are about equally fast")
    assert dict(card_rows(some))["why"] == some.why


def test_a_run_that_was_too_short_says_so() -> None:
    report = build_report(run(seconds=1.0))
    assert report.verdict == "too short"
    card = end_card(report)
    assert "TOO SHORT" in card
    assert "not measured" in card


def test_a_note_is_what_to_do_next() -> None:
    note = "wrap the source in a ParallelMapper"
    assert build_report(run(), note=note).next == f"nothing to change now; should the input limit: {note}"
    assert build_report(replace(run(), after=run().before), note=note).next.startswith(note)


def test_a_last_change_that_came_late_is_told_as_that() -> None:
    assert build_report(run(seconds=1.0)).next.endswith("nothing can be said about so few steps")
    summary = run()
    late = replace(summary, after=replace(summary.after, verdict="too short", measured=None))
    few = "too few steps came behind the last change to say what it brought"
    assert build_report(late).next == f"train longer: {few}"
    assert "INPUT-BOUND -> TOO SHORT" in end_card(build_report(late))
    fed = build_report(replace(late, before=replace(late.before, verdict="compute-bound", stage=None)))
    assert fed.next == f"keep your own numbers: {few}"  # more steps would not make it faster
    assert end_card(fed).startswith("InTune  COMPUTE-BOUND  ") and "TOO SHORT" not in end_card(fed)


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
            "1 600 samples/s while it runs, 800 with what is no step: the start, validation, checkpoints",
        ),
        # The starts of epochs are the larger part, and yet not half of what is lost.
        (
            {"seam_s": 4.5, "paused_s": 4.0},
            "1 600 samples/s while it runs, 800 with what is no step: the start, validation, checkpoints",
        ),
        ({"seam_s": 0.5, "paused_s": 0.1}, "1 600 samples/s at last, 800 in the whole run"),
        # An eighth of the time, of the half that is lost: it was mostly something else.
        ({"seam_s": 2.5, "paused_s": 0.0}, "1 600 samples/s at last, 800 in the whole run"),
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
    measured = replace(summary.after.measured, stages=(replace(first, startup_s=1.4, **knob), *others))
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
    # Where most of it is something else, the line is no remedy for it.
    few = replace(measured, stages=(replace(first, startup_s=0.001, **knob), *others), epoch_batches=30)
    before, after = (replace(side, measured=few) for side in (summary.before, summary.after))
    other = dict(card_rows(build_report(replace(summary, before=before, after=after))))
    assert other["whole"].endswith("\n160 samples/s while it runs, 80 with the start of each epoch")
    report = build_report(replace(summary, mode="advise"))
    head, *code = report.next.splitlines()
    assert code == ["DataLoader(num_workers=1, persistent_workers=True)  # was 1 and False"]
    assert "mode='tune'" not in head  # which keeps no workers from one epoch to the next, either


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


def test_a_change_after_few_slow_batches_is_explained() -> None:
    pipeline = FakePipeline({"decode": Work(0.5, cpu_share=0.1, window=2)}, FakeMachine(), depth=2)
    tuner = tuner_of(pipeline)
    FakeLoop(pipeline, model_s=0.05).run(tuner, 60.0)
    tuner.close()
    summary = tuner.summary()
    before = summary.before.measured
    assert summary.changes and before is not None and before.batches < 8
    rows = dict(card_rows(build_report(summary)))
    assert rows["InTune"].startswith("INPUT-BOUND -> COMPUTE-BOUND")
    assert re.fullmatch(r"the trainer waited \d\d % of each step on 'decode'", rows["why"])
    assert rows["cause"].startswith("each ")


def test_many_changes_with_few_steps_each_are_no_short_run() -> None:
    pipeline = FakePipeline({"read": Work(0.3, cpu_share=0.1, high=1)}, FakeMachine(), depth=2)
    tuner = tuner_of(pipeline, policy=Script(*({"prefetch": n} for n in range(3, 20))))
    FakeLoop(pipeline, model_s=0.05).run(tuner, 30.0)
    tuner.close()
    summary = tuner.summary()
    after = summary.after.measured
    assert summary.changes > 2 and after is not None and after.verdict == "too short"
    report = build_report(summary)
    assert report.verdict == "input-bound"
    assert report.next.startswith("'read' still limits: 'read' takes 300 ms for each batch and does one item at a time")
    assert report.advice is None


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


def test_hints_are_kept_and_those_that_matter_are_on_the_card() -> None:
    hints = Hint("shuffle holds all 50000 samples", ".shuffle(2048)", "shuffle"), Hint("two prefetches", "", "prefetch")
    report = build_report(replace(run(), whole=WHOLE, hints=hints))
    assert report.hints == hints
    assert report.to_json()["hints"][1] == {"what": "two prefetches", "line": "", "kind": "prefetch", "stage": ""}
    rows = dict(card_rows(report))
    assert rows["also"] == "shuffle holds all 50000 samples: the first batch came after 1.2 s (expected × 1.31)"
    assert "two prefetches" not in end_card(report)


@pytest.mark.parametrize(("seconds", "told"), [(42.0, "42 s"), (185.0, "3 min 5 s"), (7800.0, "2 h 10 min")])
def test_durations_are_readable(seconds: float, told: str) -> None:
    assert told in end_card(build_report(replace(run(), wall_s=seconds)))


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
    other = end_card(replace(report, next="'decode' still limits"), tmp_path)
    assert other.endswith(f'limits\n        begin the next run where this one ended: warm_start="{tmp_path}"')
    unmeasured = replace(report, after=replace(report.after, throughput_samples_per_s=None))
    assert "warm_start" not in end_card(unmeasured, tmp_path)
    # It is where it began: nothing was changed, or all of it was taken back.
    same = tuple(replace(stage, current=stage.first) for stage in report.stages)
    assert "warm_start" not in end_card(replace(report, stages=same), tmp_path)


def test_a_window_is_shown_where_it_alone_changed() -> None:
    def row(name: str, first: int, current: int, window_of: str | None = None) -> StageRow:
        return StageRow(name, "cpu", "workers", 1, 99, current, window_of=window_of, first=first)

    read, parse = (row("read", 1, 8), row("read.window", 2, 16, "read")), (row("parse", 1, 1),)
    stages = (*read, *parse, row("parse.window", 2, 5, "parse"))
    card = end_card(build_report(replace(run(), stages=stages)))
    assert "read 1 · parse 1 (window 2)" in card
    assert "read 8 · parse 1 (window 5)" in card
