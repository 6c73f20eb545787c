"""`intune watch`: a view of a run that another process writes, whatever state its files are in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_runs import TESTS, Run

from intune_callbacks import cli
from intune_callbacks.errors import install_line
from intune_callbacks.record.running import Job
from intune_callbacks.show.watch_view import line

# Where the tests run in the background, they ignore Ctrl+C, and children inherit that.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from intune_callbacks.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def start() -> Iterator[Any]:
    runs: list[Run] = []

    def begin(folder: Path, mode: str = "tune") -> Run:
        runs.append(Run(folder, mode))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


class Watch:
    """`intune watch` in a process of its own, on a pipe or a terminal."""

    def __init__(self, folder: Path, *words: str, terminal: bool = False) -> None:
        self.terminal, self.text = terminal, ""
        here, there = os.openpty() if terminal else os.pipe()
        if terminal:
            import fcntl
            import struct
            import termios

            fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "watch", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=there,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(TESTS.parent), "TERM": "xterm", "PYTHONUNBUFFERED": "1"},
        )
        os.close(there)
        os.set_blocking(here, False)
        self._file = here

    def see(self, pattern: str, within_s: float = 30.0) -> str:
        """Wait for what is shown to match, and return it all."""
        deadline = time.monotonic() + within_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.text!r}"
            if not self._more():
                time.sleep(0.01)
        return self.text

    def end(self, code: int = 0) -> str:
        """Wait for the end, and return all that was shown."""
        deadline = time.monotonic() + 30.0
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self._more()
            time.sleep(0.01)
        while self._more():
            pass
        os.close(self._file)
        assert self.process.returncode == code, self.text
        return self.text

    def _more(self) -> bool:
        try:
            found = os.read(self._file, 65536)
        except (BlockingIOError, OSError):  # OSError: the other end of a terminal is closed
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found.decode(errors="replace"))
        return bool(found)


def test_each_new_decision_is_a_line(tmp_path: Path, start: Any) -> None:
    run = start(tmp_path / "run").decide(2)
    watch = Watch(run.folder)
    watch.see(r"step \d+ [^#]*decode")
    run.decide(6)
    watch.see(r"decode 1 -> \d+")
    run.end()
    shown = watch.end()
    steps = [json.loads(line)["step"] for line in run.history.read_text().splitlines()]
    told = [int(step) for step in re.findall(r"^step (\d+) ", shown, re.MULTILINE)]
    assert told == steps[-len(told) :]  # each once, in order, and also the one written with the report
    assert len(told) >= 7
    assert "the job has ended; its report is in" in shown
    assert "samples/s" in shown and "wait " in shown and "RAM 1.0 of 64 GB" in shown


def test_a_terminal_gets_a_view_that_is_redrawn(tmp_path: Path, start: Any) -> None:
    pytest.importorskip("rich")
    run = start(tmp_path / "run").decide(2)
    watch = Watch(run.folder, terminal=True)
    watch.see("INPUT-BOUND")
    run.decide(8)
    shown = watch.see(r"changed +step \d+: .*decode 1 -> ")
    assert "slowest    decode" in shown
    assert re.search("samples/s +[0-9. ]+[▁▂▃▄▅▆▇█]{2}", shown)
    assert re.search(r"memory +1\.\d of 64 GB \(2 %\)", shown)
    run.end()
    assert "the job has ended" in watch.end()


def test_the_start_of_an_epoch_is_told(tmp_path: Path, start: Any) -> None:
    run = start(tmp_path / "run").decide(3)
    job = Job(run.folder)
    job.read()
    (rank,) = job.ranks
    plain = line(rank, rank.decisions[-1])
    assert "start of an epoch" not in plain
    rank.decisions[-1]["observation"]["seam_s"] = 0.25
    assert "start of an epoch 250 ms" in line(rank, rank.decisions[-1])
    rank.decisions[-1]["observation"]["seam_s"] = None  # as older runs are read
    assert line(rank, rank.decisions[-1]) == plain and rank.verdict().kind


def test_ranks_side_by_side(tmp_path: Path, start: Any) -> None:
    pytest.importorskip("rich")
    ranks = [start(tmp_path / "run" / f"rank{number}").decide(3) for number in range(2)]
    watch = Watch(tmp_path / "run", terminal=True)
    watch.see("run/rank0")  # the title may be cut behind it
    watch.see("run/rank1")
    ranks[0].end()
    ranks[1].decide()
    assert watch.process.poll() is None  # one of two has ended
    ranks[1].end()
    assert "rank1/report.json" in watch.end().replace("\r\n", "")


def test_a_file_that_does_not_exist_yet(tmp_path: Path, start: Any) -> None:
    watch = Watch(tmp_path / "later")
    watch.see("no decision yet in .*later; waiting up to 300 s")
    run = start(tmp_path / "later").decide(2)
    watch.see("step ")
    run.end()
    watch.end()


def test_patience_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(tmp_path / "never"), "--wait", "0"]) == 1
    told = capsys.readouterr().err
    assert "no running job wrote a decision into" in told
    assert "run_dir" in told and "mode not off" in told


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("no/run", "no is not there"),
        ("file", "file is a file"),
        ("file/run", "file is a file"),
        ("link", "link is no folder"),
        ("link/run", "link is no folder"),
    ],
)
def test_a_folder_that_cannot_come_is_not_waited_for(
    folder: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    assert cli.main(["watch", str(tmp_path / folder), "--wait", "60"]) == 2
    assert f"{tmp_path}/{why}" in capsys.readouterr().err


def test_a_name_without_a_folder_in_front_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", "never", "--wait", "0"]) == 1


def test_ctrl_c_is_an_end_like_another(tmp_path: Path, start: Any) -> None:
    run = start(tmp_path / "run").decide(2)
    watch = Watch(run.folder)
    watch.see("step ")
    watch.process.send_signal(signal.SIGINT)
    assert "Traceback" not in watch.end()


@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "terminal"])
def test_a_job_that_was_killed_has_ended(terminal: bool, tmp_path: Path, start: Any) -> None:
    if terminal:
        pytest.importorskip("rich")
    run = start(tmp_path / "run").decide(3)
    watch = Watch(run.folder, terminal=terminal)
    watch.see("step ")
    run.process.kill()
    assert re.search(r"its process ended without a report, as one\s+that is killed does", watch.end())


def test_what_a_killed_job_has_left_is_not_taken_for_one_that_runs(
    tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(tmp_path / "run").decide(3)
    run.process.kill()
    run.process.wait()
    assert cli.main(["watch", str(run.folder), "--wait", "0"]) == 1
    assert "only a run that has ended in " in capsys.readouterr().err


@pytest.mark.parametrize("fresh", [True, False], ids=["deleted", "appended"])
def test_a_folder_that_is_used_again(fresh: bool, tmp_path: Path, start: Any) -> None:
    old = start(tmp_path / "run").decide(9)
    old.end()
    watch = Watch(tmp_path / "run")
    watch.see("only a run that has ended in .*run; waiting")
    if fresh:
        old.history.unlink()
    steps = len(old.history.read_text().splitlines()) if not fresh else 0
    new = start(tmp_path / "run", "observe").decide(3)
    watch.see("observing")
    assert watch.process.poll() is None  # the old report is not this run's
    new.end()
    shown = watch.end()
    told = [int(step) for step in re.findall(r"^step (\d+) ", shown, re.MULTILINE)]
    written = [json.loads(line)["step"] for line in new.history.read_text().splitlines()][steps:]
    assert told == written[-len(told) :]
    assert "->" not in shown  # that was in the old run


def test_without_rich_the_line_to_type_is_told(tmp_path: Path, start: Any) -> None:
    run = start(tmp_path / "run").decide()
    code = "import sys; sys.modules['rich'] = sys.modules['rich.live'] = None; sys.stdout.isatty = lambda: True\n"
    code += f"from intune_callbacks import cli; raise SystemExit(cli.main(['watch', {str(run.folder)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"rich is not installed; run: {install_line('report')}" in done.stderr
