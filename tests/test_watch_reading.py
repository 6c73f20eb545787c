"""What `intune watch` reads of a run: its files as they grow, are cut, or were left by another."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
from watched_runs import Run

from intune_callbacks.record.process import this_process
from intune_callbacks.record.running import Job, Rank


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = Run(tmp_path_factory.mktemp("run")).decide(8)
    run.close()
    return run.history.read_text().splitlines(keepends=True)


def test_a_line_is_read_when_it_is_complete(tmp_path: Path, lines: list[str]) -> None:
    rank, history = Rank(tmp_path), tmp_path / "history.jsonl"
    assert rank.read() == []
    text = "".join(lines[:3])
    seen = []
    for end in range(0, len(text) + 97, 97):
        history.write_text(text[:end])
        seen += [decision["step"] for decision in rank.read()]
    assert seen == [json.loads(line)["step"] for line in lines[:3]]


def test_what_is_no_decision_is_passed_over(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "history.jsonl").write_text(lines[0] + lines[1][:50] + "\n" + "[]\n\n" + lines[2])
    assert [d["step"] for d in Rank(tmp_path).read()] == [json.loads(line)["step"] for line in (lines[0], lines[2])]


def test_a_file_that_was_cut_is_read_again(tmp_path: Path, lines: list[str]) -> None:
    rank, history = Rank(tmp_path), tmp_path / "history.jsonl"
    history.write_text("".join(lines))
    assert len(rank.read()) == len(lines)
    history.write_text(lines[0])
    assert len(rank.read()) == len(rank.decisions) == 1
    assert rank.change is None


def test_what_an_earlier_run_of_more_ranks_has_left_is_not_shown(tmp_path: Path, lines: list[str]) -> None:
    line = json.dumps(json.loads(lines[0]) | {"process": this_process()}) + "\n"  # of one that is still there
    for name, over in (("rank0", False), ("rank1", False), ("rank2", True), ("rank10", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "history.jsonl").write_text(line)
        if over:
            (tmp_path / name / "report.json").write_text("{}")
    job = Job(tmp_path)
    job.read()
    assert [rank.name for rank in job.ranks] == ["rank0", "rank1", "rank10"]
    assert not job.is_over
    for name in ("rank0", "rank1", "rank10"):
        (tmp_path / name / "report.json").write_text("{}")
    assert job.is_over


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_many_ranks_are_a_table(tmp_path: Path, lines: list[str]) -> None:
    from rich.console import Console

    from intune_callbacks.show.watch_view import view

    for number in range(6):
        (tmp_path / f"rank{number}").mkdir()
        (tmp_path / f"rank{number}" / "history.jsonl").write_text("".join(lines))
    job = Job(tmp_path)
    job.read()
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(job.ranks, time.time()))
    console.file.close()
    shown = console.export_text()
    assert all(f"rank{number}" in shown for number in range(6))
    assert len(shown.splitlines()) < 16
