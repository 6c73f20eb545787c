"""The moves: the combination chosen is the best there is, and never one that may not be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from views import a_view

from intune_callbacks.decide.moves import MOVES, STAY, allowed, best_moves

QUANTA = 4


def cost(moves: Any, weight: Any) -> float:
    """CPUs a combination takes, counted in quarters rounded up."""
    return float(np.ceil(MOVES[list(moves)] * weight * QUANTA - 1e-6).sum() / QUANTA)


@st.composite
def questions(draw: Any) -> tuple[Any, Any, Any, Any]:
    """Values, permitted moves, weights and free CPUs of one to three pipelines."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = rng.normal(size=(*shape, 5))
    legal = rng.random((*shape, 5)) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    legal[..., STAY] = True
    weights = st.sampled_from([np.ones(shape), rng.random(shape), rng.integers(0, 9, shape) / QUANTA])
    free_cpus = np.round(rng.uniform(-12.0, 12.0, shape[0]), draw(st.sampled_from([0, 2])))
    return q, legal, draw(weights), free_cpus


@settings(max_examples=150)
@given(questions())
def test_the_best_of_all_combinations(question: tuple[Any, Any, Any, Any]) -> None:
    q, legal, weight, free_cpus = question
    chosen = best_moves(q, legal, weight, free_cpus, QUANTA)
    for row in range(len(q)):
        stages = range(q.shape[1])
        may = [c for c in itertools.product(range(5), repeat=q.shape[1]) if all(legal[row, i, c[i]] for i in stages)]
        costs = np.array([cost(c, weight[row]) for c in may])
        worth = np.array([sum(q[row, i, c[i]] for i in stages) for c in may])
        within = costs <= free_cpus[row] + 1e-9
        # Where nothing fits, the most that can be given back; of several ways the best.
        within = within if within.any() else costs <= costs.min() + 1e-9
        got = tuple(chosen[row])
        assert got in may
        assert within[may.index(got)]
        assert sum(q[row, i, got[i]] for i in stages) == pytest.approx(worth[within].max(), abs=1e-4)


def test_fractions_of_a_cpu_never_add_up_to_more_than_there_is() -> None:
    rng = np.random.default_rng(0)
    shape = (300, 6)
    weight, free_cpus = rng.uniform(0.0, 1.0, shape), rng.uniform(0.0, 8.0, shape[0])
    q = rng.normal(size=(*shape, 5)) + 0.5 * MOVES
    chosen = best_moves(q, np.ones((*shape, 5), bool), weight, free_cpus)
    spent = (MOVES[chosen] * weight).sum(1)
    assert (spent <= free_cpus + 1e-9).all()
    # Rounding leaves less than a quarter of a CPU per stage unused.
    assert np.median(free_cpus - spent) < 6 / QUANTA


def test_gives_back_as_much_as_possible() -> None:
    q = np.zeros((1, 3, 5))
    q[..., 4] = 100.0
    legal = np.ones((1, 3, 5), bool)
    legal[0, 0, :2] = False
    assert MOVES[best_moves(q, legal, np.ones((1, 3)), np.array([-50.0]))].tolist() == [[0.0, -5.0, -5.0]]


def test_pipelines_are_decided_for_one_by_one() -> None:
    rng = np.random.default_rng(1)
    q, legal = rng.normal(size=(40, 5, 5)), rng.random((40, 5, 5)) < 0.8
    legal[..., STAY] = True
    weight, free_cpus = rng.uniform(0.0, 1.0, (40, 5)), rng.uniform(-4.0, 4.0, 40)
    weight[0] = 1.0
    together = best_moves(q, legal, weight, free_cpus)
    for row in range(40):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(together[one], best_moves(q[one], legal[one], weight[one], free_cpus[one]))


# -- what may be moved ---------------------------------------------------------------------------------------------


def may(view: Any, ratio: float = 0.0, limit: float = 0.9) -> list[list[float]]:
    """Return the moves each slot of one pipeline may make."""
    legal = allowed(view, np.full(view.value.shape, ratio), limit)
    return [MOVES[slot].tolist() for slot in legal[0]]


ALL, NO_MORE = MOVES.tolist(), [-5.0, -1.0, 0.0]


def test_moves_stay_between_low_and_high() -> None:
    view = a_view([[20, 3, 1, 20, 20]], low=[[1, 1, 1, 16, 1]], high=[[99, 99, 99, 99, 21]])
    assert may(view) == [ALL, [-1, 0, 1, 5], [0, 1, 5], [-1, 0, 1, 5], [-5, -1, 0, 1]]


def test_a_buffer_is_not_raised_where_a_stage_computes_all_the_time() -> None:
    for busy, buffer in ((0.9, ALL), (1.0, NO_MORE)):
        assert may(a_view([[20, 20]], is_buffer=[[False, True]], busy=[[busy, 0.0]])) == [ALL, buffer]
    assert may(a_view([[20, 20]], is_buffer=[[False, True]], busy=[[0.5, 1.0]])) == [ALL, ALL]


def test_moves_do_not_pass_the_memory() -> None:
    # Windows are full, so that only what is added counts.
    full = {"fill": 1.0, "memory": 0.80}
    view = a_view([[20, 20, 20, 20]], unit_memory=[[0.01, 0.03, 0.2, 0.0]], **full)
    assert may(view) == [ALL, [*NO_MORE, 1], NO_MORE, ALL]
    # A worker brings its part of the window along: .01 + 3 * .01 each.
    assert may(a_view([[20]], unit_memory=0.01, item_memory=0.01, **full), ratio=3.0) == [[*NO_MORE, 1]]
    # Windows that are empty now may fill: 40 * .01 more.
    assert may(a_view([[20]], item_memory=0.01, memory=0.6, fill=0.0)) == [NO_MORE]
    # Over the limit already, going down is never forbidden.
    assert may(a_view([[20]], unit_memory=0.01, memory=0.99)) == [NO_MORE]


def test_missing_slots_stay() -> None:
    assert may(a_view([[20, 20]], mask=[[True, False]])) == [ALL, [0]]
