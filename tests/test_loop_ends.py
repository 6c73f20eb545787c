"""A loop of the user's own ends: with a card, a report and nothing left, whatever went wrong in it."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from busy_machine import eventually  # noqa: E402
from loop_loaders import BATCH, EAGER, ROWS, Slow, assert_nothing_is_left, slow  # noqa: E402
from restless import Restless  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch_rows import engines  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.workers.processes import ProcessPool  # noqa: E402


def test_the_card_comes_right_behind_the_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in live(slow(num_workers=1), run_dir=str(tmp_path), **EAGER):
        assert not (tmp_path / "report.json").exists()
    assert "InTune" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["samples"] == ROWS


def test_a_loop_left_early_reports_too(capsys: pytest.CaptureFixture[str]) -> None:
    for number, _ in enumerate(live(slow(num_workers=1), **EAGER)):
        if number == 40:
            break
    assert "InTune" in capsys.readouterr().out
    assert_nothing_is_left()


def test_as_a_context_manager(capsys: pytest.CaptureFixture[str]) -> None:
    with live(slow(num_workers=1), **EAGER) as loader:
        assert sum(batch.numel() for batch in loader) == ROWS
        assert loader.report == {}
    assert loader.report["samples"] == ROWS
    assert capsys.readouterr().out.count("InTune  ") == 1
    assert sum(batch.numel() for batch in loader) == ROWS  # as the loader itself, from now on
    assert loader.report["samples"] == ROWS


def test_after_an_error_in_the_block_there_is_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    given = slow(num_workers=1)

    def train() -> None:
        with live(given, **EAGER) as loader:
            for number, _ in enumerate(loader):
                if number == 20:
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert "InTune" not in capsys.readouterr().out
    assert "_get_iterator" not in vars(given)
    assert_nothing_is_left()


def test_a_second_one_of_the_same_loader_ends_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    loader = slow(num_workers=1)
    first = live(loader, **EAGER)
    for _ in first:
        pass
    second = live(loader, **EAGER, show_card=False)
    assert first.report["samples"] == ROWS
    for _ in second:
        pass
    assert second.close()["samples"] == ROWS
    assert capsys.readouterr().out.count("InTune  ") == 1
    assert "_get_iterator" not in vars(loader)


def test_a_process_that_the_user_forks_leaves_the_loop_and_its_workers_alone() -> None:
    """A loop of its own over the same loader ended the one it came from there, with a card, and parked workers here."""
    loader = slow(num_workers=1)
    loop = live(loader, **EAGER, show_card=False)
    batches = iter(loop)
    next(batches)
    pool: Any = ProcessPool(lambda item: item, multiprocessing.get_context("fork"))
    child = pool.get()
    pool.put(child)
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            live(loader, show_card=False)
            pool.close()
            os._exit(loop._fit.is_closed)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    child.process.join(0.3)
    assert child.process.is_alive()
    assert pool.call(pool.get(), 7, lambda: False)[0] == 7 and pool.pids == (child.process.pid,)
    pool.put(child)
    pool.close()
    assert len(list(batches)) == ROWS // BATCH - 1
    assert loop.close()["samples"] == ROWS


SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset
from intune_callbacks import live

class Slow(Dataset):
    def __len__(self): return 200
    def __getitem__(self, i): time.sleep(0.002); return torch.zeros(1)

loader = live(DataLoader(Slow(), batch_size=4, num_workers=1), decide_every_s=0.1, warmup_batches=3)
for batch in loader:
    pass
{end}
"""


@pytest.mark.parametrize(("end", "card"), [("", True), ("raise SystemError('mine')", False)])
def test_a_script_that_ends_reports(end: str, card: bool) -> None:
    script = SCRIPT.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ("InTune" in done.stdout) == card, done.stderr
    assert ("SystemError" in done.stderr) == (not card)


def test_all_files_come_into_one_folder_wherever_the_training_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loader = live(slow(), run_dir="run", **EAGER)
    for batch in loader:
        if (batch == 0).any():
            os.chdir("elsewhere")
    loader.close()
    assert {"history.jsonl", "report.json"} <= {file.name for file in (tmp_path / "run").iterdir()}
    assert [*(tmp_path / "elsewhere").iterdir()] == []
    assert str(tmp_path / "run") in capsys.readouterr().out.replace("\n        ", "")


def test_a_working_directory_that_is_gone_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    loader = live(slow(), run_dir="run", **EAGER)
    for batch in loader:
        if (batch == 0).any():
            shutil.rmtree(tmp_path / "gone")
    assert loader.close()["frozen"] is None
    assert "InTune" in capsys.readouterr().out


def test_what_cannot_be_tuned_is_timed_and_the_card_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in live((torch.zeros(4) for _ in range(60)), **EAGER):
        time.sleep(0.002)
    out = " ".join(capsys.readouterr().out.split())
    assert "generator is an iterator, which hides" in out


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_an_error_of_ours_freezes_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = live(slow(num_workers=1), show_card=False, **EAGER)
    monkeypatch.setattr("intune_callbacks.session.samples.Samples.count", lambda self, batch: 1 / 0)
    with pytest.warns(RuntimeWarning, match="InTune froze"):
        assert sum(batch.numel() for batch in loader) == ROWS
    assert "ZeroDivisionError" in loader.close()["frozen"]


def two_epochs(loader: Any) -> None:
    for _ in range(2):
        for _ in loader:
            pass


class Stopped(Exception):
    """What a handler of the user's raises."""


@pytest.mark.parametrize(
    "where",
    [
        "intune_callbacks.session.loop_fit.StepTimer.fetch_begin",
        "intune_callbacks.measure.window.Window.observe",
        "intune_callbacks.pipelines.torch.engine.Engines.engine",
    ],
)
def test_what_a_signal_handler_raises_in_the_middle_of_our_code_is_the_users(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Stopped

    calls: list[int] = []
    stock = pkgutil.resolve_name(where)

    def signalled(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return stock(*given, **named)

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", Restless)
    monkeypatch.setattr(where, signalled)
    try:
        data = slow(num_workers=1)
        with pytest.raises(Stopped):
            two_epochs(live(data, show_card=False, **EAGER | {"decide_every_s": 0.0}))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sum(batch.numel() for batch in data) == ROWS


class Broken(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 100:
            raise ValueError("row 100")
        return super().__getitem__(index)


def test_an_error_in_the_dataset_is_the_users() -> None:
    loader = live(DataLoader(Broken(), batch_size=BATCH, num_workers=1), show_card=False, **EAGER)
    with pytest.raises(ValueError, match="row 100"):
        for _ in loader:
            pass
    assert loader.close()["samples"] <= 100


def test_behind_an_error_no_worker_lives_on_till_the_collector_comes() -> None:
    def train() -> None:
        with pytest.raises(ValueError, match="row 100"):
            for _ in live(DataLoader(Broken(), batch_size=BATCH, num_workers=1), show_card=False, **EAGER):
                pass

    gc.collect()
    gc.disable()
    try:
        train()
        assert eventually(lambda: not engines(), within_s=20.0)
    finally:
        gc.enable()


def test_threads_may_begin_loops_at_once() -> None:
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            held = [live([1, 2], mode="observe", show_card=False) for _ in range(60)]
            assert len(list(held[0])) == 2
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=begin) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    finally:
        sys.setswitchinterval(before)
    assert not failed


@pytest.mark.parametrize("end", ["closed", "broken"])
def test_a_card_that_nobody_can_read_costs_the_card(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stdout = os.fdopen(writing, "w", buffering=1)
    if end == "closed":
        with contextlib.suppress(BrokenPipeError):
            stdout.close()
    monkeypatch.setattr(sys, "stdout", stdout)
    loader = live(DataLoader(Slow(0.0), batch_size=BATCH))
    assert len(list(loader)) == ROWS // BATCH
    report = loader.close()
    with contextlib.suppress(OSError, ValueError):
        stdout.close()
    assert report["steps"] and report["frozen"] is None
