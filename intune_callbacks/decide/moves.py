"""The paper's five moves per stage, and the best combination of them under the CPU budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from intune_callbacks.decide.view import Bools, Floats, Ints, View

__all__ = ["MOVES", "QUANTA", "STAY", "STEPS", "Moved", "allowed", "at", "best_moves"]

STEPS = (-5.0, -1.0, 0.0, 1.0, 5.0)
"""Units per decision and stage (InTune, section 4.2)."""
MOVES = np.array(STEPS)
STAY = 2
QUANTA = 4
"""CPU weights are counted in quarters of a CPU, raises rounded up and cuts down: never over the budget. A choice: finer
steps make the table of `_given_back` larger, coarser ones leave CPUs unused."""
NEVER, LOST = -1e9, 0.5e9
"""Value of a move that may not be made, and the loss from which on a move is one of them."""
_FAR = 10**9
"""More quanta than any move costs."""
_STAY_FIRST = np.array([STAY, 0, 1, 3, 4])
"""Of moves that are equal in value and cost the first counts: no change without a reason."""
_RAISES, _IS_NO_RAISE = np.maximum(MOVES, 0.0), MOVES <= 0.0
Number = TypeVar("Number", np.float64, np.int64)


@dataclass(frozen=True, slots=True)
class Moved:
    """One decision as the learner needs it; arrays as in `features`, `allowed` and `best_moves`.

    Args:
        slots, pipeline: the state.
        mask: slots that exist, [N, S].
        moves: index of each slot's move, [N, S].
        legal: moves that may be made, [N, S, 5].
        weight: CPUs per unit, [N, S].
        free_cpus: CPUs that may be added, [N].
        followed: pipelines that did what `moves` says, [N].
    """

    slots: Floats
    pipeline: Floats
    mask: Bools
    moves: Ints
    legal: Bools
    weight: Floats
    free_cpus: Floats
    followed: Bools


def allowed(view: View, window_ratio: Floats, memory_limit: float) -> Bools:
    """Return the moves each slot may make on its own, [N, S, 5].

    Args:
        window_ratio: window per worker, [N, S].
        memory_limit: a raise that would pass it with full windows is not allowed, 0..1.
    """
    after = view.value[..., None] + MOVES
    legal = (after >= view.low[..., None]) & (after <= view.high[..., None])
    unit = view.unit_memory + window_ratio * view.item_memory
    full = view.full_memory[:, None, None] + _RAISES * unit[..., None]
    legal &= (full <= memory_limit) | _IS_NO_RAISE
    legal &= (view.is_buffer_of_use[:, None] | ~view.is_buffer)[..., None] | _IS_NO_RAISE
    legal &= view.mask[..., None]
    legal[..., STAY] = True
    return np.asarray(legal)


def best_moves(q: Floats, legal: Bools, weight: Floats, free_cpus: Floats, quanta: int = QUANTA) -> Ints:
    """Return the move of each slot, as index into `MOVES`, that together maximise the sum of `q` under the budget.

    Exact over all 5^S combinations. Where nothing fits, as much as possible is given back.

    Args:
        q: value of each move, [N, S, 5].
        legal: moves that may be made, [N, S, 5].
        weight: CPUs per unit, [N, S].
        free_cpus: CPUs that may be added in all; negative where the budget is exceeded, [N].
        quanta: steps per CPU that weights are counted in.
    """
    cost = np.ceil(MOVES * weight[..., None] * quanta - 1e-6).astype(int)
    value = np.where(legal, q, NEVER)
    # Without a budget every slot takes its best move, of equal ones the cheapest.
    equal = np.where(value == value.max(2, keepdims=True), cost, _FAR)
    chosen: Ints = _STAY_FIRST[equal[..., _STAY_FIRST].argmin(2)]
    over = at(cost, chosen).sum(1) - np.floor((free_cpus + 1e-9) * quanta)
    rows = np.flatnonzero(over > 0.0)
    if len(rows):
        chosen[rows] = _given_back(value[rows], cost[rows], chosen[rows], over[rows].astype(int))
    return chosen


def _given_back(value: Floats, cost: Ints, best: Ints, over: Ints) -> Ints:
    """Return moves that cost at least `over` quanta less than `best`, at the least loss of value.

    Dynamic programming over what has to be given back: a move dearer than the best one of its slot is never needed.

    Args:
        value: [N, S, 5].
        cost: quanta, [N, S, 5].
        best: the moves of the largest value, [N, S].
        over: quanta, [N].
    """
    back, loss = at(cost, best)[..., None] - cost, at(value, best)[..., None] - value
    able = ((back > 0) & (loss < LOST)) | (np.arange(loss.shape[2]) == best[..., None])
    back, loss = np.where(able, back, 0), np.where(able, loss, np.inf)
    over = np.minimum(over, back.max(2).sum(1))
    rows, due = np.arange(len(over)), np.arange(int(over.max()) + 1)
    place, before = rows[:, None, None], np.maximum(due - back[..., None], 0)
    least = np.where(due == 0, 0.0, np.full((len(over), 1), np.inf))
    open_ = np.flatnonzero((back > 0).any((0, 2)))
    ways = []
    for i in open_:
        losses = least[place, before[:, i]] + loss[:, i, :, None]
        ways.append(losses.argmin(1))
        least = losses.min(1)
    chosen = best.copy()
    for i, way in zip(reversed(open_), reversed(ways), strict=True):
        chosen[:, i] = way[rows, over]
        over = np.maximum(over - back[rows, i, chosen[:, i]], 0)
    return chosen


def at(of_moves: NDArray[Number], move: Ints) -> NDArray[Number]:
    """Return what belongs to the move of each slot, [N, S].

    Args:
        of_moves: [N, S, 5].
        move: index, [N, S].
    """
    return of_moves[np.arange(len(move))[:, None], np.arange(move.shape[1]), move]
