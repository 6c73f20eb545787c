"""The native pool, gate and registry under ThreadSanitizer, AddressSanitizer and the one for undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import intune_callbacks

HERE = Path(__file__).parent / "native"
SOURCES = Path(intune_callbacks.__file__).parent / "pipelines" / "native"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
SECONDS = 4


def built(folder: Path, sanitizers: str, sources: Path = SOURCES) -> Path:
    made = folder / "stress"
    options = ["-std=c++17", "-g", "-O1", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined"]
    command = [str(COMPILER), *options, f"-I{HERE}", f"-I{sources}", str(HERE / "stress.cc"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip("this compiler comes without its sanitizers")
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def stress(program: Path, seed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(SECONDS), str(seed)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_the_pool_under_a_sanitizer(sanitizers: str, tmp_path: Path) -> None:
    run = stress(built(tmp_path, sanitizers), seed=os.getpid() % 1000)
    assert run.returncode == 0, run.stderr[:6000]
    assert "WARNING" not in run.stderr, run.stderr[:6000]
    assert int(run.stdout.split()[0]) > 1000


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_a_lock_left_out_is_seen(tmp_path: Path) -> None:
    """The stress reaches the places where threads meet: without one lock the sanitizer must complain."""
    sources = tmp_path / "native"
    shutil.copytree(SOURCES, sources)
    pool = sources / "pool.h"
    text = pool.read_text()
    locked = "    std::unique_lock<std::mutex> lock(mu_);\n    ending_.push_back(owner);"
    assert locked in text
    pool.write_text(text.replace(locked, "    ending_.push_back(owner);"))
    run = stress(built(tmp_path, "thread", sources), seed=1)
    assert run.returncode != 0
    assert "WARNING: ThreadSanitizer" in run.stderr
