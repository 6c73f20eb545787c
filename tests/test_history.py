"""Decisions: one JSON line each, with six digits and no infinities, whatever happens to the process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import observation

from intune_callbacks.record import history as history_module
from intune_callbacks.record.before_after import describe
from intune_callbacks.record.history import Decision, History, Tail
from intune_callbacks.record.report import Report
from intune_callbacks.types import Stage, StageRates

STAGE = Stage("decode", "cpu", "workers", 1, 8, 2)
RATES = StageRates(30, 1.0, 1 / 3, 0.3, 0.5, 0.9, 0.05, 0.05, 0.25, 1e6, 0.0)


def decision(step: int = 100, **changes: object) -> Decision:
    seen = observation([STAGE], rates={"decode": RATES}, step=step)
    return replace(Decision(seen, {"decode": 2}, {"decode": 2}, reason="holding"), **changes)  # type: ignore[arg-type]


def test_one_line_per_decision(tmp_path: Path) -> None:
    path = tmp_path / "run" / "history.jsonl"
    history = History(path)
    history.add(decision(10))
    history.add(decision(20, after={"decode": 4}, proposed={"decode": 4}, applied=True, vetoes=("no",), effect=1.5))
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["step"], first["applied"], first["effect"]) == (10, False, None)
    assert (second["before"], second["after"]) == ({"decode": 2}, {"decode": 4})
    assert (second["proposed"], second["vetoes"], second["effect"]) == ({"decode": 4}, ["no"], 1.5)
    assert second["observation"]["rates"]["decode"]["service_s"] == 0.333333
    assert second["observation"]["samples_per_s"] == 320.0
    assert set(first) == set(second)


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for step in (1, 2):
        History(path).add(decision(step))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_infinities_become_null(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    seen = observation([STAGE], rates={"decode": replace(RATES, service_s=math.nan)}, model_s=math.inf)
    History(path).add(decision(observation=seen))
    line = json.loads(path.read_text())
    assert line["observation"]["model_s"] is None
    assert line["observation"]["rates"]["decode"]["service_s"] is None


def test_times_keep_their_milliseconds_on_a_machine_that_has_been_up_for_long() -> None:
    seen = replace(observation([STAGE]), at_s=8_640_000.1234)
    assert decision(observation=seen).to_json()["at_s"] == 8_640_000.123


def test_memory_is_bounded_but_events_are_kept() -> None:
    history = History()
    history.add(decision(0, proposed={"decode": 4}))
    for step in range(1, 1501):
        history.add(decision(step))
    assert len(history.decisions) == 1001
    assert history.decisions[0].observation.step == 0
    assert [d.observation.step for d in history.events] == [0]
    assert history.decisions[-1].observation.step == 1500


def test_a_file_that_cannot_be_written_costs_the_file_and_is_said_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    history = History(blocked / "history.jsonl")
    with pytest.warns(RuntimeWarning, match="writes no more decisions to .*file"):
        history.add(decision(0))
    history.add(decision(1))
    assert len(history.decisions) == 2


def test_a_month_of_standing_vetoes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "WRITTEN", 100)
    history = History(tmp_path / "history.jsonl")
    for step in range(20_000):
        history.add(decision(step, proposed={"decode": 4}))
    steps = [d.observation.step for d in history.events]
    assert steps == [*range(history_module.FIRST), *range(20_000 - history_module.REMEMBERED, 20_000)]
    written = [json.loads(line)["step"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert written[:102] == [*range(101), 102]
    assert written == sorted(set(written))
    assert len(written) < 1000
    history.add(decision(20_001, proposed={"decode": 4}, applied=True))
    assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1])["step"] == 20_001


def test_one_reader_counts_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    tail = Tail(path)
    assert tail.read() == ([], True)
    for step in (1, 2, 3, 1, 2):  # two fits in one file
        History(path).add(decision(step))
    new, anew = tail.read()
    assert ([line["step"] for line in new], anew) == ([1, 2], True)
    assert (tail.earlier, tail.unread, tail.is_cut) == (3, 0, False)
    lines = path.read_text()
    for more, is_cut in (("[]\n{}\n", False), ("[]\n{}\n" + lines[:40], True)):
        path.write_text(lines + more)
        assert tail.read() == ([], False)
        assert (tail.unread, tail.is_cut) == (2, is_cut)
    assert Tail(path).read()[0] == new


def test_describe_takes_medians_and_the_last_allocation() -> None:
    windows = [observation([STAGE], samples_per_s=rate, batches=20) for rate in (100.0, 300.0, 110.0)]
    windows.append(observation([replace(STAGE, current=5)], samples_per_s=120.0, wait_frac=0.9))
    told = describe(windows)
    assert told.throughput_samples_per_s == 115.0
    assert told.wait_frac == 0.5
    assert told.allocation == {"decode": 5}
    assert told.verdict == "input-bound"
    assert told.windows == 4


def test_describe_nothing() -> None:
    told = describe([])
    assert told.verdict == "too short"
    assert told.throughput_samples_per_s is None
    assert told.allocation == {}
    json.dumps(Report(after=told).to_json(), allow_nan=False)
