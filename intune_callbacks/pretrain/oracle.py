"""The best allocation of a simulated machine, by search on the noise-free model: what every policy is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from intune_callbacks.decide.view import Floats, Ints
from intune_callbacks.pretrain.env import Env, even_split
from intune_callbacks.pretrain.flow import flow, memory
from intune_callbacks.pretrain.machines import MOST_WORKER_STAGES, Machines

__all__ = ["best", "spread", "trace"]

MEMORY_LIMIT = 0.93
"""Share of the memory the best allocation may take. A choice: a little more than the 0.90 policies plan with."""
ROUNDS, REFINE_EVERY = 120, 6
"""Most steps of the search, and how often windows and buffer are chosen anew. A choice: it mostly ends earlier."""
GAIN = 1e-4
"""Share by which a step has to gain: less is rounding."""
_BUFFERS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_RATIOS = (2, 4, 8, 12)
"""Buffers in batches, and windows per worker, that are compared. A choice: neighbours differ by little."""


def spread(cost_s: Floats, machines: Machines, cpus: Floats) -> Floats:
    """Return whole workers, at least one per stage and no more CPUs than there are, that maximise min(n / cost).

    Args:
        cost_s: [N, stages].
        cpus: [N].
    """
    mask, share = machines.mask, machines.share
    cost = np.where(mask, np.maximum(cost_s, 1e-12), 0.0)
    used = (cost * share).sum(1, keepdims=True)
    n = np.where(mask, np.maximum(1.0, np.floor(cost / used * cpus[:, None])), 0.0)
    for _ in range(64):
        room = cpus - (n * share).sum(1)
        most = np.where(mask & (share <= room[:, None] + 1e-9), cost / np.maximum(n, 1.0), -1.0)
        least = np.where(mask & (n > 1), cost / np.maximum(n - 1.0, 1e-9), np.inf)
        up, down = np.flatnonzero(most.max(1) > 0.0), np.flatnonzero((room < -1e-9) & np.isfinite(least).any(1))
        if not len(up) and not len(down):
            break
        n[up, most[up].argmax(1)] += 1.0
        n[down, least[down].argmin(1)] -= 1.0
    return n


def _moves() -> Floats:
    one = np.eye(MOST_WORKER_STAGES)
    moves = [np.zeros(MOST_WORKER_STAGES)]
    for i in range(MOST_WORKER_STAGES):
        moves += [sign * step * one[i] for step in (1, 3, 10) for sign in (1, -1)]
        moves += [step * (one[i] - one[j]) for j in range(MOST_WORKER_STAGES) if i != j for step in (1, 2, 5)]
    return np.array(moves)


def best(
    machines: Machines, work_s: Floats, base: Floats, cpus: Floats, start: Floats | None = None
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return rate, workers, windows and buffer of the best allocation found, by local search from several starts.

    Args:
        work_s: CPU seconds of one batch now, [N, stages].
        base: memory without the pipeline now, [N].
        cpus: [N].
        start: workers of one start more, [N, stages].
    """
    m, count = machines, len(machines)
    starts = [
        spread(work_s / m.share, m, cpus),
        spread(work_s / m.share * (1.0 + 8.0 * m.serial), m, cpus),
        even_split(m, cpus),
        np.where(m.mask, 1.0, 0.0),
    ]
    if start is not None:
        # On a machine that shrank the old allocation has to fit first.
        over = (np.where(m.mask, start, 0.0) * m.share).sum(1) > cpus + 1e-9
        starts.append(np.where(over[:, None], spread(np.maximum(start, 1e-9), m, cpus), np.where(m.mask, start, 0.0)))
    moves = _moves()
    top, workers = np.full(count, -1.0), starts[0].copy()
    ratio, buffer = np.full(count, 2.0), np.full(count, 2.0)
    for begin in starts:
        n, r, b, rate = begin.copy(), np.full(count, 2.0), np.full(count, 2.0), np.full(count, -1.0)
        active = np.arange(count)
        for turn in range(ROUNDS):
            part = m.take(active)
            if turn % REFINE_EVERY == 0:
                r[active], b[active] = _depths(part, work_s[active], base[active], n[active], cpus[active])
            tried = n[active][:, None] + moves
            fits = (np.where(part.mask[:, None], tried, 1.0) >= 1.0).all(-1)
            fits &= (np.where(part.mask[:, None], 0.0, tried) == 0.0).all(-1)
            fits &= (tried * part.share[:, None]).sum(-1) <= cpus[active][:, None] + 1e-9
            tried = np.where(fits[..., None], tried, n[active][:, None])
            held = tried * r[active][:, None, None]
            depth = np.broadcast_to(b[active][:, None], fits.shape)
            fits &= memory(part, base[active], tried, held, depth, 1.0) < MEMORY_LIMIT
            fits[:, 0] = True
            got = np.where(fits, flow(part, work_s[active], tried, held, depth, cpus[active]).rate, -1.0)
            winner, rows = got.argmax(1), np.arange(len(active))
            better = got[rows, winner] > rate[active] * (1.0 + GAIN)
            n[active] = np.where(better[:, None], tried[rows, winner], n[active])
            rate[active] = np.maximum(rate[active], got[rows, winner])
            if turn % REFINE_EVERY == REFINE_EVERY - 1:
                active = active[better]
                if not len(active):
                    break
        wins = rate > top
        top = np.where(wins, rate, top)
        workers[wins], ratio[wins], buffer[wins] = n[wins], r[wins], b[wins]
    return top, workers, workers * ratio[:, None], buffer


def _depths(m: Machines, work_s: Floats, base: Floats, n: Floats, cpus: Floats) -> tuple[Floats, Floats]:
    """Return the best window, in workers, and the best buffer for given workers."""
    grid = np.array([(r, b) for r in _RATIOS for b in _BUFFERS], float)
    many = np.repeat(n[:, None], len(grid), 1)
    windows = many * grid[None, :, :1]
    buffer = np.where(m.has_buffer[:, None], grid[None, :, 1], 2.0)
    rate = flow(m, work_s, many, windows, buffer, cpus).rate
    fits = memory(m, base, many, windows, buffer, 1.0) < MEMORY_LIMIT
    fits[:, 0] = True
    choice = np.where(fits, rate, -1.0).argmax(1)
    rows = np.arange(len(m))
    return grid[choice, 0], buffer[rows, choice]


def trace(
    machines: Machines, seed: int, decisions: int, sizes: Mapping[int, float], every: int, rows: slice = slice(None)
) -> tuple[Floats, list[tuple[int, Floats, Floats, Floats]]]:
    """Return the oracle's rate at every decision, [decisions, N], and its allocations.

    The drift of the work does not depend on what a policy does, so one run of the machines gives it; the search is
    repeated every `every` decisions and its allocations are judged again at each.

    Args:
        sizes: decision -> factor on the number of CPUs.
        every: decisions between two searches.
        rows: machines to search for; the drift is drawn for all, so that parts searched apart are the parts of a whole.
    """
    env = Env(machines, np.random.default_rng(seed), sizes)
    work, base, cpus = [], [], []
    for _ in range(decisions):
        env.step(env.view.value)
        work.append(env.work_s[rows])
        base.append(env.base[rows])
        cpus.append(env.cpus[rows])
    machines = machines.take(rows)
    found: list[tuple[int, Floats, Floats, Floats]] = []
    for begin in range(0, decisions, every):
        middle = min(begin + every // 2, decisions - 1)
        start = found[-1][1] if found else None
        found.append((middle, *best(machines, work[middle], base[middle], cpus[middle], start)[1:]))
    rates = np.zeros((decisions, len(machines)))
    for t in range(decisions):
        near: list[Ints | int] = [t // every + k for k in (-1, 0, 1)]
        for k in near:
            if 0 <= k < len(found) and (cpus[found[k][0]] == cpus[t]).all():
                _, n, w, b = found[k]
                got = flow(machines, work[t], n[:, None], w[:, None], b[:, None], cpus[t]).rate[:, 0]
                rates[t] = np.maximum(rates[t], got)
    return rates, found
