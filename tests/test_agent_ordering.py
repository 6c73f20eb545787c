"""What results in order cost: the closed form against a simulation of an ordered pool."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from intune_callbacks.decide.ordering import RARE, in_order_efficiency, window_for


def simulated_efficiency(workers: int, window: int, cv: float, items: int = 6000) -> float:
    """An ordered pool, item by item: item i starts when a worker is free and item i - window was delivered."""
    draw = random.Random(0)
    sigma = math.sqrt(math.log1p(cv * cv))
    free, delivered, work_s = [0.0] * workers, [0.0], 0.0
    for i in range(items):
        begin = max(heapq.heappop(free), delivered[i - window + 1] if i >= window else 0.0)
        service_s = draw.lognormvariate(-sigma * sigma / 2, sigma)
        heapq.heappush(free, begin + service_s)
        delivered.append(max(begin + service_s, delivered[-1]))
        work_s += service_s
    return work_s / (workers * delivered[-1])


@pytest.mark.parametrize("workers", [2, 8, 32])
@pytest.mark.parametrize("cv", [0.3, 0.5, 0.95])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_cost_of_order_agrees_with_a_simulation(workers: int, cv: float, width: int) -> None:
    expected = simulated_efficiency(workers, width * workers, cv)
    assert in_order_efficiency(workers, width * workers, cv) == pytest.approx(expected, abs=0.11)


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
@pytest.mark.parametrize("cv", [0.0, 0.3, 0.95])
def test_windows_cost_little_and_are_no_wider_than_needed(workers: int, cv: float) -> None:
    window = window_for(workers, cv)
    assert simulated_efficiency(workers, window, max(cv, 1e-3)) >= 0.94
    assert window == 2 * workers or in_order_efficiency(workers, window - workers, RARE * cv) < 0.96
