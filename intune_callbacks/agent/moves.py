"""The paper's five moves per stage, and the best combination of them under the CPU budget."""

from __future__ import annotations

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from intune_callbacks.agent.view import Bools, Floats, Ints, View

__all__ = ["MOVES", "STAY", "STEPS", "allowed", "allowed_of_one", "at", "best_moves", "best_moves_of_one"]

STEPS = (-5.0, -1.0, 0.0, 1.0, 5.0)
"""Units per decision and stage (InTune, section 4.2)."""
MOVES = np.array(STEPS)
STAY = 2
QUANTA = 4
"""CPU weights are counted in quarters of a CPU, raises rounded up and cuts down: never over the budget."""
PRICES, FIRST_PRICE = 8, 3.0
"""Most prices tried, and the first one, in average losses of a quantum."""
_NEVER, _LOST, _FAR = -1e9, 0.5e9, 10**9
_ONLY_STAY = [False, False, True, False, False]
_STAY_FIRST = np.array([2, 0, 1, 3, 4])
_RAISES, _IS_NO_RAISE = np.maximum(MOVES, 0.0), MOVES <= 0.0
Number = TypeVar("Number", np.float64, np.int64)


def allowed(view: View, window_ratio: Floats, memory_limit: float) -> Bools:
    """Return the moves each slot may make on its own, [N, S, 5].

    Args:
        view: N pipelines.
        window_ratio: window per worker, [N, S].
        memory_limit: a raise that would pass it with full windows is not allowed, 0..1.
    """
    after = view.value[..., None] + MOVES
    fine = (after >= view.low[..., None]) & (after <= view.high[..., None])
    unit = view.unit_memory + window_ratio * view.item_memory
    full = view.full_memory[:, None, None] + _RAISES * unit[..., None]
    fine &= (full <= memory_limit) | _IS_NO_RAISE
    fine &= view.mask[..., None]
    fine[..., STAY] = True
    return np.asarray(fine)


def best_moves(q: Floats, fine: Bools, weight: Floats, room: Floats, quanta: int = QUANTA) -> Ints:
    """Return the move of each slot, as index into `MOVES`, that together maximise the sum of `q` under the budget.

    Exact over all 5^S combinations. Where nothing fits, as much as possible is given back.

    Args:
        q: value of each move, [N, S, 5].
        fine: moves that may be made, [N, S, 5].
        weight: CPUs per unit, [N, S].
        room: CPUs that may be added in all; negative where the budget is exceeded, [N].
        quanta: steps per CPU that weights are counted in.
    """
    if len(q) == 1:
        given = (q[0].tolist(), fine[0].tolist(), weight[0].tolist(), float(room[0]))
        return np.array([best_moves_of_one(*given, quanta)])
    cost = np.ceil(MOVES * weight[..., None] * quanta - 1e-6).astype(int)
    value = np.where(fine, q, _NEVER)
    # Without a budget every slot takes its best move, of equal ones the cheapest.
    equal = np.where(value == value.max(2, keepdims=True), cost, _FAR)
    chosen: Ints = _STAY_FIRST[equal[..., _STAY_FIRST].argmin(2)]
    over = at(cost, chosen).sum(1) - np.floor((room + 1e-9) * quanta)
    rows = np.flatnonzero(over > 0.0)
    if len(rows):
        chosen[rows] = _given_back(value[rows], cost[rows], chosen[rows], over[rows].astype(int))
    return chosen


def allowed_of_one(one: SimpleNamespace, window_ratio: list[float], memory_limit: float) -> list[list[bool]]:
    """Return what `allowed` does for one pipeline, in plain numbers: on a few stages arrays are slower.

    Args:
        one: `View.one`; the others as for `allowed`, by slot.
    """
    fine = []
    for i, now in enumerate(one.value):
        low, high, unit = one.low[i], one.high[i], one.unit_memory[i] + window_ratio[i] * one.item_memory[i]
        fine.append(
            [
                change == 0.0
                or (low <= now + change <= high and (change < 0.0 or one.full_memory + change * unit <= memory_limit))
                for change in STEPS
            ]
            if one.mask[i]
            else _ONLY_STAY
        )
    return fine


def best_moves_of_one(
    q: list[list[float]],
    fine: list[list[bool]],
    weight: list[float],
    room: float,
    quanta: int = QUANTA,
    worth: float = -math.inf,
) -> list[int]:
    """Return what `best_moves` does for one pipeline, in plain numbers; arguments as there, without [N].

    Args:
        worth: where it is certain that no moves within the budget gain more than this nobody moves.
    """
    value, cost, best, over = [], [], [], -math.floor((room + 1e-9) * quanta)
    for of_moves, are_fine, each in zip(q, fine, weight, strict=True):
        values = [v if is_fine else _NEVER for v, is_fine in zip(of_moves, are_fine, strict=True)]
        most, costs = max(values), _costs(each, quanta)
        move = values.index(most)
        if values.count(most) > 1:
            move = min([move for move in _STAY_FIRST.tolist() if values[move] == most], key=costs.__getitem__)
        over += costs[move]
        value.append(values)
        cost.append(costs)
        best.append(move)
    if over <= 0:
        return best
    ways = _ways_back(value, cost, best)
    gain = sum([values[move] - of_moves[STAY] for values, of_moves, move in zip(value, q, best, strict=True)])
    if worth > -math.inf and _loses(*ways, over, gain - worth):
        return [STAY] * len(best)
    return _given_back_of_one(*ways, best, over)


@lru_cache
def _costs(weight: float, quanta: int) -> list[int]:
    return [math.ceil(change * weight * quanta - 1e-6) for change in STEPS]


def _ways_back(
    value: list[list[float]], cost: list[list[int]], best: list[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the quanta each move of each slot gives back, [S][5], and what it loses, infinity if it is no way."""
    backs, losses = [], []
    for values, costs, top in zip(value, cost, best, strict=True):
        back, loss, most, dearest = [0] * len(costs), [math.inf] * len(costs), values[top], costs[top]
        for move, c in enumerate(costs):
            if c < dearest and most - values[move] < _LOST:
                back[move], loss[move] = dearest - c, most - values[move]
        loss[top] = 0.0
        backs.append(back)
        losses.append(loss)
    return backs, losses


def _loses(backs: list[list[int]], losses: list[list[float]], due: int, most: float) -> bool:
    """Return True if it is certain that giving back `due` quanta loses more than `most`.

    At a price for each quantum every slot takes what is cheapest for it: no choice for all loses less than what these
    lose, and the price of what is then still due (Lagrangian bound: M. L. Fisher, Management Science 27(1), 1981). The
    best price is looked for where the tangents of that bound, which is concave, cross (J. E. Kelley, 1960).
    """
    if most < 0.0:
        return True
    ways = [[way for way in zip(back, loss, strict=True) if way[0]] for back, loss in zip(backs, losses, strict=True)]
    # Of a tangent: the loss at price 0, and quanta still due.
    low, high, price = (0.0, due), None, FIRST_PRICE * most / due
    for _ in range(PRICES):
        all_lost, left = 0.0, due
        for way in ways:
            least, lost, given = 0.0, 0.0, 0
            for back, loss in way:
                if (net := loss - price * back) < least:
                    least, lost, given = net, loss, back
            all_lost += lost
            left -= given
        if all_lost + price * left > most + 1e-9:
            return True
        low, high = ((all_lost, left), high) if left > 0 else (low, (all_lost, left))
        price = 2.0 * price if high is None else (high[0] - low[0]) / (low[1] - high[1])
        if left == 0 or (high is not None and low[0] + price * low[1] <= most):
            return False
    return False


def _given_back_of_one(backs: list[list[int]], losses: list[list[float]], best: list[int], over: int) -> list[int]:
    """Return what `_given_back` does for one pipeline, with few calls for each stage.

    Args:
        backs, losses: of `_ways_back`.
        best: the moves of the largest value.
        over: quanta.
    """
    largest = [max(back) for back in backs]
    open_, pad, due = [i for i, back in enumerate(largest) if back > 0], max(largest), min(over, sum(largest))
    # In front of the least losses for 0, 1, ... quanta stand zeros: more than is due may be given back.
    least = np.zeros((max(len(open_), 1), pad + due + 1))
    least[0, pad + 1 :] = np.inf
    place = np.arange(pad, pad + due + 1) - np.array(backs)[..., None]
    lost = np.array(losses)[..., None]
    for step, i in enumerate(open_[:-1]):
        together = least[step].take(place[i])
        together += lost[i]
        np.minimum.reduce(together, out=least[step + 1, pad:])
    chosen = best.copy()
    for step, i in reversed(list(enumerate(open_))):
        before = least[step].take(place[i, :, due]).tolist()
        ways = [left + loss for left, loss in zip(before, losses[i], strict=True)]
        chosen[i] = ways.index(min(ways))
        due = max(due - backs[i][chosen[i]], 0)
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
    able = ((back > 0) & (loss < _LOST)) | (np.arange(loss.shape[2]) == best[..., None])
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
