"""Where the fitted curves say the pipeline should be, and what memory allows of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from types import SimpleNamespace

import numpy as np

from intune_callbacks.agent.curves import Curves
from intune_callbacks.agent.curves_one import CurvesOfOne, smaller_root
from intune_callbacks.agent.model import DEMAND_MARGIN
from intune_callbacks.agent.ordering import window_for
from intune_callbacks.agent.view import Bools, Floats, View

__all__ = ["expected_gain", "fit_budget", "fit_memory", "target", "target_of_one", "window_ratio", "windows_for"]

HALVINGS, INTERPOLATIONS = 14, 8
SLACK = 1.2
"""Workers beyond the bare need: stages of about the same speed disturb each other."""
ALMOST_ONE = 0.99
"""Nobody gets a worker for less than this share of one, whatever is rounded."""
_LOG_WORKERS, _CVS = np.arange(0.0, 9.0), np.array([0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6])

_CVS_OF_ONE = _CVS.tolist()


def target(view: View, curves: Curves, usable: float = 0.97) -> Floats:
    """Return the workers that give the largest rate the curves, the CPUs and the model's demand allow, [N, S].

    Args:
        view: N pipelines; buffers are left as they are.
        curves: their fitted stages.
        usable: share of a stage's largest possible rate that is aimed at.
    """
    if view.is_one:
        return np.array([target_of_one(view.one, curves.one, usable)])
    mask, weight = view.workers, view.worker_weight
    high = np.minimum(view.high, np.maximum(16.0, np.maximum(4.0 * view.value, np.ceil(view.budget)[:, None])))
    top = np.minimum(DEMAND_MARGIN * view.demand, 1e9)
    top = np.minimum(top, view.budget / np.maximum((curves.constant * weight).sum(1), 1e-12)) / usable
    rate = _largest_rate(view, curves, top, high, weight)
    exact = np.where(mask, np.maximum(curves.workers_for(usable * rate[:, None]), view.low), 0.0)
    return _whole(exact, np.minimum(exact * SLACK, high), view, weight)


def _largest_rate(view: View, curves: Curves, top: Floats, high: Floats, weight: Floats) -> Floats:
    """Return the largest rate up to `top` whose workers fit below `high` and within the budget, [N]."""
    mask = view.workers
    low_rate, high_rate = np.zeros(len(top)), top
    for _ in range(HALVINGS):
        middle = 0.5 * (low_rate + high_rate)
        needed = np.maximum(curves.workers_for(middle[:, None]), view.low)
        fits = np.where(mask, needed <= high, True).all(1)
        fits &= (np.where(mask, np.minimum(needed, high), 0.0) * weight).sum(1) <= view.budget
        low_rate, high_rate = np.where(fits, middle, low_rate), np.where(fits, high_rate, middle)
    return low_rate


def _whole(exact: Floats, wanted: Floats, view: View, weight: Floats) -> Floats:
    """Round to whole workers within the budget: first what is needed, the largest remainders first, then the slack."""
    n = np.where(view.workers, np.maximum(np.floor(exact + 1e-6), view.low), 0.0)
    for goal in (exact, wanted):
        growth = np.maximum(goal - n, 0.0)
        part = (view.budget - (n * weight).sum(1)) / np.maximum((growth * weight).sum(1), 1e-9)
        part = np.minimum(np.maximum(part, 0.0), 1.0)
        n = n + np.floor(growth * part[:, None] + 1e-6)
        left = goal - n
        n = n + _one_more(left / np.maximum(n, 1.0), left > 0.05, weight, view.budget - (n * weight).sum(1))
    return n


def _one_more(urgency: Floats, wanted: Bools, weight: Floats, room: Floats) -> Floats:
    """Return 1 where a slot gets one worker more, [N, S]: the most urgent first, as far as there is room."""
    more, rows = np.zeros(weight.shape), np.flatnonzero(wanted.any(1))
    order = np.argsort(np.where(wanted, -urgency, np.inf), 1, kind="stable")
    for row in rows:
        left, asked = float(room[row]) + 1e-9, int(wanted[row].sum())
        places = order[row, :asked]
        for place, cost in zip(places.tolist(), weight[row, places].tolist(), strict=True):
            if cost <= left:
                more[row, place] = 1.0
                left -= cost
    return more


def target_of_one(one: SimpleNamespace, curves: CurvesOfOne, usable: float) -> list[float]:
    """Return what `target` does for one pipeline, in plain numbers: on a few stages arrays are slower.

    Args:
        one: `View.one`.
        curves: `Curves.one`.
        usable: as for `target`.
    """
    budget, alone_cpus_s, lightest = one.budget, 0.0, math.inf
    most = max(16.0, math.ceil(budget))
    slots: list[tuple[float, ...]] = []
    for has, constant, linear, square, low, high, weight, now in zip(
        one.workers,
        curves.constant,
        curves.linear,
        curves.square,
        one.low,
        one.high,
        one.weight,
        one.value,
        strict=True,
    ):
        if has:
            alone_cpus_s += constant * weight
            reach = most if most > 4.0 * now else 4.0 * now
            alone = constant - linear
            slots.append((alone if alone > 0.0 else 0.0, linear, square, low, reach if reach < high else high, weight))
            if weight < lightest:
                lightest = weight
    top = min(DEMAND_MARGIN * one.demand, 1e9, budget / max(alone_cpus_s, 1e-12)) / usable
    rate = usable * _largest_rate_of_one(slots, top, budget)
    exact, wanted, whole, weights, used = [], [], [], [], 0.0
    for alone, linear, square, low, high, weight in slots:
        n = smaller_root(rate, alone, linear, square)
        n = n if n > low else low
        units = float(math.floor(n + 1e-6))
        units = units if units > low else low
        exact.append(n)
        wanted.append(n * SLACK if n * SLACK < high else high)
        whole.append(units)
        weights.append(weight)
        used += units * weight
    for goal in (exact, wanted):
        if budget - used < ALMOST_ONE * lightest:
            break
        growth = [more - n if more > n else 0.0 for more, n in zip(goal, whole, strict=True)]
        asked = sum([n * weight for n, weight in zip(growth, weights, strict=True)])
        part = min((budget - used) / max(asked, 1e-9), 1.0)
        if part > 0.0 and part * max(growth) > ALMOST_ONE:
            whole = [n + math.floor(more * part + 1e-6) for n, more in zip(whole, growth, strict=True)]
            used = sum([n * weight for n, weight in zip(whole, weights, strict=True)])
        room = budget - used + 1e-9
        able = [
            ((n - more) / (n if n > 1.0 else 1.0), i)
            for i, (more, n, weight) in enumerate(zip(goal, whole, weights, strict=True))
            if weight <= room and more - n > 0.05
        ]
        for _, i in sorted(able):
            if weights[i] <= room:
                whole[i] += 1.0
                room -= weights[i]
                used += weights[i]
    workers = iter(whole)
    return [next(workers) if has else 0.0 for has in one.workers]


def _largest_rate_of_one(slots: list[tuple[float, ...]], top: float, budget: float) -> float:
    """Return what `_largest_rate` does for one pipeline.

    Args:
        slots: of each stage: constant less linear, linear and square coefficient, lowest, highest, CPUs per unit.
        top: largest rate.
        budget: CPUs.
    """
    low, high = 0, 1 << HALVINGS
    unit = top / high

    def cpus_for(step: int) -> float:
        rate, cpus = step * unit, 0.0
        for alone, linear, square, least, most, weight in slots:
            needed = smaller_root(rate, alone, linear, square) if linear or square else rate * alone
            if needed < least:
                needed = least
            if needed > most:
                return math.inf
            cpus += needed * weight
        return cpus

    # What halving finds, sooner: mostly the CPUs grow nearly in proportion to the rate.
    at_low, at_high, guesses = cpus_for(low), cpus_for(high), INTERPOLATIONS
    while high - low > 1:
        step = (low + high) // 2
        if guesses and at_low < at_high < math.inf:
            guesses -= 1
            part = min(max((budget - at_low) / (at_high - at_low), 0.0), 1.0)
            step = min(max(low + int(part * (high - low)), low + 1), high - 1)
        cpus = cpus_for(step)
        low, at_low, high, at_high = (step, cpus, high, at_high) if cpus <= budget else (low, at_low, step, cpus)
    return low * unit


def windows_for(value: Floats, cv: Floats, view: View) -> Floats:
    """Return the window every worker stage should have for its irregularity, [N, S]; 0 where there is none."""
    table = np.array(_ratios())
    i = np.minimum(np.round(np.log2(np.maximum(value, 1.0))), len(_LOG_WORKERS) - 1).astype(int)
    j = np.searchsorted(_CVS, np.minimum(cv, _CVS[-1]))
    return np.where(view.workers & (view.window > 0.0), np.ceil(value * table[i, j]), 0.0)


def fit_memory(view: View, value: Floats, window: Floats, limit: Floats | float) -> tuple[Floats, Floats]:
    """Return the part of an allocation that stays below the memory limit with every window full.

    Buffers give way first, then windows, then new workers.

    Args:
        view: N pipelines.
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
    room = np.where(view.workers, np.maximum(window - value, 0.0), 0.0)
    cut = np.clip(over / np.maximum((room * view.item_memory).sum(1), 1e-12), 0.0, 1.0)[:, None]
    window = np.where(cut > 0.0, np.floor(window - cut * room), window)
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
    """Return workers whose CPUs fit the budget: in proportion, so that a balanced allocation stays balanced.

    Args:
        view: N pipelines.
        value: what is wanted, [N, S].
    """
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
    workers = view.workers

    def slowest_s(value: Floats) -> Floats:
        each = np.where(workers, curves.service_s(value) / np.maximum(value, 1.0), 0.0).max(1)
        return np.asarray(np.maximum(each, 1.0 / np.maximum(view.demand, 1e-12)))

    return np.asarray(np.log(slowest_s(view.value) / np.maximum(slowest_s(wanted), 1e-12)))


def window_ratio(value: float, cv: float) -> float:
    """Return results a window should hold for each worker, of `value` whose service times vary by `cv`."""
    i = min(round(math.log2(value)), len(_LOG_WORKERS) - 1) if value > 1.0 else 0
    return _ratios()[i][bisect_left(_CVS_OF_ONE, min(cv, _CVS_OF_ONE[-1]))]


@lru_cache(maxsize=1)
def _ratios() -> list[list[float]]:
    return [[window_for(round(2**e), float(c)) / round(2**e) for c in _CVS] for e in _LOG_WORKERS]
