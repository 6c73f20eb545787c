"""The best moves of a single pipeline, in plain numbers: on a few stages arrays are slower. A test compares both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace

__all__ = ["LOST", "NEVER", "QUANTA", "STAY", "STAY_FIRST", "STEPS", "allowed_of_one", "best_moves_of_one"]

STEPS = (-5.0, -1.0, 0.0, 1.0, 5.0)
"""Units per decision and stage (InTune, section 4.2)."""
STAY = 2
STAY_FIRST = (2, 0, 1, 3, 4)
QUANTA = 4
"""CPU weights are counted in quarters of a CPU, raises rounded up and cuts down: never over the budget."""
PRICES, FIRST_PRICE = 8, 3.0
"""Most prices tried, and the first one, in average losses of a quantum."""
NEVER, LOST = -1e9, 0.5e9
"""Value of a move that may not be made, and the loss from which on a move is one of them."""
ROUNDING = 1e-9
_ALL, _ONLY_STAY = [True] * len(STEPS), [change == 0.0 for change in STEPS]
Way = tuple[int, int, float]
"""A move of a slot instead of its best one: index, quanta it gives back, value it loses."""


def allowed_of_one(one: SimpleNamespace, window_ratio: list[float], memory_limit: float) -> list[list[bool]]:
    """Return what `allowed` does for one pipeline.

    Args:
        one: `View.one`; the others as for `allowed`, by slot.
    """
    fine, least, most = [], STEPS[0], STEPS[-1]
    for i, now in enumerate(one.value):
        low, high, unit = one.low[i], one.high[i], one.unit_memory[i] + window_ratio[i] * one.item_memory[i]
        if not one.mask[i]:
            fine.append(_ONLY_STAY)
        elif low <= now + least and now + most <= high and one.full_memory + most * unit <= memory_limit:
            fine.append(_ALL)
        else:
            fine.append(
                [
                    change == 0.0
                    or (
                        low <= now + change <= high
                        and (change < 0.0 or one.full_memory + change * unit <= memory_limit)
                    )
                    for change in STEPS
                ]
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
    """Return what `best_moves` does for one pipeline; arguments as there, without [N].

    Args:
        worth: where it is certain that no moves within the budget gain more than this nobody moves.
    """
    value, best, due, gain = [], [], -math.floor((room + 1e-9) * quanta), 0.0
    for of_moves, are_fine, each in zip(q, fine, weight, strict=True):
        values = of_moves
        if are_fine is not _ALL:
            values = [v if is_fine else NEVER for v, is_fine in zip(of_moves, are_fine, strict=True)]
        most, costs = max(values), _costs(each, quanta)
        move = values.index(most)
        if values.count(most) > 1:
            move = min([move for move in STAY_FIRST if values[move] == most], key=costs.__getitem__)
        due += costs[move]
        gain += most - of_moves[STAY]
        value.append(values)
        best.append(move)
    if due <= 0:
        return best
    ways, able = [], 0
    for values, each, move in zip(value, weight, best, strict=True):
        of_slot: list[Way] = []
        if each > 0.0 and move > 0:
            most, costs = values[move], _costs(each, quanta)
            # Costs grow with the units.
            of_slot = [
                (i, costs[move] - costs[i], most - values[i])
                for i in range(move)
                if costs[i] < costs[move] and most - values[i] < LOST
            ]
            able += max([back for _, back, _ in of_slot], default=0)
        ways.append([*of_slot, (move, 0, 0.0)])
    return _given_back(ways, best, min(due, able), gain - worth) if able else best


@lru_cache
def _costs(weight: float, quanta: int) -> list[int]:
    return [math.ceil(change * weight * quanta - 1e-6) for change in STEPS]


def _given_back(ways: list[list[Way]], best: list[int], due: int, most: float) -> list[int]:
    """Return the moves that give back `due` quanta at the least loss; all stay if that is certain to be above `most`.

    Exact, as `best_moves`: dynamic programming, over the ways that the bounds of `_priced` leave.

    Args:
        ways: of each slot, its best move among them.
        best: moves of the largest value, by slot.
        due: quanta, no more than all together can give.
        most: loss.
    """
    open_ = [i for i, way in enumerate(ways) if len(way) > 1]
    price, least, enough = _priced([ways[i] for i in open_], due, most)
    if least > most + ROUNDING:
        return [STAY] * len(best)
    # Whoever takes another way at this price loses more than is needed.
    slack = min(enough, most) - least + ROUNDING * (1.0 + abs(enough if enough < math.inf else least))
    chosen, branches, lost = best.copy(), [], 0.0
    for i in open_:
        net = [loss - price * back for _, back, loss in ways[i]]
        worst = min(net) + slack
        left = [way for way, cost in zip(ways[i], net, strict=True) if cost <= worst]
        if len(left) == 1:
            chosen[i], back, loss = left[0]
            due, lost = due - back, lost + loss
        else:
            branches.append((i, left))
    more, moves = _least([of_slot for _, of_slot in branches], due)
    if not lost + more <= most + ROUNDING:
        return [STAY] * len(best)
    for (i, _), move in zip(branches, moves, strict=True):
        chosen[i] = move
    return chosen


def _least(ways: list[list[Way]], due: int) -> tuple[float, list[int]]:
    """Return the least loss that gives back `due` quanta, and the moves; infinity, and none, where it cannot be."""
    known: dict[tuple[int, int], float] = {}

    def lost(slots: int, due: int) -> float:
        if due <= 0 or slots == 0:
            return math.inf if due > 0 else 0.0
        if (slots, due) not in known:
            known[slots, due] = min([lost(slots - 1, due - back) + loss for _, back, loss in ways[slots - 1]])
        return known[slots, due]

    whole, moves = lost(len(ways), due), []
    for slots in range(len(ways), 0, -1):
        losses = [lost(slots - 1, due - back) + loss for _, back, loss in ways[slots - 1]]
        move, back, _ = ways[slots - 1][losses.index(min(losses))]
        moves.append(move)
        due -= back
    return whole, moves[::-1]


def _priced(ways: Sequence[list[Way]], due: int, most: float) -> tuple[float, float, float]:
    """Return a price of a quantum, the least loss it proves, and a loss that is known to be enough.

    At a price for each quantum every slot takes what is cheapest for it: no choice for all loses less than what these
    lose, and the price of what is then still due (Lagrangian bound: M. L. Fisher, Management Science 27(1), 1981). The
    best price is looked for where the tangents of that bound, which is concave, cross (J. E. Kelley, 1960). It ends
    early where the loss is certain to be above `most`.
    """
    if most < 0.0:
        return 0.0, math.inf, math.inf
    proved, at_price, enough = 0.0, 0.0, math.inf
    # Of a tangent: the loss at price 0, and quanta still due.
    low, high = (0.0, due), None
    price = FIRST_PRICE * (most if most < math.inf else sum([max([loss for _, _, loss in way]) for way in ways])) / due
    for _ in range(PRICES):
        all_lost, left = 0.0, due
        for way in ways:
            cheapest, lost, given = 0.0, 0.0, 0
            for _, back, loss in way:
                if (net := loss - price * back) < cheapest:
                    cheapest, lost, given = net, loss, back
            all_lost += lost
            left -= given
        if all_lost + price * left > proved:
            proved, at_price = all_lost + price * left, price
        if left <= 0:
            enough = min(enough, all_lost)
        if left == 0 or proved > most + ROUNDING:
            break
        low, high = ((all_lost, left), high) if left > 0 else (low, (all_lost, left))
        crossing = 2.0 * price if high is None else (high[0] - low[0]) / (low[1] - high[1])
        if high is not None and low[0] + crossing * low[1] <= proved + ROUNDING:
            break
        price = crossing
    return at_price, proved, enough
