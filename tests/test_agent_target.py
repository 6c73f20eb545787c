"""The allocation that fitted curves ask for, within CPUs and memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from views import SCALING, a_view, service_s

from intune_callbacks.decide.curves import Curves
from intune_callbacks.decide.ordering import in_order_efficiency
from intune_callbacks.decide.target import fit_budget, fit_memory, target, windows_for
from intune_callbacks.decide.view import View


def aimed(view: View, usable: float = 0.97) -> list[float]:
    return target(view, Curves(view), usable)[0].tolist()


def test_target_of_linear_stages_is_in_proportion_to_their_cost() -> None:
    assert aimed(a_view([[4, 4, 4]], [0.1, 0.2, 0.5])) == [2, 4, 10]
    # The first keeps three quarters of a CPU busy, the second half of one: 4 * .75 + 2 * .5 + 8 = 12.
    view = a_view([[4, 4, 4]], [0.2, 0.1, 0.4], 12.0, weight=[0.75, 0.5, 1.0], cpu_share=[0.75, 0.5, 1.0])
    assert aimed(view) == [4, 2, 8]


def test_target_of_linear_stages_is_the_best_there_is() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        cost = rng.uniform(0.05, 0.5, 3)
        splits = [s for s in itertools.product(range(1, 15), repeat=3) if sum(s) <= 16]
        best = max((np.array(s) / cost).min() for s in splits)
        got = (np.array(aimed(a_view([[5, 5, 5]], cost), usable=1.0)) / cost).min()
        assert got >= 0.85 * best


def test_target_gives_a_lock_few_workers() -> None:
    curves = Curves(two := a_view([[8, 8]], [service_s(SCALING["lock"], 8), 0.5], cpu_share=[0.125, 1.0]))
    # By its service time at eight workers alone the first stage would get ten of sixteen.
    assert target(two, curves, 0.97)[0, 0] >= 5
    for n in 3 * (4, 12, 8):
        curves.learn(a_view([[n, 8]], [service_s(SCALING["lock"], n), 0.5], cpu_share=[1.0 / n, 1.0]))
    n = target(two, curves, usable=0.9)[0]
    assert n[0] <= 4 and n[1] >= 5


def test_target_of_a_stage_that_takes_no_cpu_but_waits_for_a_lock() -> None:
    # Sixteen readers that only wait: no number of them gives ten batches a second, nor costs a CPU.
    view = a_view([[16, 4]], [1.6, 0.1], weight=[[0.0, 1.0]], cpu_share=[[0.0, 1.0]])
    curves = Curves(view)
    for n in (8, 4, 12, 16):
        curves.learn(a_view([[n, 4]], [0.1 * n, 0.1], weight=[[0.0, 1.0]], cpu_share=[[0.0, 1.0]]))
    n = target(view, curves, 0.97)[0]
    assert np.isfinite(n).all() and (n >= 1).all() and n[1] <= 16


def test_target_stops_a_quarter_above_the_models_demand() -> None:
    work_s = np.array([0.1, 0.3])
    n = np.array(aimed(a_view([[8, 8]], work_s, 64.0, demand=10.0)))
    # 12.5 batches a second, and at most a fifth more against disturbance, in whole workers.
    assert (n / work_s >= 12.5 * 0.999).all()
    assert (n <= np.ceil(12.5 * work_s * 1.2)).all()


def test_target_respects_low_and_high() -> None:
    low, high = [[6, 1, 1]], [[16, 16, 2]]
    n = aimed(a_view([[8, 8, 2]], [0.01, 0.3, 0.2], low=low, high=high))
    assert n[0] >= 6 and n[2] == 2
    # Two workers of the last give 10 batches a second: the second needs three for that, a spare one is fine.
    assert 3 <= n[1] <= 4
    assert aimed(a_view([[8, 8, 2]], [0.01, 0.3, 0.2], demand=1.0, low=[[6, 7, 2]]))[1] >= 7


@st.composite
def pipelines(draw: Any) -> View:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low = rng.integers(1, 4, shape)
    high = low + rng.integers(0, draw(st.sampled_from([4, 60])), shape)
    share = rng.uniform(0.1, 1.0, shape)
    return a_view(
        np.clip(rng.integers(1, 40, shape), low, high),
        np.exp(rng.uniform(-9.0, 2.0, shape)),
        cpus=rng.uniform(2.0, 64.0, shape[0]),
        mask=rng.random(shape) < 0.8,
        low=low,
        high=high,
        weight=rng.uniform(0.1, 1.0, shape),
        cpu_share=share,
        demand=np.exp(rng.uniform(-3.0, 8.0, shape[0])),
    )


@settings(max_examples=150)
@given(pipelines(), st.sampled_from([0.8, 0.95, 1.0]))
def test_target_never_takes_more_than_there_is(view: View, usable: float) -> None:
    n = target(view, Curves(view), usable)
    weight = np.where(view.workers, view.weight, 0.0)
    least = (weight * view.low).sum(1)
    assert ((n * weight).sum(1) <= np.maximum(view.budget, least) + 1e-6).all()
    assert (n == np.round(n)).all()
    assert ((n >= view.low) & (n <= view.high))[view.workers].all()


# -- what fits ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(pipelines(), st.integers(0, 2**32 - 1))
def test_fit_budget_keeps_the_proportions_within_the_budget(view: View, seed: int) -> None:
    value = np.random.default_rng(seed).integers(view.low, view.high + 1).astype(float)
    weight = np.where(view.workers, view.weight, 0.0)
    n = fit_budget(view, value)
    used, least = (value * weight).sum(1), (view.low * weight).sum(1)
    assert ((n * weight).sum(1) <= np.maximum(view.budget, least) + 1e-5).all()
    assert ((n <= value) & (n >= view.low)).all()
    fits = used <= view.budget
    assert (n[fits] == value[fits]).all()
    # No more is taken away than rounding asks for: one unit per stage.
    over = (used > view.budget + 1e-6) & (least < view.budget)
    assert (((n + view.workers) * weight).sum(1)[over] >= np.minimum(view.budget, used)[over] - 1e-6).all()


def test_fit_budget_takes_the_same_part_of_every_stage() -> None:
    view = a_view([[9, 17, 33]], cpus=30.0)
    assert fit_budget(view, view.value).tolist() == [[4, 8, 16]]


def test_fit_budget_leaves_buffers_alone() -> None:
    view = a_view([[30, 64]], cpus=10.0, is_buffer=[[False, True]], weight=[[1.0, 0.0]])
    assert fit_budget(view, view.value).tolist() == [[10, 64]]


def shrunk(view: View, value: Any, window: Any, limit: float = 0.9) -> tuple[list[float], list[float], float]:
    n, wide = fit_memory(view, np.array([value], float), np.array([window], float), limit)
    return n[0].tolist(), wide[0].tolist(), float(view.needed(n, wide)[0])


def test_fit_memory_takes_buffers_first_then_windows_then_workers() -> None:
    # A worker, a place of its window and a buffered batch all take a hundredth; three tenths are free.
    parts = {"is_buffer": [[False, True]], "unit_memory": 0.01, "item_memory": [[0.01, 0.0]], "window": [[10, 0]]}
    view = a_view([[10, 2]], memory=0.6, fill=1.0, **parts)
    assert shrunk(view, [12, 4], [20, 0])[:2] == ([12, 4], [20, 0])
    assert shrunk(view, [15, 30], [20, 0])[:2] == ([15, 17], [20, 0])
    assert shrunk(view, [20, 30], [40, 0])[:2] == ([20, 1], [30, 0])
    n, wide, needed = shrunk(view, [40, 30], [60, 0])
    # Ten workers more and ten places more would fit just so; growth goes before what is there.
    assert 10 < n[0] < 30 and n[1] == 1 and wide[0] >= n[0]
    assert needed <= 0.9 + 1e-9


def test_fit_memory_never_takes_the_workers_there_are() -> None:
    view = a_view([[10, 10]], memory=0.97, fill=1.0, unit_memory=0.01, item_memory=0.01, window=10.0)
    n, wide, _ = shrunk(view, [10, 14], [10, 28])
    assert (n, wide) == ([10, 10], [10, 10])


def test_fit_memory_leaves_alone_what_fits() -> None:
    view = a_view([[10], [10]], memory=[0.5, 0.89], unit_memory=0.01, fill=1.0)
    n, wide = fit_memory(view, np.full((2, 1), 20.0), np.full((2, 1), 40.0), 0.9)
    assert (n[0, 0], wide[0, 0]) == (20.0, 40.0) and n[1, 0] == 11.0


@st.composite
def memories(draw: Any) -> tuple[View, Any, Any, float]:
    """A pipeline short of memory, what is wanted of it, and the limit."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    now = rng.integers(1, 30, shape).astype(float)
    buffer = np.zeros(shape, bool)
    buffer[:, -1] = draw(st.booleans())
    size = draw(st.sampled_from([1e-4, 1e-3, 1e-2]))
    # Full or empty, as wide as the workers or wider: whatever the pipeline came from.
    view = a_view(
        now,
        cpus=64.0,
        is_buffer=buffer,
        mask=rng.random(shape) < 0.9,
        unit_memory=size * rng.random(shape),
        item_memory=np.where(buffer, 0.0, size * rng.random(shape)),
        window=np.where(buffer, 0.0, now * rng.integers(1, 9, shape)),
        fill=rng.random(shape) * draw(st.sampled_from([0.0, 1.0])),
        memory=rng.uniform(0.3, 0.95, shape[0]),
    )
    value = np.where(view.mask, rng.integers(1, 60, shape), now).astype(float)
    window = np.where(buffer, 0.0, value * rng.integers(1, 9, shape))
    return view, value, window, draw(st.sampled_from([0.6, 0.9]))


@settings(max_examples=300)
@given(memories())
def test_fit_memory_never_passes_the_limit_but_for_the_workers_there_are(
    question: tuple[View, Any, Any, float],
) -> None:
    view, value, window, limit = question
    n, wide = fit_memory(view, value, window, limit)
    assert ((n <= value) & (wide <= window)).all()
    assert (n == np.round(n)).all() and (wide == np.round(wide)).all()
    assert (n >= np.where(view.is_buffer, view.low, np.minimum(value, view.value)))[view.mask].all()
    assert (wide >= np.minimum(window, n))[view.workers].all()
    over = view.needed(n, wide) > limit + 1e-9
    for row in np.flatnonzero(over):
        kept = view.workers[row]
        # Nothing is left that would give memory back: no new workers, no places of a window but one per worker.
        assert (n[row] <= view.value[row])[kept].all()


def test_windows_are_wide_enough_for_irregular_work() -> None:
    view = a_view([[1, 8, 32, 100, 8]], window=[[2, 2, 2, 2, 0]])
    for cv in (0.0, 0.3, 0.7, 1.0):
        wide = windows_for(view.value, np.full((1, 5), cv), view)[0]
        assert wide[4] == 0.0
        for n, w in zip(view.value[0, :4], wide[:4], strict=True):
            assert w >= n and w == round(w)
            assert in_order_efficiency(int(n), int(w), cv) > 0.9
    narrow, broad = (windows_for(view.value, np.full((1, 5), cv), view)[0, 2] for cv in (0.1, 0.9))
    assert broad > 2.0 * narrow


def test_buffers_and_missing_slots_have_no_window() -> None:
    view = a_view([[8, 8, 8]], is_buffer=[[False, False, True]], mask=[[True, False, True]])
    assert windows_for(view.value, view.cv, view)[0, 1:].tolist() == [0.0, 0.0]
