"""How much of a machine ordered batches can use when few fit in memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.emulated import SHARES
from benchmarks.memory_bound import Static, attainable, utilisation

ONE_EACH = Static((1,) * 5, (1,) * 5)
MANY = Static((64,) * 5, (512,) * 5)


def test_one_worker_each_is_paced_by_the_slowest_stage() -> None:
    assert utilisation(ONE_EACH, 8, 0.0, 1, 500) == pytest.approx(
        sum(SHARES.values()) / max(SHARES.values()) / 8, rel=0.02
    )


def test_plenty_of_everything_keeps_all_cpus_busy() -> None:
    assert utilisation(MANY, 8, 0.8, 1, 2000) > 0.97


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_no_more_than_what_is_held_can_be_busy(window: int, workers: int, seed: int) -> None:
    allocation = Static((workers,) * 5, (window,) * 5)
    assert utilisation(allocation, 16, 0.5, seed, 200) <= 5 * min(window, workers) / 16 + 1e-9


def test_few_batches_in_memory_leave_cpus_idle() -> None:
    few, found = attainable(32, 40, 0.8, 3, tries=30)
    many, _ = attainable(32, 160, 0.8, 3, tries=30)
    assert sum(found.windows) == 40
    assert few < 0.65 < 0.9 < many
