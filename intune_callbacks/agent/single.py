"""The state of one live pipeline in plain numbers: on a few stages that takes a third of the time of arrays.

`features` computes the same for N pipelines; a test compares both on whatever pipelines come up.
"""

from __future__ import annotations

import math

from intune_callbacks.agent.moves import STEPS
from intune_callbacks.agent.track import Track
from intune_callbacks.agent.view import Number, View

__all__ = ["CHANGES", "SHARPNESS", "sharp", "state_of_one"]

SHARPNESS = 12.0
"""Exponent of the soft minimum: neighbours of about the same speed disturb each other."""
CHANGES = tuple(units for units in STEPS if units)
"""Units of the moves whose gain is part of the state."""
_LEAST = 1e-12
_GAIN = 10.0 / SHARPNESS
_NOTHING = [0.0] * (21 + len(CHANGES))


def sharp(x: Number) -> Number:
    """Return ``x ** SHARPNESS``; products are faster than powers, and the same for numbers and arrays."""
    x = x * x * x
    x = x * x
    return x * x


def state_of_one(view: View, track: Track, target: list[float], ratio: list[float]) -> list[float]:
    """Return the entries of `OF_SLOT` for each slot, then those of `OF_PIPELINE`, before they are limited.

    Args:
        view: of one pipeline; the others as for `features`, by slot.
    """
    one, curves, log, tanh, least = view.one, track.curves.one, math.log, math.tanh, _LEAST
    value, workers = one.value, one.workers
    constant, linear, square, share = curves.constant, curves.linear, curves.square, curves.cpu_share
    known = track.one
    of_work, of_rate, tried = known.tried()
    last_move, (best, best_score) = known.last_move, known.best
    budget, model_s = max(one.budget, 1e-9), 1.0 / max(one.demand, _LEAST)

    at = [i for i, has in enumerate(workers) if has]
    units = [v if v > 1.0 else 1.0 for v in value]
    work_s = [s if s > _LEAST else _LEAST for s in curves.work_s]
    slowest = min([units[i] / work_s[i] for i in at], default=1.0)
    cpu_work = max(sum([work_s[i] * share[i] for i in at]), _LEAST)
    service_s = [a + (n - 1.0) * (b + n * d) for n, a, b, d in zip(units, constant, linear, square, strict=True)]
    top_s = max(max([service_s[i] / units[i] for i in at], default=0.0), model_s, _LEAST)
    own = [sharp(s / n / top_s) for s, n in zip(service_s, units, strict=True)]
    model = sharp(model_s / top_s)
    total, aimed = model, model
    for i in at:
        n = max(target[i], 1.0)
        total += own[i]
        aimed += sharp((constant[i] + (n - 1.0) * (linear[i] + n * square[i])) / n / top_s)
    rate_now, rate_target = (1.0 / (top_s * max(x, _LEAST) ** (1.0 / SHARPNESS)) for x in (total, aimed))
    log_total = log(max(total, _LEAST))

    state: list[float] = []
    in_front = 1.0
    for i, v in enumerate(value):
        holds_workers, n, fill, to = workers[i], units[i], one.fill[i], best[i]
        if not one.mask[i]:
            state += _NOTHING
        elif not holds_workers:
            memory = one.unit_memory[i]
            state += (log(n) / 5.0, 0.0, 0.0, one.busy[i], 0.0, fill, 0.0, 0.0, of_work[i], of_rate[i], 0.0, 0.0, 0.0)
            state += (tanh((to - v) / 5.0), log((to if to > 1.0 else 1.0) / n), last_move[i] / 5.0, 0.0, tried[i], 1.0)
            state += (4.0 * v * memory, 200.0 * memory, 0.0, 0.0, 0.0, 0.0)
        else:
            aim, a, b, d, others = target[i], constant[i], linear[i], square[i], total - own[i]
            memory = one.unit_memory[i] + ratio[i] * one.item_memory[i]
            slope = v * (b + d * (2.0 * v - 1.0)) / (service_s[i] if service_s[i] > _LEAST else _LEAST)
            state += (
                log(n) / 5.0,
                v * one.weight[i] / budget,
                log(n / work_s[i] / slowest) / 2.0,
                one.busy[i],
                in_front,
                fill,
                share[i],
                curves.cv[i],
                of_work[i],
                of_rate[i],
                slope,
                tanh((aim - v) / 5.0),
                log((aim if aim > 1.0 else 1.0) / n),
                tanh((to - v) / 5.0),
                log((to if to > 1.0 else 1.0) / n),
                last_move[i] / 5.0,
                work_s[i] * share[i] / cpu_work,
                tried[i],
                0.0,
                4.0 * v * memory,
                200.0 * memory,
            )
            for change in CHANGES:
                n = v + change
                if n < 1.0:
                    n = 1.0
                then = (a + (n - 1.0) * (b + n * d)) / n / top_s
                # `sharp`, written out: this is done four times for each stage.
                then *= then * then
                then *= then
                rest = others + then * then
                state.append(_GAIN * (log_total - log(rest if rest > least else least)))
        in_front = fill * holds_workers

    free, smooth = one.room, known.smooth
    state += (
        free / budget,
        tanh(free / 5.0),
        1.0 - one.memory,
        (smooth - log(max(one.demand, _LEAST))) / 2.0,
        smooth - best_score,
        known.change,
        log(max(one.cpus, 1.0)) / 5.0,
        sum(one.mask) / 8.0,
        math.exp(-known.age / 15.0),
        known.count[0] / 10.0,
        smooth - log(max(rate_now, _LEAST)),
        known.low / 5.0,
        10.0 * known.noise,
        log(max(rate_target, _LEAST) / max(rate_now, _LEAST)),
    )
    return state
