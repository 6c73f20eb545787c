"""Trainings whose workers are here and on a Ray cluster: losses as with ``num_workers=0``; ``tox run -e reach``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.skipif("INTUNE_TEST_REACH" not in os.environ, reason="tox run -e reach runs it: minutes"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.timeout(300),
]
if "INTUNE_TEST_REACH" in os.environ:
    pytest.importorskip("ray", reason="tox run -e reach installs it")

import ray_runs as runs  # noqa: E402


@pytest.fixture(scope="module")
def nodes() -> Iterator[runs.Nodes]:
    with runs.running(2, 2) as made:
        yield made


def fit(kind: str, address: str, **env: str) -> dict[str, Any]:
    return ended(begun(kind, address, **env))


def begun(kind: str, address: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).parent / "ray_fits.py"), kind, address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**os.environ, **runs.SETTING, **env}, **pipes)  # type: ignore[call-overload,no-any-return]


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    assert "InTune" not in err, err
    return dict(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["lightning", "loop", "transformers"])
def test_losses_are_those_of_no_workers(kind: str, nodes: runs.Nodes) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers", reason="tox run -e reach installs it")
    there = fit(kind, nodes.address)
    assert not runs.heard_elsewhere()
    assert nodes.has_no_actor()
    here = fit(kind, "")
    assert there["losses"] == here["losses"] and len(here["losses"]) == 1000
    assert there["frozen"] is None and there["elsewhere"] > 100
    assert not there["imported"]


def test_augmented_items_are_the_same_wherever_they_are_made(nodes: runs.Nodes) -> None:
    there, here = fit("augmented", nodes.address), fit("augmented", "")
    assert there["losses"] == here["losses"] and len(set(here["losses"])) == 1000
    assert there["elsewhere"] > 100
    assert nodes.has_no_actor()


@pytest.mark.parametrize("kind", ["left", "persistent", "left_persistent", "changed", "spawned", "in_the_loop"])
def test_epochs_are_those_of_stock(kind: str, nodes: runs.Nodes) -> None:
    there, here = fit(kind, nodes.address), fit(kind, "")
    assert there["losses"] == here["losses"] and len(here["losses"]) > 700
    assert there["frozen"] is None and there["elsewhere"] > 0
    assert nodes.has_no_actor()


def test_inside_a_worker_of_rays(nodes: runs.Nodes) -> None:
    there = fit("inside", nodes.address)
    assert there["losses"] == fit("loop", "")["losses"]
    assert there["frozen"] is None
    assert [hint["what"] for hint in there["stages"] if hint["what"].startswith("workers on other machines, at most: ")]


def test_a_killed_training_leaves_nothing(nodes: runs.Nodes) -> None:
    process = begun("loop", nodes.address, EPOCHS="50")
    assert runs.wait_for(lambda: bool(nodes.actors()), 60.0)
    bridges = [
        one for one in psutil.Process(process.pid).children() if "pipelines.ray.bridge" in " ".join(one.cmdline())
    ]
    assert len(bridges) == 1
    process.kill()
    process.communicate(timeout=20)
    assert nodes.has_no_actor()
    assert runs.wait_for(lambda: not bridges[0].is_running(), 10.0)


def test_two_ranks_share_a_cluster(nodes: runs.Nodes) -> None:
    def ranks(address: str, port: int) -> list[dict[str, Any]]:
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"NODE_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "EPOCHS": "6"}
        both = [begun("lightning", address, RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in range(2)]
        return [ended(one) for one in both]

    there, here = ranks(nodes.address, 29671), ranks("", 29672)
    assert [one["losses"] for one in there] == [one["losses"] for one in here]
    assert all(one["frozen"] is None for one in there)
    assert max(one["elsewhere"] for one in there) > 50
    assert nodes.has_no_actor()
