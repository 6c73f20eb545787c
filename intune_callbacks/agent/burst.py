"""A decision in the midst of a burst for one live pipeline, in plain numbers: on a few stages arrays are slower.

The shell does the same for N pipelines; a test compares both, decision by decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np

from intune_callbacks.agent.curves_one import CurvesOfOne
from intune_callbacks.agent.features import features_of_one
from intune_callbacks.agent.moves import STAY, STEPS
from intune_callbacks.agent.moves_one import allowed_of_one, best_moves_of_one
from intune_callbacks.agent.phases import Moved, ShellConfig, Values
from intune_callbacks.agent.target import window_ratio
from intune_callbacks.agent.track import Track
from intune_callbacks.agent.view import Floats, View, needed_of_one

__all__ = ["Step", "gain_of_one", "step_of_one", "windows_of_one"]


@dataclass(slots=True)
class Step:
    """A decision of the network for one pipeline.

    Args:
        value: where it goes next, by slot.
        is_followed: this is what the network says; False where the best known is gone back to instead.
        moved: the decision as the learner needs it, made when it is called.
    """

    value: list[float]
    is_followed: bool
    moved: Callable[[], Moved]


def step_of_one(view: View, track: Track, aimed: list[float], values: Values, config: ShellConfig, quanta: int) -> Step:
    """Return where the network goes next.

    Args:
        view, track: of one pipeline.
        aimed: the allocation fitted to what was measured, by slot.
        values: the network.
        config: of the shell.
        quanta: see `best_moves`.
    """
    one, known = view.one, track.one
    ratio = [wide / n if n > 1.0 else wide if n > 0.0 else 0.0 for wide, n in zip(one.window, one.value, strict=True)]
    slots, pipeline = features_of_one(view, track, aimed, ratio)
    q = values(slots, pipeline, view.mask[0]).tolist()
    fine = allowed_of_one(one, ratio, config.memory_limit)
    worth = config.gate * max(sum(one.mask), 1) if one.room >= 0.0 else -math.inf
    moves = best_moves_of_one(q, fine, one.worker_weight, one.room, quanta, worth)
    if sum([of_moves[move] - of_moves[STAY] for of_moves, move in zip(q, moves, strict=True)]) < worth:
        moves = [STAY] * len(moves)
    # What is clearly worse than the best known is left, not walked out of.
    is_followed = known.low < 3
    value = [now + STEPS[move] for now, move in zip(one.value, moves, strict=True)] if is_followed else known.best[0]
    return Step(value, is_followed, partial(_moved, view, slots, pipeline, moves, fine, is_followed))


def _moved(
    view: View, slots: Floats, pipeline: Floats, moves: list[int], fine: list[list[bool]], is_followed: bool
) -> Moved:
    made = (np.array([moves]), np.array([fine]), view.weight, view.room, np.array([is_followed]))
    return Moved(slots[None], pipeline[None], view.mask, *made)


def gain_of_one(one: SimpleNamespace, curves: CurvesOfOne, wanted: Sequence[float]) -> float:
    """Return what `expected_gain` does for one pipeline.

    Args:
        one: `View.one`.
        curves: its fitted stages.
        wanted: workers, by slot.
    """
    has = [i for i, is_worker in enumerate(one.workers) if is_worker]

    def slowest_s(value: Sequence[float]) -> float:
        each = [curves.service_s(i, value[i]) / max(value[i], 1.0) for i in has]
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
