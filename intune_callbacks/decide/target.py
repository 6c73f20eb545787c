"""Where the fitted curves say the pipeline should be, and what memory allows of it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from intune_callbacks.decide.curves import Curves
from intune_callbacks.decide.ordering import window_for
from intune_callbacks.decide.view import Bools, Floats, View

__all__ = ["batch_s", "expected_gain", "fit_budget", "fit_memory", "target", "windows_for"]

HALVINGS = 14
"""Of the range of rates a target is looked for in: to 1 / 16,000 of it, far less than a worker changes."""
DEMAND_MARGIN = 1.25
"""Supply planned above what the model asks for, so that irregular batches do not reach the trainer. A choice: it costs
CPUs."""
SLACK = 1.2
"""Workers beyond the bare need, as CPUs allow: stages of about the same speed disturb each other. A choice."""
_LOG_WORKERS, _CVS = np.arange(0.0, 9.0), np.array([0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6])
"""Where the widths of windows are tabulated: powers of two of the workers, coefficients of variation."""


def target(view: View, curves: Curves, usable: float) -> Floats:
    """Return the workers that give the largest rate the curves, the CPUs and the model's demand allow, [N, S].

    Args:
        view: N pipelines; buffers are left as they are.
        usable: share of a stage's largest possible rate that is aimed at.
    """
    high = np.minimum(view.high, np.maximum(16.0, np.maximum(4.0 * view.value, np.ceil(view.budget)[:, None])))
    top = np.minimum(DEMAND_MARGIN * view.demand, 1e9)
    top = np.minimum(top, view.budget / np.maximum((curves.constant * view.worker_weight).sum(1), 1e-12)) / usable
    rate = _largest_rate(view, curves, top, high)
    exact = np.where(view.workers, np.maximum(curves.workers_for(usable * rate[:, None]), view.low), 0.0)
    return _whole(exact, np.minimum(exact * SLACK, high), view)


def _largest_rate(view: View, curves: Curves, top: Floats, high: Floats) -> Floats:
    """Return the largest rate up to `top` whose workers fit below `high` and within the budget, [N]."""
    rate, step = np.zeros(len(top)), top
    # Of one pipeline many rates at a time: a call on few numbers costs nearly as much as one on many.
    parts, rounds = (128, 2) if len(top) == 1 else (2, HALVINGS)
    for _ in range(rounds):
        step = step / parts
        tried = rate + step * np.arange(1.0, parts)[:, None]
        needed = np.maximum(curves.workers_for(tried[..., None]), view.low)
        fits = ((needed <= high) | ~view.workers).all(2)
        fits &= (np.minimum(needed, high) * view.worker_weight).sum(2) <= view.budget
        rate = rate + step * fits.sum(0)
    return rate


def _whole(exact: Floats, wanted: Floats, view: View) -> Floats:
    """Round to whole workers within the budget: first what is needed, the largest remainders first, then the slack."""
    weight = view.worker_weight
    n = np.where(view.workers, np.maximum(np.floor(exact + 1e-6), view.low), 0.0)
    for goal in (exact, wanted):
        growth = np.maximum(goal - n, 0.0)
        part = (view.budget - (n * weight).sum(1)) / np.maximum((growth * weight).sum(1), 1e-9)
        part = np.minimum(np.maximum(part, 0.0), 1.0)
        n = n + np.floor(growth * part[:, None] + 1e-6)
        left = goal - n
        n = n + _one_more(left / np.maximum(n, 1.0), left > 0.05, weight, view.budget - (n * weight).sum(1))
    return n


def _one_more(urgency: Floats, wanted: Bools, weight: Floats, free_cpus: Floats) -> Floats:
    """Return 1 where a slot gets one worker more, [N, S]: the most urgent first, as far as there are CPUs."""
    more, rows = np.zeros(weight.shape), np.flatnonzero(wanted.any(1))
    order = np.argsort(np.where(wanted, -urgency, np.inf), 1, kind="stable")
    for row in rows:
        left, asked = float(free_cpus[row]) + 1e-9, int(wanted[row].sum())
        places = order[row, :asked]
        for place, cost in zip(places.tolist(), weight[row, places].tolist(), strict=True):
            if cost <= left:
                more[row, place] = 1.0
                left -= cost
    return more


def windows_for(value: Floats, cv: Floats, view: View) -> Floats:
    """Return the window every worker stage should have for its irregularity, [N, S]; 0 where there is none."""
    i = np.minimum(np.round(np.log2(np.maximum(value, 1.0))), len(_LOG_WORKERS) - 1).astype(int)
    j = np.searchsorted(_CVS, np.minimum(cv, _CVS[-1]))
    return np.where(view.workers & (view.window > 0.0), np.ceil(value * _ratios()[i, j]), 0.0)


def fit_memory(view: View, value: Floats, window: Floats, limit: Floats | float) -> tuple[Floats, Floats]:
    """Return the part of an allocation that stays below the memory limit with every window full.

    Buffers give way first, then windows, then new workers.

    Args:
        value, window: what is wanted, [N, S].
        limit: share of the memory, 0..1.
    """
    buffers = view.mask & view.is_buffer
    over = view.needed(value, window) - limit
    if not (over > 0.0).any():
        return value, window
    size = np.where(buffers, np.maximum(value - view.low, 0.0) * view.unit_memory, 0.0)
    cut = np.clip(over / np.maximum(size.sum(1), 1e-12), 0.0, 1.0)[:, None]
    value = np.where(buffers, np.maximum(np.floor(value - cut * (value - view.low)), view.low), value)
    over = view.needed(value, window) - limit
    spare = np.where(view.workers, np.maximum(window - value, 0.0), 0.0)
    cut = np.clip(over / np.maximum((spare * view.item_memory).sum(1), 1e-12), 0.0, 1.0)[:, None]
    window = np.where(cut > 0.0, np.floor(window - cut * spare), window)
    over = view.needed(value, window) - limit
    growth = np.where(view.workers, np.maximum(value - view.value, 0.0), 0.0)
    cost = view.unit_memory + np.where(value > 0.0, window / np.maximum(value, 1.0), 0.0) * view.item_memory
    cut = np.clip(over / np.maximum((growth * cost).sum(1), 1e-12), 0.0, 1.0)[:, None]
    fewer = np.where(cut > 0.0, value - np.ceil(cut * growth), value)
    window = np.where(fewer < value, np.floor(window * fewer / np.maximum(value, 1.0)), window)
    # Narrower windows do not give back what they hold: where that was counted on, nothing grows.
    still = (view.needed(fewer, window) > limit + 1e-9)[:, None] & view.workers
    fewer = np.where(still, np.minimum(fewer, view.value), fewer)
    return fewer, np.where(still, np.minimum(window, fewer), window)


def fit_budget(view: View, value: Floats) -> Floats:
    """Return workers whose CPUs fit the budget: in proportion, so that a balanced allocation stays balanced."""
    weight = view.worker_weight
    used = (value * weight).sum(1)
    if (used <= view.budget + 1e-6).all():
        return value
    low = np.where(weight > 0.0, view.low, value)
    least = (low * weight).sum(1)
    part = np.clip((view.budget - least) / np.maximum(used - least, 1e-9), 0.0, 1.0)[:, None]
    fits = np.where(weight > 0.0, low + np.floor(part * (value - low) + 1e-9), value)
    return np.where((used > view.budget + 1e-6)[:, None], fits, value)


def expected_gain(view: View, curves: Curves, wanted: Floats) -> Floats:
    """Return the gain in log throughput the curves expect of other workers, [N]."""
    model_s = 1.0 / np.maximum(view.demand, 1e-12)
    now_s, then_s = (np.maximum(batch_s(view, curves, value).max(1), model_s) for value in (view.value, wanted))
    return np.asarray(np.log(now_s / np.maximum(then_s, 1e-12)))


def batch_s(view: View, curves: Curves, value: Floats) -> Floats:
    """Return the seconds in which each stage with `value` workers makes a batch, 0 for buffers, [..., N, S]."""
    return np.where(view.workers, curves.service_s(value) / np.maximum(value, 1.0), 0.0)


@lru_cache(maxsize=1)
def _ratios() -> Floats:
    """Results a window should hold for each worker, by ln2(workers) and irregularity."""
    return np.array([[window_for(round(2**e), float(c)) / round(2**e) for c in _CVS] for e in _LOG_WORKERS])
