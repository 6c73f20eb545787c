"""What it costs that results leave in order, and how wide a window has to be for that."""

from __future__ import annotations

import math

__all__ = ["RARE", "in_order_efficiency", "window_for"]

LOSS = 0.04
"""Share of their rate that workers may lose to the order. A choice between CPUs that stand idle and memory, see
docs/adr/0007-window-covers-the-slowest.md."""
RARE = 1.2
"""Factor on the measured variation, a choice: long items are rare, so that a few dozen show too small a variation more
often than too large a one."""
NARROWEST, WIDEST = 2, 12
"""Bounds of a window, in results per worker. A choice: one in progress and one finished, and what memory may take."""


def in_order_efficiency(workers: int, window: int, cv: float) -> float:
    """Return the share of their rate that `workers` keep when results leave in order through a window.

    An item that takes longer than the window lasts stops everyone for the rest of its time: with lognormal service
    times S of mean 1 the efficiency e solves ``1 / e = 1 + workers * E[max(0, S - window / (workers * e))]``.
    A simulation of the ordered pool (2..64 workers, windows of 1..12 times that, cv .3, .5, .95) agrees within .1.

    Args:
        window: results finished or in progress ahead of the next one to be delivered.
        cv: coefficient of variation of the service times.
    """
    if workers <= 1 or cv <= 0.01:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2.0
        if middle * (1.0 + workers * _mean_excess(window / (workers * middle), cv)) < 1.0:
            low = middle
        else:
            high = middle
    return high


def window_for(workers: int, cv: float) -> int:
    """Return the smallest window, of 2 to 12 times `workers`, that costs them no more than 4 % of their rate.

    Args:
        cv: measured coefficient of variation of the service times; a fifth more is planned for.
    """
    low, high = 4 * NARROWEST, 4 * WIDEST
    while low < high:
        quarters = (low + high) // 2
        if in_order_efficiency(workers, math.ceil(workers * quarters / 4), RARE * cv) >= 1.0 - LOSS:
            high = quarters
        else:
            low = quarters + 1
    return math.ceil(workers * high / 4)


def _mean_excess(limit: float, cv: float) -> float:
    """Return E[max(0, S - limit)] of a lognormal S with mean 1 (the Black-Scholes integral)."""
    sigma = math.sqrt(math.log1p(cv * cv))
    d = (-math.log(limit) + sigma * sigma / 2.0) / sigma
    return _normal(d) - limit * _normal(d - sigma)


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
