"""The report: the fixed keys, honest numbers, and a card that says the verdict first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.report import build_report, end_card, write_report
from intune_callbacks.tuner import Tuner

KEYS = {
    *("verdict", "before", "after", "decisions", "mode", "mode_source", "stages", "versions", "auc", "frozen"),
    *("changes", "settled_after_s", "wall_s", "why", "next", "memory"),
}


def run(seconds: float = 20.0, model_s: float = 0.02, workers: int = 1, **config: Any) -> dict[str, Any]:
    """The summary of a run of one decode stage that eight CPUs could feed 80 batches/s."""
    pipeline = FakePipeline({"decode": Work(0.1, workers=workers, window=4 * workers)}, FakeMachine(), depth=2)
    loop, machine = FakeLoop(pipeline, model_s=model_s), pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(**config), probe=machine, clock=machine.clock())
    loop.run(tuner, seconds)
    tuner.close()
    return tuner.summary()


def test_the_fixed_keys_are_there_and_json_agrees(tmp_path: Path) -> None:
    report = build_report(run(), mode_source="argument", auc=0.71)
    assert set(report) >= KEYS
    for side in ("before", "after"):
        assert {"throughput_samples_per_s", "wait_frac", "allocation", "verdict"} <= set(report[side])
    assert (report["mode_source"], report["auc"]) == ("argument", 0.71)
    path = write_report(tmp_path / "new" / "folder", report)
    assert path.name == "report.json"
    assert json.loads(path.read_text()) == report
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_the_card_of_a_run_that_was_fed() -> None:
    report = build_report(run())
    card = end_card(report)
    lines = card.splitlines()
    assert lines[0].startswith("InTune  INPUT-BOUND -> COMPUTE-BOUND")
    assert f"{report['changes']} change" in lines[0]
    assert "settled after" in lines[0]
    assert "'decode'" in lines[1]
    assert lines[1].startswith("why     the trainer waited 80 % of each step on")
    assert lines[2].startswith("before  ")
    assert "decode 1 · prefetch 2" in lines[2]
    assert "RAM 1.0 of 64 GB" in lines[2]
    assert "wait 80 %" in lines[2] and "wait 0 %" in lines[3]
    assert "1 600 samples/s" in lines[3]
    assert f"decode {report['after']['allocation']['decode']}" in lines[3]
    assert "headroom" not in card and "the model alone" not in card
    assert lines[4].startswith("next    start the next run with decode ")
    assert max(len(line) for line in lines) < 120


def test_a_loop_that_does_not_wait_is_told_that_nothing_was_changed() -> None:
    card = end_card(build_report(run(model_s=0.5)))
    assert card.startswith("InTune  COMPUTE-BOUND ")
    assert "why     the input pipeline is not the bottleneck; nothing was changed" in card
    assert "before" not in card


def test_advice_says_the_numbers_to_set() -> None:
    report = build_report(run(mode="advise"))
    assert report["changes"] == 0
    assert report["next"].startswith("set decode ")
    assert "(was 1)" in report["next"]


def test_advice_is_in_the_words_of_the_users_pipeline() -> None:
    summary = run(mode="advise")
    knobs = {"decode": ".map(decode, num_parallel_calls={})", "prefetch": ".prefetch({})  # was tf.data.AUTOTUNE"}
    told = [entry | {"knob": knobs.get(entry["name"], "")} for entry in summary["stages"]]
    report = build_report(summary | {"stages": told})
    head, *code = report["next"].splitlines()
    assert head == "paste what is below, or let mode='tune' do it"
    assert code[0].startswith(".map(decode, num_parallel_calls=") and code[0].endswith(")  # was 1")
    assert code[1].startswith(".prefetch(") and code[1].endswith(")  # was tf.data.AUTOTUNE")
    card = end_card(report).splitlines()
    assert card[-3:] == [f"next    {head}", f"        {code[0]}", f"        {code[1]}"]


def test_an_observed_run_is_told_what_tuning_would_be() -> None:
    report = build_report(run(mode="observe"))
    assert report["next"] == "run with mode='tune', or mode='advise' to see what it would do"
    assert report["decisions"] == []


def test_a_run_that_was_too_short_says_so() -> None:
    report = build_report(run(seconds=1.0))
    assert report["verdict"] == "too short"
    card = end_card(report)
    assert "TOO SHORT" in card
    assert "not measured" in card


def test_a_note_is_what_to_do_next() -> None:
    assert end_card(build_report(run(), note="wrap the source in a ParallelMapper")).endswith("in a ParallelMapper")


def test_a_frozen_run_says_why() -> None:
    summary = run() | {"frozen": "OSError: gone"}
    card = end_card(build_report(summary))
    assert "frozen  OSError: gone" in card
    assert card.splitlines()[-1].startswith("next    the allocation stayed where it was")


def test_a_limit_of_the_machine_is_named() -> None:
    report = build_report(run(model_s=0.001))
    assert report["verdict"] == "input-bound"
    assert "'decode' still limits" in report["next"]


@pytest.mark.parametrize(("seconds", "told"), [(42.0, "42 s"), (185.0, "3 min 5 s"), (7800.0, "2 h 10 min")])
def test_durations_are_readable(seconds: float, told: str) -> None:
    assert told in end_card(build_report(run() | {"wall_s": seconds}))


def test_versions_name_what_is_used_and_import_nothing() -> None:
    code = (
        "import sys; from intune_callbacks.report import versions as v; found = v(); "
        "print(*sorted(found)); print(*[m for m in ('torch', 'lightning', 'torchdata') if m in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).splitlines()
    assert out[0].split() == ["intune_callbacks", "numpy", "python"]
    assert out[1] == ""


def test_the_gpus_share_stands_beside_the_wait() -> None:
    summary = run(mode="observe")
    summary["after"] = summary["after"] | {"wait_frac": 0.6, "exposed_wait_frac": 0.02}
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
    assert "warm_start" not in end_card(report | {"frozen": "ValueError: x"}, tmp_path)
    assert "warm_start" not in end_card(report | {"changes": 0}, tmp_path)


def test_a_window_is_shown_where_it_alone_changed() -> None:
    def entry(name: str, first: int, current: int, window_of: str | None = None) -> dict[str, Any]:
        return {"name": name, "first": first, "current": current, "window_of": window_of, "unit": "workers"}

    stages = [entry("read", 1, 8), entry("read.window", 2, 16, "read"), entry("parse", 1, 1)]
    stages.append(entry("parse.window", 2, 5, "parse"))
    card = end_card(build_report({**run(), "stages": stages}))
    assert "read 1 · parse 1 (window 2)" in card
    assert "read 8 · parse 1 (window 5)" in card
