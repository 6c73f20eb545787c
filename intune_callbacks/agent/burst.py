"""A decision in the midst of a burst for one live pipeline, in plain numbers: on a few stages arrays are slower.

The shell does the same for N pipelines; a test compares both, decision by decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from intune_callbacks.agent.curves import Curves
from intune_callbacks.agent.features import features_of_one
from intune_callbacks.agent.moves import STAY, STEPS, allowed_of_one, best_moves_of_one
from intune_callbacks.agent.phases import Moved, ShellConfig, Values
from intune_callbacks.agent.target import window_ratio
from intune_callbacks.agent.track import Track
from intune_callbacks.agent.view import View, needed_of_one

__all__ = ["gain_of_one", "moves_of_one", "windows_of_one"]


def moves_of_one(
    view: View, track: Track, aimed: list[float], values: Values, config: ShellConfig, quanta: int
) -> tuple[list[float], Moved]:
    """Return where the network goes next, by slot, and the decision as the learner needs it.

    Args:
        view, track: of one pipeline.
        aimed: the allocation fitted to what was measured, by slot.
        values: the network.
        config: of the shell.
        quanta: see `best_moves`.
    """
    one = view.one
    ratio = [wide / max(n, 1.0) if n > 0.0 else 0.0 for wide, n in zip(one.window, one.value, strict=True)]
    slots, pipeline = features_of_one(view, track, aimed, ratio)
    q = values(slots, pipeline, view.mask[0]).tolist()
    fine = allowed_of_one(one, ratio, config.memory_limit)
    worth = config.gate * max(sum(one.mask), 1) if one.room >= 0.0 else -math.inf
    moves = best_moves_of_one(q, fine, one.worker_weight, one.room, quanta, worth)
    if sum([of_moves[move] - of_moves[STAY] for of_moves, move in zip(q, moves, strict=True)]) < worth:
        moves = [STAY] * len(moves)
    back = bool(track.low[0] >= 3)
    made = (np.array([moves]), np.array([fine]), view.weight, np.array([one.room]), np.array([not back]))
    moved = Moved(slots[None], pipeline[None], view.mask, *made)
    # What is clearly worse than the best known is left, not walked out of.
    best: list[float] = track.best[0][0].tolist()
    return best if back else [now + STEPS[move] for now, move in zip(one.value, moves, strict=True)], moved


def gain_of_one(one: SimpleNamespace, curves: Curves, wanted: Sequence[float]) -> float:
    """Return what `expected_gain` does for one pipeline.

    Args:
        one: `View.one`.
        curves: its fitted stages.
        wanted: workers, by slot.
    """
    has = [i for i, is_worker in enumerate(one.workers) if is_worker]

    def slowest_s(value: Sequence[float]) -> float:
        each = [curves.service_s_of_one(i, value[i]) / max(value[i], 1.0) for i in has]
        return float(max([*each, 1.0 / max(one.demand, 1e-12), 1e-12]))

    return math.log(slowest_s(one.value) / slowest_s(wanted))


def windows_of_one(
    one: SimpleNamespace, cv: Sequence[float], value: list[float], bound: bool, limit: float
) -> list[float] | None:
    """Return the windows that go with workers, by slot; None where these exceed the budget or the memory.

    Args:
        one: `View.one`.
        cv: coefficient of variation of the service times, by slot.
        value: units wanted, by slot.
        bound: the training loop waits for data.
        limit: share of the memory planned with.
    """
    moved, window = value != one.value, []
    enough = 1.0 if moved else 1.2
    for n, now, has, irregularity in zip(value, one.window, one.workers, cv, strict=True):
        wide = float(math.ceil(n * window_ratio(n, irregularity))) if has and now > 0.0 else 0.0
        wider = wide > enough * now and (moved or bound)
        window.append(wide if wider or (moved and wide < 0.5 * now) else now)
    if sum([n * weight for n, weight in zip(value, one.worker_weight, strict=True)]) > one.budget + 1e-6:
        return None
    planned = moved or window != one.window or one.full_memory > limit + 0.03
    return None if planned and needed_of_one(one, value, window) > limit else window
