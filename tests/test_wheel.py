"""The wheel takes no name that somebody else may want, and brings its commands along."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from docs_pages import ROOT

from dlrm_examples import recipes
from intune_callbacks import __version__

pytest.importorskip("hatchling")


def pip(*words: object) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", words[0], *quiet, *map(str, words[1:])], check=True, timeout=100)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (file,) = folder.glob("*.whl")
    return file


def test_its_names_are_ours(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    of_python = {name.split("/")[0] for name in names}
    assert of_python == {"intune_callbacks", "dlrm_examples", f"intune_callbacks-{__version__}.dist-info"}
    assert "dlrm_examples/recipes/runner.py" in names
    assert len([name for name in names if name.endswith(".yaml")]) == len(recipes.names())


def test_its_commands_run(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--target", tmp_path, wheel)
    done = subprocess.run(
        [sys.executable, tmp_path / "bin" / "intune", "ls"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    begun = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]  # the others go on with one
    assert begun[: len(recipes.names())] == [*recipes.names()]
