"""What a busy worker takes of a CPU: from windows in which CPUs were left, or what crowded ones show beyond that."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from intune_callbacks.monitor.shares import CpuShares
from intune_callbacks.types import Observation, Resources, StageRates


def window(cpu_s: float, busy_s: float, items: int = 10, cpus: float = 8.0, **resources: Any) -> Observation:
    """Return a window of one second in which `items` items took so many seconds each."""
    rates = {"load": StageRates(items, 1.0, busy_s, cpu_s, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
    machine = replace(Resources(cpus, 0, 0), **resources)
    return Observation(0, 0.0, 1.0, 10, 10, 1.0, 1.0, 0.5, 0.05, (), rates, machine)


def of(*windows: Observation) -> float:
    shares = CpuShares()
    for seen in windows:
        shares.learn(seen)
    return shares.of("load")


def test_nobody_knows_of_a_stage_that_was_never_measured() -> None:
    assert CpuShares().of("load") == 1.0
    assert CpuShares().known() == {}
    assert of(window(0.0, 0.0)) == of(window(0.1, 1.0, items=0)) == 1.0


def test_cold_first_items_are_not_what_all_later_ones_take() -> None:
    assert of(window(0.2, 1.0)) == pytest.approx(0.2)
    assert of(window(0.2, 1.0, items=5), window(0.05, 1.0, items=15)) == pytest.approx(0.0875)


def test_a_crowded_window_counts_only_if_it_shows_more() -> None:
    free, crowded = window(0.2, 0.4), window(0.2, 1.0, items=40)
    assert of(free, crowded) == of(crowded, free) == pytest.approx(0.5)
    assert of(window(0.05, 1.0), crowded) == pytest.approx(0.2)
    assert of(crowded) == pytest.approx(0.2)


def test_a_machine_whose_cpus_others_use_is_crowded() -> None:
    assert of(window(0.2, 0.4), window(0.2, 1.0, items=30, cpus_idle=0.5)) == pytest.approx(0.5)
    assert of(window(0.2, 0.4), window(0.2, 1.0, items=30, cpus_idle=4.0)) == pytest.approx(8.0 / 34.0)


def test_a_window_in_which_the_machine_grew_was_crowded_before() -> None:
    full = window(0.2, 0.25, items=35)
    grew = window(0.2, 0.22, items=36, cpus=16.0)
    assert of(window(0.2, 0.2), full, grew) == 1.0
    # A second window on the larger machine is a free one.
    assert of(window(0.2, 0.2), full, grew, replace(grew)) == pytest.approx(9.2 / (2.0 + 36 * 0.22))


def test_twenty_windows_are_remembered() -> None:
    assert of(window(0.9, 1.0), *[window(0.1, 1.0)] * 20) == pytest.approx(0.1)


def test_what_was_learned_survives_json() -> None:
    old, new = CpuShares(), CpuShares()
    for seen in (window(0.2, 0.4), window(0.2, 1.0, items=40)):
        old.learn(seen)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.known() == old.known() == {"load": 0.5}


@pytest.mark.parametrize("state", [3, {"load": 3}, {"load": [[1.0]]}, {"load": [[0.1, 0.0, 0.0]]}, {"load": "x"}])
def test_no_such_state(state: Any) -> None:
    shares = CpuShares()
    shares.learn(window(0.2, 0.4))
    with pytest.raises((AttributeError, TypeError, ValueError)):
        shares.load_state_dict(state)
    assert shares.of("load") == 0.5
