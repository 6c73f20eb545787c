"""What each stage costs at other numbers of workers, learned while the pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intune_callbacks.decide.view import Bools, Floats, View

__all__ = ["COEFFICIENTS", "SAVED", "TERMS", "Curves"]

COEFFICIENTS, TERMS = 3, 6
"""Of a slot: numbers that are fitted, and numbers of the upper triangle of their precision."""
SERIAL_SHARE = 0.6
"""Share of a stage's waiting time that is taken to be serial before other numbers of workers were seen: .9 gained
nothing; 1.0 did harm on hostile machines and to stages that wait for storage (docs/adr/0014-no-experiment-first.md)."""
KEEP = 0.9
"""Weight old readings keep at a new one, in the direction the new one says something about. A choice: some ten windows
count, so that work that drifts is followed and the noise of a window is not."""
LEVEL = 0.3
"""Weight of a new reading in the running means. A choice: some three windows count."""
FLOOR = 0.15
"""No stage is taken to be faster at another number of workers than this share of its present service time. A choice: an
extrapolation to less is more likely wrong than right."""
LEAST = 0.02
"""Smallest part of the service time that is left for a single worker: it only keeps the curve positive."""
DOUBT = 0.5
"""Standard errors by which a coefficient of growth is taken to be smaller than fitted: growth that is only noise would
forbid every larger number of workers, and what is real shows there. What it brought: docs/agent.md, "Results"."""
CHANGED, CHANGED_WINDOWS = 0.5, 2
"""A stage that takes so much more or less time, in log units, in so many windows in a row, its workers unchanged, does
other work. Without this, work that became many times as heavy would hardly count: readings weigh by 1 / time^2."""
_EYE, _EXACT, _TINY = 1e-9, 1e-15, 1e-30
"""Added to the diagonal of a precision; least pivot, of its diagonal, that is more than rounding; no divisor is 0."""
_PRIOR = (0.02, 0.0, 0.0, 0.1, 0.0, 0.1)
"""Upper triangle of the first precision, row by row. A choice: weak beside a reading, which weighs about 1, and
stronger for growth than for the constant."""
SAVED = ("work_s", "cpu_share", "cv", "seen", "reference_s", "theta", "precision")
"""Arrays that another run goes on with."""


class Curves:
    """Fits ``service_s(n) = a + b (n - 1) + d n (n - 1)`` to every slot by recursive least squares.

    That is the Universal Scalability Law (N. Gunther, 2007): b is what only one worker can do at a time, d what workers
    cost each other. Information is forgotten only along the direction of a new reading (R. Kulhavy, 1987), so a long
    stay at one allocation does not erase what was seen at others.
    """

    def __init__(self, view: View) -> None:
        shape = view.mask.shape
        self.work_s, self.cpu_share, self.cv = view.work_s, view.cpu_share, view.cv
        """Running means, [N, S]."""
        self.scale = np.maximum(view.cpus, 1e-3)
        self.reference_s = np.ones(shape)
        # Coefficient by coefficient: 3 by 3 systems written out need a tenth of the time of general ones.
        self.theta = np.zeros((COEFFICIENTS, *shape))
        self.precision = _prior(shape)
        self._doubt = np.zeros((2, *shape))
        self.seen = np.zeros(shape, bool)
        # Mean reading at the present number of workers, and windows in a row that were far from it.
        self._units, self._level_s, self._odd = np.zeros(shape), np.ones(shape), np.zeros(shape, int)
        self.is_other: Bools = np.zeros(len(view.cpus), bool)
        """Where some stage has begun to do other work, [N]."""
        self.constant, self.linear, self.square = np.ones(shape), np.zeros(shape), np.zeros(shape)
        """Coefficients of 1, n - 1 and n (n - 1), seconds, [N, S]; never negative."""
        self.learn(view)

    def state_dict(self) -> dict[str, Any]:
        """Return what is fitted of the only pipeline, in plain numbers."""
        return {name: getattr(self, name)[..., 0, :].tolist() for name in SAVED} | {"scale": float(self.scale[0])}

    def go_on(self, saved: Mapping[str, Floats], view: View) -> None:
        """Take back what `state_dict` gave, as arrays, and learn from the first window since."""
        for name in SAVED:
            setattr(self, name, saved[name][..., None, :])
        self.seen, self.scale = saved["seen"][None] > 0.0, saved["scale"][None]
        self.learn(view)

    def restart(self, rows: Bools) -> None:
        """Begin anew where `rows`: what is known of other allocations no longer counts."""
        self.seen &= ~rows[:, None]

    def _begin(self, view: View, ok: Bools) -> None:
        """First coefficients: part of the time that is no CPU time is taken to be serial."""
        new = ok & ~self.seen
        if not new.any():
            return
        self.seen |= ok
        self.work_s = np.where(new, view.work_s, self.work_s)
        self.cpu_share = np.where(new, view.cpu_share, self.cpu_share)
        self.cv = np.where(new, view.cv, self.cv)
        self.reference_s = np.where(new, np.maximum(view.work_s, 1e-12), self.reference_s)
        part = (np.maximum(view.value, 1.0) - 1.0) / self.scale[:, None]
        waits = SERIAL_SHARE * np.maximum(1.0 - view.cpu_share / np.maximum(view.weight, 1e-3), 0.0)
        serial = np.where(part > 0.0, waits / np.maximum(part, 1e-9), 0.0)
        self.theta = np.where(new, np.stack([1.0 - serial * part, serial, np.zeros_like(serial)]), self.theta)
        self.precision = np.where(new, _prior(new.shape), self.precision)

    def learn(self, view: View) -> None:
        """Take one window into the fit."""
        ok = view.workers & (view.work_s > 0.0) & view.alive[:, None]
        self._forget_other_work(view, ok)
        self._begin(view, ok)
        gain = LEVEL * ok
        self.work_s = self.work_s + gain * (view.work_s - self.work_s)
        self.cpu_share = self.cpu_share + gain * (view.cpu_share - self.cpu_share)
        self.cv = self.cv + 0.5 * gain * (view.cv - self.cv)
        n, c = np.maximum(view.value, 1.0), self.scale[:, None]
        one = (n - 1.0) / c
        two = n * one / c
        precision, step, variance = _updated(view.work_s / self.reference_s, one, two, self.theta, self.precision)
        self.precision = np.where(ok, precision, self.precision)
        self.theta = np.where(ok, self.theta + step, self.theta)
        self._doubt = np.where(ok, DOUBT * view.work_noise * np.sqrt(variance), self._doubt)
        self._tidy(one, two)

    def _forget_other_work(self, view: View, ok: Bools) -> None:
        now = np.where(ok, view.work_s, 1.0)
        same = ok & (view.value == self._units)
        is_odd = same & (np.abs(np.log(now / self._level_s)) > np.maximum(CHANGED, 3.0 * view.work_noise))
        self._odd = np.where(is_odd, self._odd + 1, 0)
        other = self._odd >= CHANGED_WINDOWS
        self.seen &= ~other
        self._odd[other] = 0
        self.is_other = np.asarray(other.any(1))
        level_s = np.where(is_odd, self._level_s, self._level_s + LEVEL * (now - self._level_s))
        self._level_s = np.where(same & ~other, level_s, now)
        self._units = np.where(ok, view.value, 0.0)

    def _tidy(self, one: Floats, two: Floats) -> None:
        """Coefficients that are physical: none negative, the value at the present number of workers kept."""
        level, first, second = self.theta
        now = np.maximum(level + one * first + two * second, FLOOR * self.work_s / self.reference_s)
        linear, square = np.maximum(_not_negative(first, second, self.precision) - self._doubt, 0.0)
        grown = linear * one + square * two
        scale = np.minimum(1.0, (1.0 - LEAST) * now / np.maximum(grown, 1e-12))
        c = self.scale[:, None]
        unit_s = scale * self.reference_s / c
        self.constant = (now - scale * grown) * self.reference_s
        self.linear, self.square = unit_s * linear, unit_s * square / c

    def service_s(self, value: Floats) -> Floats:
        """Return the expected worker seconds per batch with `value` workers, [N, S]."""
        n = np.maximum(value, 1.0)
        return self.constant + (n - 1.0) * (self.linear + n * self.square)

    def workers_for(self, rate: Floats) -> Floats:
        """Return the (fractional) workers every slot needs for a rate, infinity if no number is enough, [..., N, S].

        Args:
            rate: batches per second, [..., N, S] or [..., N, 1].
        """
        # n = rate * service_s(n): the smaller root of a quadratic, in its stable form.
        lam_d = rate * self.square
        middle = 1.0 - rate * self.linear + lam_d
        free = rate * np.maximum(self.constant - self.linear, 0.0)
        inside = middle * middle - 4.0 * lam_d * free
        possible = (inside >= 0.0) & (middle > 0.0)
        root = np.sqrt(np.maximum(inside, 0.0))
        return np.where(possible, 2.0 * free / np.maximum(middle + root, _TINY), np.inf)


def _not_negative(linear: Floats, square: Floats, precision: Floats) -> Floats:
    """Return the pair of coefficients nearest to a fitted one, in the metric of the fit, of which none is negative.

    Without this a negative coefficient is cut off while the other keeps what only made up for it.

    Args:
        linear, square: as fitted.
        precision: upper triangle of the symmetric matrix, row by row.
    """
    xx, xy, xz, yy, yz, zz = precision
    xx = xx + _EYE
    # The constant is free: what the others cost once it has followed them.
    yy, yz, zz = yy + _EYE - xy * xy / xx, yz - xy * xz / xx, zz + _EYE - xz * xz / xx
    yy, zz = np.maximum(yy, _EYE), np.maximum(zz, _EYE)
    only_square = np.maximum(square + yz / zz * linear, 0.0)
    only_linear = np.maximum(linear + yz / yy * square, 0.0)

    def cost(one: Floats, two: Floats) -> Floats:
        one, two = one - linear, two - square
        return np.asarray(yy * one * one + 2.0 * yz * one * two + zz * two * two)

    is_square = cost(np.zeros_like(linear), only_square) <= cost(only_linear, np.zeros_like(square))
    is_valid = (linear >= 0.0) & (square >= 0.0)
    one = np.where(is_valid, linear, np.where(is_square, 0.0, only_linear))
    two = np.where(is_valid, square, np.where(is_square, only_square, 0.0))
    return np.stack([one, two])


def _prior(shape: tuple[int, ...]) -> Floats:
    return np.stack([np.full(shape, of) for of in _PRIOR])


def _updated(now: Floats, one: Floats, two: Floats, theta: Floats, precision: Floats) -> tuple[Floats, Floats, Floats]:
    """Make one step of recursive least squares with directional forgetting.

    Returns the precision after a reading, the change of the coefficients, and the variance of the linear and the square
    one, in units of that of a reading.

    Args:
        now: service time measured.
        one, two: basis beside the constant.
        theta: the three coefficients.
        precision: upper triangle of the symmetric matrix, row by row.
    """
    a, b, d = theta
    expected = a + one * b + two * d
    # Relative to the larger of both, so that no single reading counts for more than itself.
    size = np.maximum(np.maximum(expected, now), 1e-9)
    x, y, z = 1.0 / size, one / size, two / size
    error = (now - expected) / size
    xx, xy, xz, yy, yz, zz = precision
    px, py, pz = xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z
    along = np.maximum(x * px + y * py + z * pz, 1e-9)
    forgotten = (along > 1.0) * (1.0 - KEEP) / along
    fx, fy, fz = forgotten * px, forgotten * py, forgotten * pz
    xx, xy, xz = xx + x * x - fx * px, xy + x * y - fx * py, xz + x * z - fx * pz
    yy, yz, zz = yy + y * y - fy * py, yz + y * z - fy * pz, zz + z * z - fz * pz
    after = np.stack([xx, xy, xz, yy, yz, zz])
    # Elimination without pivots: the matrix is positive definite, but for what rounding leaves of it.
    xx = xx + _EYE
    y_of_x, z_of_x = xy / xx, xz / xx
    pivot_y = np.maximum(yy + _EYE - y_of_x * xy, _EXACT * yy)
    rest = yz - y_of_x * xz
    z_of_y = rest / pivot_y
    pivot_z = np.maximum(zz + _EYE - z_of_x * xz - z_of_y * rest, _EXACT * zz)
    variance = np.stack([1.0 / pivot_y + z_of_y * z_of_y / pivot_z, 1.0 / pivot_z])
    y = y - y_of_x * x
    z = (z - z_of_x * x - z_of_y * y) / pivot_z
    y = y / pivot_y - z_of_y * z
    return after, error * np.stack([x / xx - y_of_x * y - z_of_x * z, y, z]), variance
