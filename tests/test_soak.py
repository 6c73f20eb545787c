"""The soak benchmark in small: it sees what grows, and nothing of ours does.

Each in a process of its own: where other tests have left memory behind, what grows would at first fill that.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import ALLOWED, grown

READING = dict(rss_mb=100.0, threads=4.0, descriptors=20.0, children=2.0, files_mb=1.0)


def alone(measure: Callable[..., dict[str, Any]], *given: Any, **named: Any) -> dict[str, Any]:
    """Return what a function gives in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *given, **named).result(timeout=100.0)


def test_what_goes_on_growing_is_seen_and_what_is_filled_once_is_not() -> None:
    leak = [READING | {"rss_mb": 100.0 + 2 * i} for i in range(30)]
    assert grown(leak)["rss_mb"] > ALLOWED["rss_mb"]
    filled = [READING | {"descriptors": float(min(40, 20 + 2 * i))} for i in range(30)]
    assert grown(filled)["descriptors"] == 0.0


@pytest.mark.parametrize("mode", ["tune", "advise", "observe"])
def test_days_of_decisions_are_flat(mode: str) -> None:
    row = alone(soak.month, 6_000.0, 3, mode)
    assert row["flat"] and row["frozen"] == ""
    assert row["decisions"] > 1_000


def leaking_month() -> dict[str, Any]:
    held: list[bytearray] = []
    batch = soak.Costs.batch

    def leaking(self: soak.Costs) -> float:
        held.append(bytearray(3_000))
        return batch(self)

    soak.Costs.batch = leaking  # type: ignore[method-assign]
    return soak.month(2_000.0, 3)


def test_a_month_of_a_list_that_grows_is_not_flat() -> None:
    assert not alone(leaking_month)["flat"]


@pytest.mark.parametrize("kind", ["DataLoader process", "DataLoader thread", "torchdata thread"])
def test_a_short_training_is_flat(kind: str) -> None:
    pytest.importorskip("torchdata")
    row = alone(soak.training, kind, 4.0, 5, looks=9)
    assert row["flat"] and row["wrong"] == 0
    assert row["decisions"] > 50
