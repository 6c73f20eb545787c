"""What a memory limit leaves of an emulated machine when batches must leave in order.

Every batch in work or finished too early is held in memory, so with few batches the CPUs wait for the one that is late.
An event simulation of the five stages, and a search over static allocations, say how much any allocation could do.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.emulated import SHARES, irregular

__all__ = ["TRIES", "Static", "attainable", "utilisation"]

SHARE = tuple(SHARES.values())
IRREGULAR = list(SHARES).index("udf")
SEARCHED_BATCHES, CHECKED_BATCHES, TRIES = 1000, 3000, 300


@dataclass(frozen=True, slots=True)
class Static:
    """An allocation that does not change.

    Args:
        workers: of each stage of `SHARES`.
        windows: results of each stage that may be held, finished or in work.
    """

    workers: tuple[int, ...]
    windows: tuple[int, ...]


def utilisation(allocation: Static, cpus: int, sigma: float, seed: int, batches: int) -> float:
    """Return the share of the CPUs that works, 0..1, in the middle of a run in which the model takes no time.

    Args:
        allocation: workers and windows.
        cpus: served first come, first served.
        sigma, seed: irregularity, see `irregular`.
        batches: length of the run.
    """
    stages = range(len(SHARE))
    last = len(SHARE) - 1
    begun, passed, busy = [0] * len(SHARE), [0] * len(SHARE), [0] * len(SHARE)
    done: list[set[int]] = [set() for _ in stages]
    running: list[tuple[float, int, int]] = []
    waiting: deque[tuple[int, int]] = deque()
    delivered_s: list[float] = []
    now_s, free = 0.0, cpus

    def cost_s(stage: int, batch: int) -> float:
        return SHARE[stage] * (irregular(seed, batch, sigma) if stage == IRREGULAR else 1.0)

    def begin() -> bool:
        """Let every stage begin what it may; False when nothing moved."""
        moved = False
        while passed[last] in done[last]:
            done[last].discard(passed[last])
            passed[last] += 1
            delivered_s.append(now_s)
            moved = True
        for stage in reversed(stages):
            while busy[stage] < allocation.workers[stage] and begun[stage] - passed[stage] < allocation.windows[stage]:
                batch = begun[stage]
                if batch >= batches or (stage and batch not in done[stage - 1]):
                    break
                if stage:
                    done[stage - 1].discard(batch)
                    passed[stage - 1] = batch + 1
                begun[stage] += 1
                busy[stage] += 1
                waiting.append((stage, batch))
                moved = True
        return moved

    while True:
        while begin():
            pass
        while free and waiting:
            stage, batch = waiting.popleft()
            free -= 1
            heapq.heappush(running, (now_s + cost_s(stage, batch), stage, batch))
        if not running:
            break
        now_s, stage, batch = heapq.heappop(running)
        free += 1
        busy[stage] -= 1
        done[stage].add(batch)
    first, end = batches // 5, batches * 4 // 5
    work_s = sum(cost_s(stage, batch) for batch in range(first, end) for stage in stages)
    return min(1.0, work_s / (delivered_s[end] - delivered_s[first]) / cpus)


def attainable(cpus: int, held: int, sigma: float, seed: int, tries: int = TRIES) -> tuple[float, Static]:
    """Return the largest utilisation a search found with `held` batches in memory, and its allocation.

    What was found is measured on other batches than it was searched on.

    Args:
        cpus, sigma, seed: see `utilisation`.
        held: batches that fit in memory.
        tries: allocations looked at.
    """
    drawn = random.Random(seed)
    best, best_value = _start(cpus, held), 0.0
    for number in range(tries):
        tried = best if number == 0 else _near(best, held, drawn)
        if min(tried.windows) < 1:
            continue
        value = utilisation(tried, cpus, sigma, seed, SEARCHED_BATCHES)
        if value > best_value:
            best, best_value = tried, value
    return utilisation(best, cpus, sigma, seed + 1, CHECKED_BATCHES), best


def _start(cpus: int, held: int) -> Static:
    """Windows as small as the workers, but for the irregular stage's, which takes the rest."""
    workers = [max(1, round(1.2 * cpus * share)) for share in SHARE]
    most = max(1, held - len(SHARE))
    while sum(workers) > most:
        workers[workers.index(max(workers))] -= 1
    return Static(tuple(workers), _filled(workers, held))


def _near(allocation: Static, held: int, drawn: random.Random) -> Static:
    workers = [max(1, n + drawn.choice((-1, 0, 0, 1))) for n in allocation.workers]
    windows = [max(1, n + drawn.choice((-2, -1, 0, 0, 1, 2))) for n in allocation.windows]
    return Static(tuple(workers), _filled(windows, held))


def _filled(windows: Sequence[int], held: int) -> tuple[int, ...]:
    full = list(windows)
    full[IRREGULAR] += held - sum(full)
    return tuple(full)
