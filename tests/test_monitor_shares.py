"""What a busy worker takes of a CPU: the most of recent windows, those in which workers started left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from intune_callbacks.measure.counts import CpuShares
from intune_callbacks.types import Observation, Resources, Stage, StageRates


def window(share: float, workers: int = 4, items: int = 10) -> Observation:
    """Return a window in which each item took a second, and that share of it on a CPU."""
    rates = {"load": StageRates(items, 1.0, 1.0, share, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
    stages = (Stage("load", "cpu", "workers", 1, 64, workers),)
    return Observation(0, 0.0, 1.0, 10, 10, 1.0, 1.0, 0.5, 0.05, stages, rates, Resources(8.0, 0, 0))


def learned(*windows: Observation) -> CpuShares:
    shares = CpuShares()
    for seen in windows:
        shares.learn(seen)
    return shares


def test_nobody_knows_of_a_stage_that_was_never_measured() -> None:
    assert CpuShares().of("load") == learned(window(0.1, items=0)).of("load") == 1.0
    assert CpuShares().known() == {}


def test_the_most_counts_for_workers_that_wait_for_a_cpu_take_less() -> None:
    shares = learned(*(window(share) for share in (0.9, 0.5, 0.8, 0.2)))
    assert shares.of("load") == 0.8 and shares.known() == {"load": 0.8}
    assert learned(window(0.1), window(3.0)).of("load") == 1.0


def test_workers_that_have_just_started_count_until_there_are_three_other_windows() -> None:
    later = [window(share) for share in (0.07, 0.06, 0.05)]
    assert learned(window(0.2), *later[:2]).of("load") == 0.2
    assert learned(window(0.2), *later).of("load") == 0.07
    assert learned(window(0.2), *later, window(0.3, workers=16), window(0.08, workers=16)).known() == {"load": 0.08}
    # Fewer workers than before: nobody has started.
    assert learned(window(0.2), *later, window(0.3, workers=2)).of("load") == 0.3


def test_twenty_windows_are_remembered() -> None:
    assert learned(window(0.1), window(0.9), *[window(0.1)] * 20).of("load") == 0.1


def test_what_was_learned_survives_json() -> None:
    old, new = learned(window(0.5), *[window(0.4)] * 3, window(0.6, workers=8)), CpuShares()
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.known() == old.known() == {"load": 0.4}


@pytest.mark.parametrize("state", [3, {}, {"cold": {}, "warm": 3}, {"cold": {"load": 3}, "warm": {}}])
def test_no_such_state(state: Any) -> None:
    shares = learned(window(0.4))
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        shares.load_state_dict(state)
    assert shares.of("load") == 0.4


def test_an_empty_state_knows_nothing() -> None:
    shares = learned(window(0.4))
    shares.load_state_dict({"cold": {"load": []}, "warm": {}})
    assert shares.of("load") == 1.0
