"""The comparison of ranks names who keeps the others waiting, and waits for nobody for long."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.record.card import end_card
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Report
from intune_callbacks.session import ranks
from intune_callbacks.session.tuner import Tuner


def rank(wait_s: float | None, model_s: float | None) -> dict[str, float | None]:
    return {"wait_s": wait_s, "model_s": model_s}


def test_the_rank_that_waits_longest_for_its_data_is_named() -> None:
    found = ranks.compare([rank(0.001, 0.029), rank(0.0205, 0.0095), rank(0.002, 0.028)])
    assert found["straggler"] == 1
    assert found["line"] == "rank 1 keeps the others waiting: 20.5 ms a step for its data, theirs 1.5 ms"
    assert found["wait_s"] == [0.001, 0.0205, 0.002]


def test_small_differences_and_short_runs_name_nobody() -> None:
    level = ranks.compare([rank(0.002, 0.1), rank(0.001, 0.1)])
    assert (level["straggler"], level["line"]) == (None, "level: each waits 1 to 2 ms a step for data")
    assert ranks.compare([rank(0.5, 0.1), rank(None, None)])["straggler"] is None


class Store:
    """What `exchange` uses of torch's store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait(self, keys: list[str], limit: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), limit.total_seconds()):
                raise RuntimeError("timed out")

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    group = SimpleNamespace(_get_default_store=lambda: made)
    fake = SimpleNamespace(is_initialized=lambda: True, distributed_c10d=group)
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    return made


def report(model_s: float) -> Report:
    pipeline = FakePipeline({"decode": Work(0.1, workers=1, window=4)}, FakeMachine(), depth=2)
    machine = pipeline.machine
    tuner = Tuner(pipeline, TunerConfig(mode="observe"), probe=machine, clock=machine.clock())
    FakeLoop(pipeline, model_s=model_s).run(tuner, 20.0)
    tuner.close()
    return build_report(tuner.summary())


def test_rank_0_compares_what_all_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = report(0.02), report(0.2)
    monkeypatch.setattr(ranks, "_exchanges", iter([7, 7]))
    assert ranks.exchange(slow, 1, 2) is None
    found = ranks.exchange(fast, 0, 2)
    assert found is not None
    assert found["straggler"] == 1
    assert found["model_s"] == [pytest.approx(0.2, rel=0.05), pytest.approx(0.02, rel=0.05)]
    assert f"ranks   {found['line']}" in end_card(replace(fast, ranks=found))


def test_a_rank_that_says_nothing_costs_a_bounded_wait(store: Store) -> None:
    begin_s = time.perf_counter()
    assert ranks.exchange(report(0.02), 0, 2, wait_s=0.2) is None
    assert 0.2 <= time.perf_counter() - begin_s < 2.0


def test_alone_nothing_is_exchanged(store: Store) -> None:
    assert ranks.exchange(report(0.02), 0, 1) is None
    assert not store.values


PLACES: dict[str, tuple[dict[str, str], tuple[int, int, int]]] = {
    "nobody": ({}, (0, 1, 1)),
    "torchrun, Ray Train": ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 4)),
    "Open MPI": ({"RANK": "1", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 4, 2)),
    "SLURM": (
        {"RANK": "6", "WORLD_SIZE": "8", "SLURM_PROCID": "6", "SLURM_TASKS_PER_NODE": "4(x2)"},
        (6, 8, 4),
    ),
    "SLURM, bound": (
        {
            "RANK": "6",
            "WORLD_SIZE": "8",
            "SLURM_PROCID": "6",
            "SLURM_TASKS_PER_NODE": "4(x2)",
            "SLURM_CPU_BIND": "quiet,mask_cpu:0xF",
        },
        (6, 8, 1),
    ),
    "not numbers": ({"RANK": "x", "WORLD_SIZE": ""}, (0, 1, 1)),
    "all on this node": ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3, 3)),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_launcher_tells_the_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, expected = PLACES[name]
    for variable in {key for environment, _ in PLACES.values() for key in environment}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    assert ranks.place() == expected


@pytest.mark.parametrize("told", [{}, {"WORLD_SIZE": "6"}], ids=["nothing", "the world alone"])
def test_a_process_group_tells_what_no_launcher_does(told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 2, get_world_size=lambda: 6
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    gpus = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpus))
    assert ranks.place() == (2, 6, 2)
