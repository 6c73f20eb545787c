"""InTuneCallback in `model.fit` on each backend of Keras, one process per backend: exact, measured, explained."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

TESTS = Path(__file__).parent
EXACT = ["dataset", "validated_dataset", "unknown", "steps_per_epoch", "class_weight", "loader", "loader_workers"]
PYDATASETS = ["pydataset", "pydataset_steps", "pydataset_endless", "pydataset_processes", "pydataset_consent"]
# Without torch before those that need it: "loaded" tells what was imported by then.
CASES = ["dataset", "unknown", "starved", "fed", "validated", "loaded", "others", *EXACT[1:2], *EXACT[3:]]
BACKENDS = ("tensorflow", "torch", "jax")
STEPS = 24

pytestmark = pytest.mark.timeout(400)


@functools.cache
def ran(backend: str, *cases: str, **environment: str) -> dict[str, Any]:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    known = [case for case in cases if "loader" not in case or importlib.util.find_spec("torch")]
    variables = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(TESTS.parent), **environment}
    command = [sys.executable, "-W", "ignore", str(TESTS / "keras_cases.py"), *known]
    run = subprocess.run(command, capture_output=True, text=True, timeout=380, env=variables)
    assert run.returncode == 0, run.stderr[-3000:]
    made: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return made


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def case(backend: str, name: str) -> Any:
    made = ran(backend, *CASES)
    if name not in made:
        pytest.skip("torch is not installed")
    return made[name]


@pytest.mark.parametrize("name", [*EXACT, *PYDATASETS])
def test_random_live_changes_leave_the_training_as_it_was(backend: str, name: str) -> None:
    made = case(backend, name) if name not in PYDATASETS else ran(backend, *PYDATASETS)[name]
    plain, tuned = made["plain"], made["tuned"]
    assert len(plain["seen"]) >= STEPS
    assert tuned["seen"] == plain["seen"]
    assert tuned["tested"] == plain["tested"]
    assert tuned["history"] == plain["history"]
    assert tuned["weights"] == plain["weights"]
    assert tuned["random"] == plain["random"]
    assert made["frozen"] is None
    assert made["resizes"] >= 2 * STEPS
    # The first step is not measured, and what follows is seen at the beginning of the next step.
    rows = 1 if name in PYDATASETS and backend == "tensorflow" else 4  # TensorFlow is not told how many there are
    assert made["samples"] >= rows * (len(plain["seen"]) - 4)


def test_shuffles_differ_between_epochs_as_without_us(backend: str) -> None:
    seen = case(backend, "dataset")["tuned"]["seen"]
    assert seen[:STEPS] != seen[STEPS:]
    assert sorted(map(tuple, seen[:STEPS])) != [] and {x for b in seen[:STEPS] for x in b} == {
        x for b in seen[STEPS:] for x in b
    }


def test_a_starved_model_is_seen_as_one(backend: str) -> None:
    made = case(backend, "starved")
    report = made["report"]
    assert report["frozen"] is None
    assert report["verdict"] == "input-bound"
    assert report["before"]["wait_frac"] > 0.4  # 40 ms of data; the steps took 3-10 ms where this was written
    assert all(wait > 0.3 for wait in made["logged"]["intune/wait_frac"])
    # One worker with 10 ms a row: at most 100 rows a second.
    assert all(20.0 < rate < 110.0 for rate in made["logged"]["intune/throughput_samples_per_s"])
    assert made["logged"]["intune/workers/as_row"] == [1.0, 1.0]


def test_a_fed_model_is_seen_as_one(backend: str) -> None:
    report = case(backend, "fed")["report"]
    assert report["verdict"] in ("compute-bound", "balanced")
    assert report["before"]["wait_frac"] < 0.5  # of a run this short the starts of epochs are a good part
    assert report["before"]["model_s"] >= 0.012
    assert report["steps"] >= 40


def test_validation_is_a_pause(backend: str) -> None:
    made = case(backend, "validated")
    report = made["report"]
    assert len(made["tested"]) == 2 * STEPS
    # 2 x 0.3 s of pause are in the run, and in no step.
    active_s = sum(4 * STEPS / rate for rate in made["logged"]["intune/throughput_samples_per_s"])
    assert report["wall_s"] > active_s + 0.25
    assert 0.6 <= report["whole"]["validation_s"] < report["whole"]["paused_s"]
    assert report["steps"] == 2 * STEPS


def test_what_cannot_be_tuned_is_named_and_measured(backend: str) -> None:
    reports = case(backend, "others")
    says = {
        "generator": "one batch after the other",
        "arrays": "in memory",
    }
    assert "set workers=2" in reports["pages"]["pipeline"]
    for kind in reports:
        assert reports[kind]["frozen"] is None
        assert reports[kind]["before"]["wait_frac"] is not None
        assert reports[kind]["changes"] == 0
    for kind, words in says.items():
        assert words in reports[kind]["next"], kind
        assert "tf.data.Dataset" in reports[kind]["next"]


def test_no_other_framework_is_imported() -> None:
    assert case("tensorflow", "loaded") == ["tensorflow"]  # after fits with the default policy
    if importlib.util.find_spec("torch"):
        assert ran("torch", "unseeded_loader")["unseeded_loader"] == ["torch"]


def test_without_a_compiler_it_is_exact_and_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.getbasetemp() / "empty"
    made = ran("tensorflow", "unknown", "starved", INTUNE_CACHE=str(empty), PATH="/nonexistent", CXX="")
    assert made["unknown"]["tuned"] == made["unknown"]["plain"] | {"logged": made["unknown"]["tuned"]["logged"]}
    assert made["unknown"]["frozen"] is None
    assert made["starved"]["report"]["before"]["wait_frac"] > 0.4
    assert "no C++ compiler" in made["starved"]["report"]["next"]
