"""The end card on a terminal: the same words as the plain one, in a panel, in colours unless they are not wanted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import run, slowed

from intune_callbacks.record.card import end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import write_report
from intune_callbacks.show.card import show
from intune_callbacks.words import wrapped

TESTS = Path(__file__).parent
CODE = """
import json, sys
from pathlib import Path
from intune_callbacks.record.report import Report
from intune_callbacks.show.card import show
show(Report.from_json(json.loads(Path(sys.argv[1], "report.json").read_text())), Path(sys.argv[1]))
"""
REPORTS: dict[str, Any] = {
    "fed": lambda: build_report(run(), mode_source="argument"),
    "nothing to do": lambda: build_report(run(model_s=0.5)),
    "advice": lambda: build_report(run(mode="advise")),
    "frozen": lambda: build_report(replace(run(), frozen="OSError: [Errno 28] [bold]no space[/bold]")),
    "slower": lambda: build_report(slowed()),
    "too short": lambda: build_report(run(seconds=1.0)),
}


def on_a_terminal(folder: Path, width: int = 100, code: str = CODE, **environment: str) -> str:
    """Return what a process with a terminal of `width` columns prints, escapes included."""
    fcntl, struct, termios = (pytest.importorskip(name) for name in ("fcntl", "struct", "termios"))
    here, there = os.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "COLORTERM")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=there,
        env={**kept, "TERM": "xterm-256color", "PYTHONPATH": str(TESTS.parent), "PYTHONIOENCODING": "utf-8"}
        | environment,
    )
    os.close(there)
    printed = b""
    while True:
        try:
            more = os.read(here, 65536)
        except OSError:  # the process has ended
            break
        if not more:
            break
        printed += more
    os.close(here)
    assert process.wait(timeout=60) == 0
    return printed.decode().replace("\r\n", "\n")


def words(text: str) -> str:
    """Return what is left without colours, frames and white space."""
    return re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─\s]", "", text)


@pytest.mark.parametrize("width", [120, 40])
@pytest.mark.parametrize("kind", list(REPORTS))
def test_the_panel_has_the_words_of_the_plain_card(kind: str, width: int, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    report = REPORTS[kind]()
    write_report(tmp_path, report)
    shown = on_a_terminal(tmp_path, width)
    assert "╭" in shown
    assert words(shown) == words(end_card(report, tmp_path))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(len(line) for line in lines) <= width
    # What is continued stands under its text, not under its label.
    labels = [line[2:8].strip() for line in lines if line.startswith("│")]
    assert [label for label in labels if label] == [
        line.split()[0] for line in end_card(report, tmp_path).splitlines() if not line.startswith(" ")
    ]


def test_the_verdict_is_coloured_unless_that_is_not_wanted(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    write_report(tmp_path, REPORTS["fed"]())
    coloured = on_a_terminal(tmp_path)
    assert re.search(r"\x1b\[1;31mINPUT-BOUND", coloured)
    assert re.search(r"\x1b\[1;32mCOMPUTE-BOUND", coloured)
    plain = on_a_terminal(tmp_path, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)
    assert words(plain) == words(coloured)


@pytest.mark.parametrize(
    ("environment", "prefix"),
    [
        ({"TERM": "dumb"}, ""),
        ({"PYTHONIOENCODING": "ascii"}, ""),
        ({}, "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"),
    ],
    ids=["dumb terminal", "no unicode", "no rich"],
)
def test_a_terminal_that_shows_text_only_gets_text(environment: dict[str, str], prefix: str, tmp_path: Path) -> None:
    report = REPORTS["fed"]()
    write_report(tmp_path, report)
    text = wrapped(end_card(report, tmp_path)) + "\n"
    ascii_only = "PYTHONIOENCODING" in environment
    expected = text.encode("ascii", "replace").decode() if ascii_only else text
    assert on_a_terminal(tmp_path, code=prefix + CODE, **environment) == expected


def test_a_run_that_became_slower_is_red_from_the_frame_on(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    write_report(tmp_path, build_report(slowed()))
    shown = on_a_terminal(tmp_path)
    assert re.search(r"\x1b\[1;31mSLOWER THAN BEFORE", shown)
    assert re.match(r"\x1b\[31m╭", shown)


def test_a_file_gets_the_plain_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = REPORTS["fed"]()
    show(report, tmp_path)
    printed = capsys.readouterr().out
    assert words(printed) == words(end_card(report, tmp_path))
    assert max(len(line) for line in printed.splitlines()) <= 80 < max(map(len, end_card(report).splitlines()))


def test_long_sentences_are_folded_once(capsys: pytest.CaptureFixture[str]) -> None:
    show(replace(REPORTS["fed"](), cause="so long a word " * 20))
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("cause"))
    folded = [line for line in lines[first:] if "word" in line]
    assert len(folded) == 5  # 300 letters, 72 in a line
    assert max(map(len, folded)) <= 80 and min(map(len, folded[:-1])) > 60


def test_long_lines_are_continued_under_their_text() -> None:
    pasted = " " * 8 + "x" * 90
    row = "after   8 042 samples/s   wait 1 %   read 10 · parse 2 · shuffle 2 · collate 1   RAM 1.2 of 25 GB"
    assert wrapped(f"why     short\n{row}\n{pasted}").splitlines() == [
        "why     short",
        "after   8 042 samples/s   wait 1 %   read 10 · parse 2 · shuffle 2 · collate 1",
        "        RAM 1.2 of 25 GB",
        pasted,
    ]
    sentence = "why     " + "so long a word " * 12
    lines = wrapped(sentence).splitlines()
    assert [line[:8].strip() for line in lines] == ["why", "", ""] and max(map(len, lines)) <= 80
    assert words(wrapped(sentence)) == words(sentence)
    path = "files   report.json in /" + "a" * 100
    assert "/" + "a" * 100 in wrapped(path)
