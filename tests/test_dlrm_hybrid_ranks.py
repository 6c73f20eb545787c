"""A rank that fails ends the run with an error that names it; nobody waits for ever, and nobody is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dlrm_examples.hybrid import install  # noqa: E402
from dlrm_examples.hybrid.ranks import RankFailed, run_ranks  # noqa: E402
from intune_callbacks.errors import InTuneError, MissingPackage  # noqa: E402
from tests import hybrid_runs as runs  # noqa: E402

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("how", "limit_s", "words"),
    [
        ("raise", 60.0, "rank 1 failed:.*ValueError: no such luck.*all 2 ranks were ended"),
        ("kill", 60.0, "rank 1 died with exit code -9"),
        ("stall", 6.0, "the 2 ranks were not done after 6 s"),
    ],
)
def test_a_failing_rank_ends_all(how: str, limit_s: float, words: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){words}") as caught:
        run_ranks(runs.failing, 2, how, limit_s=limit_s)
    assert isinstance(caught.value, InTuneError)


def test_a_rank_that_aborts_once_its_work_is_done_has_not_failed() -> None:
    assert run_ranks(runs.aborting_at_its_end, 2, limit_s=60.0) == 0


def test_no_rank_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "from dlrm_examples.hybrid.ranks import run_ranks\n"
        "from tests.hybrid_runs import pid_of_rank\n"
        f"if __name__ == '__main__': run_ranks(pid_of_rank, 2, {str(tmp_path)!r})"
    )
    script = tmp_path / "start.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 60.0
        files = [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = [int(file.read_text()) for file in files]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(10.0)
    deadline = time.monotonic() + 20.0
    while any(_runs(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in ranks)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_torchrec_the_two_install_lines_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == "torchrec" else name)
    with pytest.raises(install.MissingTorchRec) as caught:
        install.require()
    assert isinstance(caught.value, MissingPackage)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == list(install.INSTALL)


def test_the_command_says_them_too(tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torchrec' else found(name, *more)\n"
        "from intune_callbacks.cli import main\n"
        f"sys.exit(main(['run', 'dlrm-lightning-hybrid', 'rows=1000', 'run_dir={tmp_path}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert all(line in done.stderr for line in install.INSTALL)
    assert not list(tmp_path.iterdir())
