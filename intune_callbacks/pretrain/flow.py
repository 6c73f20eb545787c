"""How many batches per second a simulated pipeline delivers with a given allocation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from intune_callbacks.decide.ordering import in_order_efficiency
from intune_callbacks.decide.view import Floats, Ints
from intune_callbacks.pretrain.machines import DISK, Machines

__all__ = ["Flow", "flow", "memory"]

_LOG_WORKERS = np.arange(0.0, 9.0)
_RATIOS = np.array([1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0])
_CVS = np.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.2, 1.6])
"""Where `in_order_efficiency` is tabulated: log2 of the workers, windows per worker, coefficients of variation."""
_SHARP = 5.0
"""Exponent with which a disk's or a lock's limit takes over from the stage's own rate. A choice: where both are equal
13 % are lost."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What an allocation gives; K allocations for each of N machines.

    Args:
        rate: batches per second, [N, K].
        supply: the same if the model took everything, [N, K].
        service_s: wall seconds one worker takes for a batch, [N, K, stages].
        batch_s: seconds between two batches of a stage that is never starved or blocked, [N, K, stages].
        cpu_share: CPU seconds / wall seconds of a busy worker, [N, K, stages].
    """

    rate: Floats
    supply: Floats
    service_s: Floats
    batch_s: Floats
    cpu_share: Floats


def flow(machines: Machines, work_s: Floats, workers: Floats, windows: Floats, buffer: Floats, cpus: Floats) -> Flow:
    """Return the throughput of K allocations on each machine.

    Stages follow the Universal Scalability Law, limits of disk and lock take over smoothly, results that leave in order
    cost `in_order_efficiency`, and stages that are about equally fast disturb each other unless buffers are deep: the
    rate is a soft minimum whose exponent grows with the buffered batches per `burst`.

    Args:
        work_s: CPU seconds of one batch now, [N, stages].
        workers: [N, K, stages].
        windows: results each stage may hold back, [N, K, stages].
        buffer: batches in the prefetch buffer, [N, K].
        cpus: CPUs now, [N].
    """
    m, mask = machines, machines.mask[:, None, :]
    n = np.where(mask, np.maximum(workers, 1.0), 0.0)
    share = m.share[:, None, :]
    in_use = (n * share).sum(-1) / cpus[:, None]
    slow = (1.0 + m.interference[:, None] * np.minimum(1.0, in_use) ** 2)[..., None]
    more = np.maximum(n - 1.0, 0.0)
    coherence = m.coherence[:, None, :] * n * more
    alone = work_s[:, None, :] * slow
    cpu_s = alone * (1.0 + coherence)
    wall_s = alone * (1.0 / share + m.serial[:, None, :] * more + coherence)
    with np.errstate(divide="ignore", invalid="ignore"):
        batch_s = np.where(mask, wall_s / n, 0.0)
        disk_s = np.where(m.kind[:, None, :] == DISK, 1.0 / m.io_rate[:, None, None], 0.0)
        holders = (n * (m.lock[:, None, :] > 0.0)).sum(-1)
        held_s = (m.lock * work_s).sum(-1)[:, None] * (1.0 + m.convoy[:, None] * np.maximum(holders - 1.0, 0.0))
        lock_s = np.where(m.lock[:, None, :] > 0.0, held_s[..., None], 0.0)
        limit_s = np.where(mask, np.maximum(disk_s, lock_s), 0.0)
        batch_s = np.where(limit_s > 0.0, (batch_s**_SHARP + limit_s**_SHARP) ** (1.0 / _SHARP), batch_s)
        cpu_share = np.where(mask, np.clip(cpu_s / np.maximum(batch_s * n, 1e-12), 0.0, 1.0), 0.0)
        window = np.maximum(windows, 1.0)
        ratio = np.where(mask, window / np.maximum(n, 1.0), 0.0)
        # Workers that queue for a lock or a disk do not use up the window.
        at_work = np.where(mask, np.maximum(1.0, wall_s / np.maximum(batch_s, 1e-12)), 1.0)
        ordered_s = batch_s / np.where(mask, _efficiency(at_work, window / at_work, m.cv[:, None, :]), 1.0)
        # Windows of twice the workers are what frameworks give; what is more smooths like a buffer.
        deep = np.maximum(0.0, buffer + ratio.sum(-1) / mask.sum(-1) - 2.0)
        power = np.clip(5.0 + 3.0 * np.log2(1.0 + deep / m.burst[:, None]), 5.0, 30.0)
        slowest_s = np.maximum(ordered_s.max(-1), 1e-12)
        together = ((ordered_s / slowest_s[..., None]) ** power[..., None]).sum(-1)
        crowd = np.maximum(1.0, in_use)
        cpu_limit = cpus[:, None] / np.maximum(cpu_s.sum(-1), 1e-12) / (1.0 + 0.15 * (crowd - 1.0))
        supply = np.minimum(1.0 / (slowest_s * together ** (1.0 / power)), cpu_limit)
        model_s = 1.0 / m.demand[:, None]
        top_s = np.maximum(slowest_s, model_s)
        all_in = together * (slowest_s / top_s) ** power + (model_s / top_s) ** power
        rate = np.minimum(1.0 / (top_s * all_in ** (1.0 / power)), cpu_limit)
    return Flow(rate, supply, np.where(mask, batch_s * n, 0.0), batch_s, cpu_share)


def memory(
    machines: Machines, base: Floats, workers: Floats, windows: Floats, buffer: Floats, full: Floats | float
) -> Floats:
    """Return the memory in use as a share of the machine's, [N, K].

    Args:
        base: in use without the pipeline now, [N].
        workers, windows: [N, K, stages].
        buffer: [N, K].
        full: how full windows and buffer are, 0..1: a number, or [N, K, stages + 1].
    """
    m, mask = machines, machines.mask[:, None, :]
    fill = np.broadcast_to(np.asarray(full, float), (*buffer.shape, mask.shape[-1] + 1))
    items = np.where(mask, workers + windows * fill[..., :-1], 0.0)
    stages = np.where(mask, workers * m.worker_memory[:, None, :], 0.0) + items * m.item_memory[:, None, :]
    return np.asarray(base[:, None] + stages.sum(-1) + buffer * m.batch_memory[:, None] * fill[..., -1])


@lru_cache(maxsize=1)
def _table() -> Floats:
    return np.array(
        [
            [[in_order_efficiency(round(2**e), round(2**e * r), float(c)) for c in _CVS] for r in _RATIOS]
            for e in _LOG_WORKERS
        ]
    )


def _efficiency(workers: Floats, ratio: Floats, cv: Floats) -> Floats:
    """Interpolate `in_order_efficiency` between tabulated numbers of workers, windows and irregularities."""
    table = _table()
    i, x = _place(np.log2(np.maximum(workers, 1.0)), _LOG_WORKERS)
    j, y = _place(ratio, _RATIOS)
    k, z = _place(np.broadcast_to(cv, workers.shape), _CVS)
    near = _mix(table, i, j, k, z, y)
    return np.asarray(near + x * (_mix(table, i + 1, j, k, z, y) - near))


def _mix(table: Floats, i: Ints, j: Ints, k: Ints, z: Floats, y: Floats) -> Floats:
    low = table[i, j, k] * (1.0 - z) + table[i, j, k + 1] * z
    high = table[i, j + 1, k] * (1.0 - z) + table[i, j + 1, k + 1] * z
    return np.asarray(low + y * (high - low))


def _place(value: Floats, grid: Floats) -> tuple[Ints, Floats]:
    index = np.clip(np.searchsorted(grid, value, side="right") - 1, 0, len(grid) - 2)
    return index, np.clip((value - grid[index]) / (grid[index + 1] - grid[index]), 0.0, 1.0)
