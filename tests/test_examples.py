"""The scripts of `examples/`, as a new user runs them: they end well, and the card says what was gained."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = {
    "kept_in_memory": ["torch"],
    "ray_workers": ["torch", "ray", "cloudpickle"],
    "with_a_loop": ["torch"],
    "with_keras": ["keras", "tensorflow"],
    "with_lightning": ["torch", "pytorch_lightning"],
    "with_transformers": ["torch", "accelerate", "transformers"],
}


def test_every_script_is_tested_and_listed() -> None:
    scripts = {file.stem for file in (ROOT / "examples").glob("*.py")}
    listed = set(re.findall(r"`(\w+)\.py`", (ROOT / "examples" / "README.md").read_text()))
    assert scripts == listed == set(NEEDS)


def test_the_one_of_the_readme_is_the_same() -> None:
    readme = (ROOT / "README.md").read_text()
    assert (ROOT / "examples" / "with_lightning.py").read_text() in readme


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_and_changes_something(name: str, tmp_path: Path) -> None:
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        if name == "ray_workers":
            import ray_runs

            quiet |= {**ray_runs.SETTING, "RAY_ADDRESS": stack.enter_context(ray_runs.running(2)).address}
        ended = subprocess.run(
            [sys.executable, ROOT / "examples" / f"{name}.py"],
            cwd=tmp_path, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    card = re.search(r"InTune {2}.*?samples/s.*?(\d+) changes?", ended.stdout, re.DOTALL)
    assert card is not None and int(card[1]) >= 1, ended.stdout[-3000:]
