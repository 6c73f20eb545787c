"""What each stage of a single pipeline costs at other numbers of workers, in plain numbers: `Curves` does it for N.

On a few stages arrays are slower: each call costs more than what it does. A test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from intune_callbacks.agent.view import Floats, Number

__all__ = ["FLOOR", "LEAST", "LEVEL", "CurvesOfOne", "lesson", "smaller_root"]

KEEP = 0.9
"""Weight old readings keep at a new one, but only in the direction the new one tells something about."""
LEVEL = 0.3
"""Weight of a new reading in the running means."""
FLOOR = 0.15
"""No stage is taken to be faster at another number of workers than this share of its present service time."""
LEAST = 0.02
"""Smallest part of the service time that is left for a single worker."""
_EYE, _EXACT = 1e-9, 1e-15
_FITTED, _PHYSICAL = 9, 12
"""Where the numbers of a slot end that are fitted, and where those begin that are physical."""


def smaller_root(rate: float, alone: float, linear: float, square: float) -> float:
    """Return what `Curves.workers_for` does for one slot, infinity if no number of workers is enough.

    Args:
        rate: batches per second.
        alone: constant less linear coefficient of the slot, not below 0, seconds.
        linear, square: its other coefficients, seconds.
    """
    lam_d = rate * square
    middle, free = 1.0 - rate * linear + lam_d, rate * alone
    inside = middle * middle - 4.0 * lam_d * free
    return 2.0 * free / (middle + math.sqrt(inside)) if inside >= 0.0 and middle > 0.0 else math.inf


class CurvesOfOne:
    """What is fitted of one pipeline; names and meanings are those of `Curves`, by slot.

    Args:
        slots: of each slot the three coefficients and the six numbers of their precision as fitted, the running means
            of service time, CPU share and irregularity, and the coefficients that are physical.
        reference_s: service time the fit is relative to.
        seen: the slot was measured.
        scale: workers the fit is relative to.
    """

    def __init__(
        self, slots: list[tuple[float, ...]], reference_s: list[float], seen: list[bool], scale: float
    ) -> None:
        self.reference_s, self.seen, self.scale = reference_s, seen, scale
        self._keep(slots)

    def _keep(self, slots: list[tuple[float, ...]]) -> None:
        self.slots = slots
        columns = list(zip(*slots, strict=True))[_FITTED:]
        self.work_s, self.cpu_share, self.cv, self.constant, self.linear, self.square = columns

    def learn(self, now: SimpleNamespace, fine: list[bool]) -> None:
        """Take one window into the fit.

        Args:
            now: `View.one`.
            fine: slots whose measurement counts.
        """
        slots, c = [], self.scale
        measured = (now.value, now.work_s, now.cpu_share, now.cv)
        for known, is_fine, reference_s, units, work_now_s, share_now, cv_now in zip(
            self.slots, fine, self.reference_s, *measured, strict=True
        ):
            level, first, second, *precision, work_s, share, cv = known[:_PHYSICAL]
            n = units if units > 1.0 else 1.0
            one = (n - 1.0) / c
            two = n * one / c
            if is_fine:
                work_s += LEVEL * (work_now_s - work_s)
                share += LEVEL * (share_now - share)
                cv += 0.5 * LEVEL * (cv_now - cv)
                precision, step = lesson(work_now_s / reference_s, one, two, known[:3], precision, max)
                level, first, second = level + step[0], first + step[1], second + step[2]
            # Coefficients that are physical, as in `Curves`.
            expected, least = level + one * first + two * second, FLOOR * work_s / reference_s
            at_now = expected if expected > least else least
            linear, square = first if first > 0.0 else 0.0, second if second > 0.0 else 0.0
            grown = linear * one + square * two
            part = (1.0 - LEAST) * at_now / (grown if grown > 1e-12 else 1e-12)
            part = part if part < 1.0 else 1.0
            unit_s = part * reference_s / c
            physical = ((at_now - part * grown) * reference_s, unit_s * linear, unit_s * square / c)
            slots.append((level, first, second, *precision, work_s, share, cv, *physical))
        self._keep(slots)

    def service_s(self, slot: int, value: float) -> float:
        """Return the expected worker seconds per batch of one slot with `value` workers."""
        n = value if value > 1.0 else 1.0
        return float(self.constant[slot] + (n - 1.0) * (self.linear[slot] + n * self.square[slot]))


def lesson(
    now: Number,
    one: Number,
    two: Number,
    theta: Sequence[Number] | Floats,
    precision: Sequence[Number] | Floats,
    larger: Callable[[Number, Any], Number],
) -> tuple[list[Number], list[Number]]:
    """Return the precision after a reading, and the step of the coefficients it asks for.

    The same for numbers and for arrays.

    Args:
        now: service time measured.
        one, two: basis beside the constant.
        theta: the three coefficients.
        precision: upper triangle of the symmetric matrix, row by row.
        larger: maximum of two.
    """
    a, b, d = theta
    expected = a + one * b + two * d
    # Relative to the larger of both, so that no single reading counts for more than itself.
    size = larger(larger(expected, now), 1e-9)
    x, y, z = 1.0 / size, one / size, two / size
    error = (now - expected) / size
    xx, xy, xz, yy, yz, zz = precision
    told_x, told_y, told_z = xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z
    along = larger(x * told_x + y * told_y + z * told_z, 1e-9)
    forgotten = (along > 1.0) * (1.0 - KEEP) / along
    less_x, less_y, less_z = forgotten * told_x, forgotten * told_y, forgotten * told_z
    xx, xy, xz = xx + x * x - less_x * told_x, xy + x * y - less_x * told_y, xz + x * z - less_x * told_z
    yy, yz, zz = yy + y * y - less_y * told_y, yz + y * z - less_y * told_z, zz + z * z - less_z * told_z
    after = [xx, xy, xz, yy, yz, zz]
    # Elimination without pivots: the matrix is positive definite, but for what rounding leaves of it.
    xx = xx + _EYE
    y_of_x, z_of_x = xy / xx, xz / xx
    pivot_y = larger(yy + _EYE - y_of_x * xy, _EXACT * yy)
    rest = yz - y_of_x * xz
    z_of_y = rest / pivot_y
    pivot_z = larger(zz + _EYE - z_of_x * xz - z_of_y * rest, _EXACT * zz)
    y = y - y_of_x * x
    z = (z - z_of_x * x - z_of_y * y) / pivot_z
    y = y / pivot_y - z_of_y * z
    return after, [error * (x / xx - y_of_x * y - z_of_x * z), error * y, error * z]
