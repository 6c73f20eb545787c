"""The state of the agent, index by index."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from intune_callbacks.decide.moves import STEPS
from intune_callbacks.decide.target import batch_s
from intune_callbacks.decide.track import Track
from intune_callbacks.decide.view import Floats, View

__all__ = ["OF_PIPELINE", "OF_SLOT", "features"]

OF_SLOT = (
    "ln(units) / 5",
    "units x CPU weight / CPU budget, 0..1",
    "ln(capacity / capacity of the slowest slot) / 2, 0..1.5",
    "busy share of the workers, 0..1",
    "fill of the queue in front, 0..1; 0 for a buffer",
    "fill of the slot's own window or buffer, 0..1",
    "CPU seconds / wall seconds of a busy worker, 0..1",
    "coefficient of variation of the service times",
    "measured elasticity of the service time to the units, -1..1.5",
    "measured elasticity of the throughput to the units, -1..1",
    "elasticity of the service time according to the curve, 0..2",
    "tanh((target of the curves - units) / 5), -1..1",
    "ln(target of the curves / units), -2..2",
    "tanh((units of the best allocation measured - units) / 5), -1..1",
    "ln(units of the best allocation measured / units), -2..2",
    "last move / 5, -1..1",
    "share of the pipeline's CPU work, 0..1",
    "how far the slot was moved lately, ln units, 0..2",
    "1 for a buffer",
    "memory of the slot, windows full, share of the limit x 4",
    "memory of one unit more, share of the limit x 200",
    "10 x expected gain in ln(throughput) of -5, -2..2",
    "10 x expected gain in ln(throughput) of -1, -2..2",
    "10 x expected gain in ln(throughput) of +1, -2..2",
    "10 x expected gain in ln(throughput) of +5, -2..2",
)
"""What the network sees of every slot; missing slots are all zero."""
OF_PIPELINE = (
    "free CPUs / budget, 0..1",
    "tanh(free CPUs / 5), -1..1",
    "memory left, share of the limit, 0..1",
    "ln(throughput / demand of the model) / 2, -2..0.5",
    "ln(throughput / best allocation measured), -2..0.5",
    "change of ln(throughput) since the decision before, -1..1",
    "ln(CPUs) / 5",
    "number of slots / 8",
    "exp(-decisions since start or resize / 15), 0..1",
    "decisions at the present allocation / 10, 0..1",
    "ln(throughput / what the curves expect), -2..1",
    "decisions clearly below the best / 5, 0..1",
    "10 x relative noise of the throughput",
    "ln(throughput the curves expect of their target / expected now), -1..1",
)
"""What it sees of the whole pipeline."""
WIDEST = 5.0
"""Every value is cut to this, each way. A choice: what is beyond it was never seen in training."""
_SLOT_LIMITS = {2: (-WIDEST, 1.5), 8: (-1, 1.5), 9: (-1, 1), 12: (-2, 2), 14: (-2, 2), 15: (-1, 1), 17: (0, 2)}
_SLOT_LIMITS |= dict.fromkeys(range(21, 25), (-2.0, 2.0))
_PIPELINE_LIMITS = {0: (-1, 1), 3: (-2, 0.5), 4: (-2, 0.5), 5: (-1, 1), 9: (0, 1), 10: (-2, 1), 11: (0, 1), 13: (-1, 1)}
"""Index -> smallest and largest value, where `WIDEST` each way is not narrow enough."""
SPREAD = 0.03
"""Added to the squares of the moves (ln units): elasticities of what was hardly moved are shrunk to 0. A choice: the
square of one move by a fifth."""
SHARPNESS = 12.0
"""Exponent of the soft minimum: neighbours of about the same speed disturb each other. A choice: two stages that are
equally slow are taken to deliver 6 % less than one."""
_CHANGES = np.array([units for units in STEPS if units])[:, None, None]
"""Units of the moves whose gain is part of the state, [4, 1, 1]."""


def features(view: View, track: Track, target: Floats, ratio: Floats) -> tuple[Floats, Floats]:
    """Return the state: [N, S, len(OF_SLOT)] and [N, len(OF_PIPELINE)], float32.

    Args:
        target: workers the curves ask for, [N, S].
        ratio: window per worker, [N, S].
    """
    workers, mask, value = view.workers, view.mask, view.value
    curves = track.curves
    units, budget = np.maximum(value, 1.0), np.maximum(view.budget, 1e-9)
    best, best_score = track.best
    weighted = value * view.worker_weight
    service_s = np.maximum(curves.work_s, 1e-12)
    capacity = np.where(workers, units / service_s, np.inf)
    slack = np.log(np.where(workers, capacity, 1.0) / np.where(workers, capacity.min(1, keepdims=True), 1.0))
    cpu_work = np.where(workers, service_s * curves.cpu_share, 0.0)
    in_front = np.concatenate([np.ones((len(value), 1)), np.where(workers, view.fill, 0.0)[:, :-1]], 1)
    in_front = np.where(view.is_buffer, 0.0, in_front)
    slope = value * (curves.linear + curves.square * (2.0 * value - 1.0)) / np.maximum(curves.service_s(value), 1e-12)
    wanted = np.where(workers, target, value)
    gains, rate_now, rate_target = _gains(view, track, wanted)
    squares, with_service_s, with_rate = track.moves
    x = np.array(
        [
            np.log(units) / 5.0,
            weighted / budget[:, None],
            slack / 2.0,
            view.busy,
            in_front,
            view.fill,
            np.where(workers, curves.cpu_share, 0.0),
            np.where(workers, curves.cv, 0.0),
            with_service_s / (squares + SPREAD),
            with_rate / (squares + SPREAD),
            np.where(workers, slope, 0.0),
            np.tanh((wanted - value) / 5.0),
            np.log(np.maximum(wanted, 1.0) / units),
            np.tanh((best - value) / 5.0),
            np.log(np.maximum(best, 1.0) / units),
            track.last_move / 5.0,
            cpu_work / np.maximum(cpu_work.sum(1, keepdims=True), 1e-12),
            np.sqrt(squares),
            view.is_buffer.astype(float),
            4.0 * (value * view.unit_memory + np.where(workers, ratio * value * view.item_memory, 0.0)),
            200.0 * (view.unit_memory + np.where(workers, ratio * view.item_memory, 0.0)),
            *(10.0 * gains),
        ]
    )
    x = np.where(mask[..., None], x.transpose(1, 2, 0), 0.0)
    g = np.array(
        [
            view.free_cpus / budget,
            np.tanh(view.free_cpus / 5.0),
            1.0 - view.memory,
            (track.smooth - np.log(np.maximum(view.demand, 1e-12))) / 2.0,
            track.smooth - best_score,
            track.change,
            np.log(np.maximum(view.cpus, 1.0)) / 5.0,
            mask.sum(1) / 8.0,
            np.exp(-track.age / 15.0),
            track.count[:, 0] / 10.0,
            track.smooth - np.log(np.maximum(rate_now, 1e-12)),
            track.low / 5.0,
            10.0 * track.noise,
            np.log(np.maximum(rate_target, 1e-12) / np.maximum(rate_now, 1e-12)),
        ]
    )
    return _within(x, _LIMITS_OF_SLOT), _within(g.T, _LIMITS_OF_PIPELINE)


def _limits(count: int, narrow: Mapping[int, tuple[float, float]]) -> Floats:
    return np.array([narrow.get(i, (-WIDEST, WIDEST)) for i in range(count)], float).T


_LIMITS_OF_SLOT = _limits(len(OF_SLOT), _SLOT_LIMITS)
_LIMITS_OF_PIPELINE = _limits(len(OF_PIPELINE), _PIPELINE_LIMITS)


def _within(x: Floats, limits: Floats) -> Floats:
    """Return float32 within the limits, 0 for what is no number."""
    x = np.minimum(np.maximum(x, limits[0]), limits[1]).astype(np.float32, order="C")
    x[np.isnan(x)] = 0.0
    return x


def _gains(view: View, track: Track, target: Floats) -> tuple[Floats, Floats, Floats]:
    """Return what each move of each slot alone is expected to gain, [4, N, S], and the rates now and at the target."""
    needed_s = batch_s(view, track.curves, view.value)
    model_s = 1.0 / np.maximum(view.demand, 1e-12)
    top_s = np.maximum(np.maximum(needed_s.max(1), model_s), 1e-12)
    own, model = _sharp(needed_s / top_s[:, None]), _sharp(model_s / top_s)
    total = own.sum(1) + model
    then = _sharp(batch_s(view, track.curves, view.value + _CHANGES) / top_s[:, None])
    rest = np.maximum(total[:, None] - own + then, 1e-12)
    gains = np.where(view.workers, np.log(total[:, None] / rest) / SHARPNESS, 0.0)
    aimed = _sharp(batch_s(view, track.curves, target) / top_s[:, None]).sum(1) + model
    root = 1.0 / SHARPNESS
    return gains, 1.0 / (top_s * total**root), 1.0 / (top_s * np.maximum(aimed, 1e-12) ** root)


def _sharp(x: Floats) -> Floats:
    """Return ``x ** SHARPNESS``; products are faster than powers."""
    x = x * x * x
    x = x * x
    return x * x
