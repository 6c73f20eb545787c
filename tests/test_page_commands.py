"""`intune report` and `intune compare`: what they print and write; and the page that a fit leaves behind."""

from __future__ import annotations

import json
import logging
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from page_runs import make_run

from intune_callbacks import cli
from intune_callbacks.errors import install_line
from intune_callbacks.record.card import end_card
from intune_callbacks.record.report import Report
from intune_callbacks.show.page import commands
from intune_callbacks.show.page.commands import at_the_end
from intune_callbacks.words import COLUMNS, duration, wrapped


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """A browser that writes down what it is asked to open."""
    told = tmp_path / "opened.txt"
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    browser = webbrowser.GenericBrowser([sys.executable, "-c", code, str(told), "%s"])
    webbrowser.register("told", None, browser, preferred=True)
    return told


def test_report_prints_the_card_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    report = make_run(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(wrapped(end_card(Report.from_json(report))))
    assert str(tmp_path / "report.html") in printed
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob("*.partial"))


def test_of_a_run_that_was_killed_is_told_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    (tmp_path / "report.json").unlink()
    history = tmp_path / "history.jsonl"
    line = history.read_text().splitlines()[0]
    seconds = json.loads(line)["observation"]["elapsed_s"]
    history.write_text(line + "\n")
    cli.main(["report", str(tmp_path)])
    *lines, _, page = capsys.readouterr().out.splitlines()
    assert "the page is in" in page
    assert f"NOT FINISHED                {duration(seconds)}, nothing was changed" in lines[0]
    assert not [line for line in lines if line.startswith("mode")] and max(map(len, lines)) <= COLUMNS


def test_report_writes_where_it_is_told_and_opens_it(tmp_path: Path, opened: Path) -> None:
    pytest.importorskip("plotly")
    make_run(tmp_path / "run", 5)
    out = tmp_path / "new" / "page.html"
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(out), "--open"]) == 0
    assert out.exists() and not (tmp_path / "run" / "report.html").exists()
    assert opened.read_text() == out.as_uri()


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    make_run(tmp_path / "run", 5)
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "file" / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report", "RUN", "--out"], ["compare", "RUN", "RUN", "--html"]])
def test_a_link_is_written_through(words: list[str], tmp_path: Path) -> None:
    """What is no file, as /dev/stdout, is not replaced by one."""
    pytest.importorskip("plotly")
    make_run(tmp_path / "run", 5)
    link = tmp_path / "page.html"
    link.symlink_to("elsewhere.html")
    for _ in range(2):
        assert cli.main([str(tmp_path / "run") if word == "RUN" else word for word in words] + [str(link)]) == 0
        assert link.is_symlink() and "plotly" in (tmp_path / "elsewhere.html").read_text()


def test_a_report_of_another_program_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "report.json").write_text('{"loss": [1, 2], "accuracy": 0.5}')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "report.json is not one of InTune" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_without_a_package_the_card_is_printed_and_the_line_of_pip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in ("plotly", "jinja2"):
        pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{package}.offline", raising=False)
    report = make_run(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(wrapped(end_card(Report.from_json(report))))
    assert f"{package} is not installed; run: {install_line('report')}" in printed.err
    assert at_the_end(tmp_path) is None
    assert not (tmp_path / "report.html").exists()


def test_a_wrong_directory_ends_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["report", str(tmp_path / "gone")], ["compare", str(tmp_path), str(tmp_path)]):
        assert cli.main(words) == 2
        printed = capsys.readouterr().err
        assert "expected" in printed and "Traceback" not in printed


@pytest.mark.parametrize("words", [["report", "DIR"], ["compare", "DIR", "DIR"], ["watch", "DIR", "--wait", "0"]])
def test_a_folder_that_may_not_be_read_ends_without_a_traceback(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Path.stat

    def stat(path: Path, *given: Any, **named: Any) -> Any:
        if tmp_path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stock(path, *given, **named)

    monkeypatch.setattr(Path, "stat", stat)
    assert cli.main([str(tmp_path) if word == "DIR" else word for word in words]) == 2
    assert f"this process may not read {tmp_path}" in capsys.readouterr().err


def test_compare_names_no_setting_that_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = make_run(tmp_path / "one", 30)
    values = {"policy": "dqn", "cpus": None, "warmup_batches": 20}
    one = {name: {"value": value, "source": "default"} for name, value in values.items()}
    other = {name: {"value": value, "source": "recipe"} for name, value in values.items()}
    other["warmup_batches"]["value"] = 5
    for given, expected in ((other, ["warmup_batches"]), (one, []), ({}, [])):  # the last of a run that was not tuned
        for name, settings in (("one", one), ("two", given)):
            (tmp_path / name).mkdir(exist_ok=True)
            told = report | {"settings": settings, "mode_source": f"of {name}"}
            (tmp_path / name / "report.json").write_text(json.dumps(told))
        assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in printed if line.endswith("differs")] == expected


def test_compare_prints_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, on = tmp_path / "off", tmp_path / "on"
    first, second = make_run(off, 40, mode="observe"), make_run(on, 40, memory_soft_limit=0.8)
    older = second | {"versions": second["versions"] | {"numpy": "1.26.0"}}
    for folder, report, rate in ((off, first, 100.0), (on, older, 150.0)):
        report["whole"] = {"throughput_samples_per_s": rate, "seam_s": 4.0}
        (folder / "report.json").write_text(json.dumps(report))
    assert cli.main(["compare", str(off), str(on)]) == 0
    lines = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    rates = [side["after"]["throughput_samples_per_s"] for side in (first, second)]
    assert lines["throughput, samples/s"][-2:] == ["×", f"{rates[1] / rates[0]:.2f}"]
    assert lines["mode"] == ["observe", "tune", "differs"]
    assert lines["numpy"] == [first["versions"]["numpy"], "1.26.0", "differs"]
    assert lines["memory soft limit"] == ["0.9", "0.8", "differs"]
    assert lines["changes"] == ["0", str(second["changes"])]
    assert lines["samples over wall, samples/s"] == ["100", "150", "×", "1.50"]
    assert lines["starts of epochs"] == ["4", "s", "4", "s"]
    assert "first batch after" not in lines  # of neither
    assert "policy" not in lines and "python" not in lines  # the same in both
    assert not (on / "compare.html").exists()


def test_compare_writes_and_opens_a_page(tmp_path: Path, opened: Path) -> None:
    pytest.importorskip("plotly")
    for name in ("one", "two"):
        make_run(tmp_path / name, 5)
    both = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert cli.main(["compare", *both, "--html", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").exists() and not opened.exists()
    assert cli.main(["compare", *both, "--open"]) == 0
    assert opened.read_text() == (tmp_path / "two" / "compare.html").as_uri()


def test_a_fit_leaves_a_page_behind(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    make_run(tmp_path, 5)
    assert at_the_end(tmp_path) == tmp_path / "report.html"


def test_a_page_that_fails_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("plotly")
    make_run(tmp_path, 5)
    (tmp_path / "report.html").mkdir()
    with caplog.at_level(logging.INFO):
        assert at_the_end(tmp_path) is None
        assert "could not write" in caplog.text
        monkeypatch.setattr(commands, "MOST_BYTES", 100)
        assert at_the_end(tmp_path) is None
    assert f"intune report {tmp_path}" in caplog.text


def test_a_keras_or_lightning_fit_writes_it_beside_its_report(tmp_path: Path) -> None:
    """Through `TunedFit`, which both callbacks end with; ranks share one page beside their folders."""
    pytest.importorskip("plotly")
    from fakes import FakeLoop, FakeMachine, FakePipeline, Work

    from intune_callbacks.config import TunerConfig
    from intune_callbacks.record.history import History
    from intune_callbacks.session.arguments import Settings
    from intune_callbacks.session.fit import TunedFit
    from intune_callbacks.session.tuner import Tuner

    for world, page in ((1, tmp_path / "one" / "report.html"), (2, tmp_path / "two" / "report.html")):
        fit = TunedFit(Settings.checked("tune", str(page.parent), False), 0, world)
        assert fit.run_dir is not None
        machine = FakeMachine()
        pipeline = FakePipeline({"decode": Work(0.1)}, machine, depth=2)
        history = History(fit.run_dir / "history.jsonl")
        fit.tuner = Tuner(pipeline, TunerConfig(), probe=machine, clock=machine.clock(), history=history)
        FakeLoop(pipeline, model_s=0.02).run(fit.tuner, 20.0)
        fit.finish(None)
        assert page.exists()
        assert (fit.run_dir / "report.json").exists()
