"""The phases of the shell, how long each lasts, and what a decision was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from intune_callbacks.decide.view import Bools, Floats, Ints

__all__ = ["BURST", "CONFIRM", "HOLD", "JUMP", "Moved", "ShellConfig", "Values"]

JUMP, BURST, CONFIRM, HOLD = range(4)
Values = Callable[[NDArray[Any], NDArray[Any], Bools], NDArray[Any]]
"""Slot states [N, S, F], pipeline states [N, G], slots that exist [N, S] -> value of every move [N, S, 5]."""


@dataclass(frozen=True, slots=True)
class ShellConfig:
    """How long each phase lasts, in decisions.

    Args:
        jumps: ages at which the allocation of the curves is taken over.
        burst: most decisions of moves in a row.
        again: the same for a burst that starts while holding.
        patience: decisions in a row without a worthwhile move that end a burst.
        review: moves of a burst after which a jump is considered again.
        measured: decisions an allocation is measured before it is held.
        look: decisions of holding before the first look for something better.
        longest: most decisions between two looks; the time doubles while nothing is found.
        gate: gain in value below which a combination of moves is not worth making.
        worth: expected gain in log throughput that is worth a change while holding.
        memory_limit: share of the memory planned with.
        buffer: batches asked for when jumping.
        usable: share of a stage's largest rate that is aimed at.
    """

    jumps: tuple[int, ...] = (1, 3, 5)
    burst: int = 30
    again: int = 8
    patience: int = 3
    review: int = 6
    measured: int = 3
    look: int = 20
    longest: int = 240
    worth: float = 0.08
    gate: float = 0.05
    memory_limit: float = 0.90
    buffer: int = 16
    usable: float = 0.95


@dataclass(frozen=True, slots=True)
class Moved:
    """One decision as the learner needs it; arrays as in `features`, `allowed` and `best_moves`.

    Args:
        slots, pipeline: the state.
        mask: slots that exist, [N, S].
        moves: index of each slot's move, [N, S].
        fine: moves that may be made, [N, S, 5].
        weight: CPUs per unit, [N, S].
        room: CPUs that may be added, [N].
        followed: pipelines that did what `moves` says, [N].
    """

    slots: Floats
    pipeline: Floats
    mask: Bools
    moves: Ints
    fine: Bools
    weight: Floats
    room: Floats
    followed: Bools
