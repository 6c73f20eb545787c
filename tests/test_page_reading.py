"""What a run left is read however it ended: missing, old, cut off, or nonsense; what is missing is said."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from page_runs import make_run

from intune_callbacks.errors import ConfigError
from intune_callbacks.record.card import end_card
from intune_callbacks.record.running import Rank
from intune_callbacks.show.page import html
from intune_callbacks.show.page.columns import averaged, thin
from intune_callbacks.show.page.comparison import two_runs
from intune_callbacks.show.page.runs import Run, read
from intune_callbacks.show.watch_view import line, view


def everything(run: Run) -> str:
    """The page of a run, and of the same as two ranks, without plotly."""
    pytest.importorskip("jinja2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "_plotly_source", lambda: "")
        return html.page_html([run]) + html.page_html([replace(run, rank=rank) for rank in range(2)])


def test_a_run_that_was_killed_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    report = make_run(tmp_path)
    (tmp_path / "report.json").unlink()
    history = tmp_path / "history.jsonl"
    history.write_text(history.read_text()[:-200])
    (run,) = read(tmp_path)
    assert len(run.lines) == 59
    assert any("1 line of history.jsonl could not be read" in note for note in run.notes)
    assert any("no whole report.json" in note for note in run.notes)
    assert run.report.changes == report["changes"]
    assert run.report.before.allocation == report["before"]["allocation"]
    first, found = report["before"]["throughput_samples_per_s"], run.report.before.throughput_samples_per_s
    assert found == pytest.approx(first, rel=0.2)
    assert {s.name: s.unit for s in run.report.stages} == {s["name"]: s["unit"] for s in report["stages"]}
    assert "NOT FINISHED" in everything(run)
    assert end_card(run.report).startswith("InTune  NOT FINISHED")


def test_without_a_history_the_report_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "history.jsonl").unlink()
    (run,) = read(tmp_path)
    assert run.notes == ("no history.jsonl: there is no course to draw",)
    assert "decode" in everything(run)


def test_only_the_last_fit_of_a_folder_used_again_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path, 30)
    make_run(tmp_path, 20)
    (run,) = read(tmp_path)
    assert len(run.lines) == 20
    assert any(note.startswith("30 decisions of earlier fits") for note in run.notes)


def test_a_half_written_report_is_said_to_be(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = tmp_path / "report.json"
    path.write_text(path.read_text()[:500])
    (run,) = read(tmp_path)
    assert any("report.json could not be read" in note for note in run.notes)
    assert "NOT FINISHED" in everything(run)


def test_an_older_report_lacks_fields_and_is_shown(tmp_path: Path) -> None:
    report = make_run(tmp_path)
    for key in ("why", "next", "settled_after_s", "memory", "mode_source", "policy", "wall_s"):
        del report[key]
    del report["before"]["model_s"], report["after"]["stage"], report["stages"][0]["first"]
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert "–" in everything(read(tmp_path)[0])


def test_ranks_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        make_run(tmp_path / f"rank{rank}", 5)
    (tmp_path / "rank_notes").mkdir()
    (tmp_path / "rank7").mkdir()
    report = json.loads((tmp_path / "rank0" / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(report | {"auc": 0.75}))
    runs = read(tmp_path)
    assert [run.rank for run in runs] == [0, 2, 10]
    assert runs[0].report.auc == 0.75


def test_a_wrong_folder_is_named_and_the_right_one_suggested(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; expected the run_dir"):
        read(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"expected report\.json or history\.jsonl in it, found neither"):
        read(tmp_path)
    make_run(tmp_path / "night", 5)
    with pytest.raises(ConfigError, match=r"did you mean '.*night'"):
        read(tmp_path)


def test_an_allocation_of_nonsense_is_left_out(tmp_path: Path) -> None:
    line = {"step": 1, "observation": {}, "before": {}, "after": {"read": {}, "parse": [], "decode": 3}}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    (run,) = read(tmp_path)
    assert run.report.after.allocation == {"decode": 3}
    assert [stage.name for stage in run.report.stages] == ["decode"]
    assert everything(run)


PLAIN = some.none() | some.booleans() | some.integers(-9, 9) | some.floats() | some.text(max_size=5)
ANY = some.recursive(
    PLAIN, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=3), inner)
)
KEYS = ("step", "at_s", "observation", "before", "after", "granted", "vetoes", "reason", "applied", "effect")
SEEN = ("samples_per_s", "wait_frac", "rates", "cpus", "memory_used_bytes", "elapsed_s", "memory_limit_bytes")
INNER = some.dictionaries(some.sampled_from(SEEN), ANY | some.dictionaries(some.sampled_from("ab"), ANY))
LINE = some.dictionaries(some.sampled_from(KEYS), ANY | INNER | some.dictionaries(some.sampled_from("ab"), ANY))
# What is read as a decision, whatever else is in it.
STEP = some.integers(0, 99)
DECISION = some.builds(lambda line, step, seen: {**line, "step": step, "observation": seen}, LINE, STEP, INNER)
TOLD = (
    "verdict",
    "next",
    "why",
    "whole",
    "before",
    "after",
    "stages",
    "memory",
    "versions",
    "decisions",
    "changes",
    "frozen",
    "ranks",
    "auc",
    "wall_s",
    "settings",
    "warm_start",
)
STAGE = some.dictionaries(some.sampled_from(("name", "unit", "first", "current", "window_of")), ANY)
SIDE = some.dictionaries(some.sampled_from(("allocation", "verdict", "stage", "wait_frac", "model_s")), ANY)
REPORT = some.dictionaries(some.sampled_from(TOLD), ANY | SIDE | some.lists(STAGE, max_size=3))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(lines=[{"step": 0, "observation": {"wait_frac": -2}}], report=None)
@given(lines=some.lists(DECISION | LINE | ANY, max_size=5), report=some.none() | REPORT | ANY)
def test_whatever_is_in_the_files_something_is_shown(tmp_path: Path, lines: list[Any], report: Any) -> None:
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "report.json").write_text(json.dumps(report))
    (run,) = read(tmp_path)
    assert everything(run)
    assert two_runs(run, run)
    assert end_card(run.report)
    watched = Rank(tmp_path)
    for decision in watched.read():
        assert line(watched, decision)
    if watched.decisions:
        assert view([watched], 0.0) and view(5 * [watched], 0.0) and watched.verdict()


@pytest.mark.parametrize("name", ["history.jsonl", "report.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "circle", "deep"])
def test_what_is_no_file_is_said_to_be_none(name: str, kind: str, tmp_path: Path) -> None:
    make_run(tmp_path, 5)
    path = tmp_path / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # whoever opens it waits for a writer
    elif kind == "circle":
        path.symlink_to(path)
    else:
        path.write_text(100_000 * "[" + "\n")
    (run,) = read(tmp_path)
    assert any(name in note for note in run.notes)
    assert everything(run) and end_card(run.report)
    watched = Rank(tmp_path)
    assert len(watched.read()) == (0 if name == "history.jsonl" else 5)
    assert watched.is_over in (True, False)


@given(
    columns=some.lists(some.lists(some.none() | some.floats(-9, 9), min_size=50, max_size=50), min_size=1, max_size=3),
    must=some.sets(some.integers(0, 60)),
)
def test_thinning_keeps_peaks_ends_and_what_must_stay(columns: list[list[float | None]], must: set[int]) -> None:
    kept = thin(columns, must, 20)
    assert kept == sorted(set(kept))
    assert {index for index in must if index < 50} <= set(kept) or len(kept) == 50
    for column in columns:
        known = [value for value in column if value is not None]
        shown = [column[index] for index in kept if column[index] is not None]
        if known:
            assert (max(shown), min(shown)) == (max(known), min(known))


def test_what_is_short_is_not_thinned() -> None:
    assert thin([[1.0, None, 3.0]], (), 3) == [0, 1, 2]
    assert averaged([[1.0, None, 3.0, 5.0]], 2) == [[1.0, 4.0]]
    assert averaged([[1.0, 2.0]], 2) == [[1.0, 2.0]]
