"""The random pipelines on which simulator and emulated machine are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.emulated import irregular
from benchmarks.live_loop import Case

__all__ = ["Drawn", "draw"]

CPUS = (8, 16, 32, 64)
MOST_SIGMA, LOCKED_SIGMA = 0.9, 0.3
SHORTEST_CALL_S, MOST_CALLS_PER_S = 0.03, 200.0


@dataclass(frozen=True, slots=True)
class Drawn(Case):
    """A random pipeline: `Case.sigma` belongs to one of its stages, the irregular one.

    Args:
        stage_s: CPU seconds of a batch of mean cost, by stage.
        odd: position of the irregular stage.
        lock: share of the irregular stage's work that only one of its workers can do at a time.
        model_s: seconds the model takes for a batch.
        workers, windows: by stage; no more workers than CPUs.
    """

    stage_s: tuple[float, ...]
    odd: int
    lock: float
    model_s: float
    workers: tuple[int, ...]
    windows: tuple[int, ...]

    def factor(self, batch: int) -> float:
        """Return what batch number `batch` costs the irregular stage, 1 on average."""
        return irregular(self.seed, batch, self.sigma)

    def batch_work_s(self, batch: int) -> float:
        """Return the CPU seconds that batch number `batch` really takes."""
        return self.work_s + self.stage_s[self.odd] * (self.factor(batch) - 1.0)

    @property
    def slowest_s(self) -> float:
        """Seconds per batch of the slowest stage, lock or model, were everything regular."""
        stages = (s / n for s, n in zip(self.stage_s, self.workers, strict=True))
        return max(*stages, self.lock * self.stage_s[self.odd], self.model_s)


def draw(rng: np.random.Generator, seed: int) -> Drawn:
    """Draw a pipeline of 2-6 stages on 8-64 CPUs: 20 % regular, 30 % with a model of about its speed, 20 % with a lock.

    Allocations go from balanced to careless and use half to all of the CPUs. A lock comes with irregular items: regular
    ones pass it like clockwork, which the simulator, made for real locks, does not know.

    Args:
        rng: source of randomness.
        seed: of the items' irregularity.
    """
    cpus = int(rng.choice(CPUS))
    count = int(rng.integers(2, min(6, cpus // 2) + 1))
    work = np.exp(0.75 * rng.normal(size=count))
    wanted = work * np.exp(rng.choice([0.0, 0.3, 0.8]) * rng.normal(size=count))
    workers = np.ones(count, int)
    for _ in range(max(count, int(cpus * rng.uniform(0.5, 1.0))) - count):
        workers[np.argmin(workers / wanted)] += 1
    windows = np.round(workers * np.exp(rng.uniform(math.log(2.0), math.log(12.0), count))).astype(int)
    odd, slowest = int(rng.integers(count)), float((work / workers).max())
    sigma = float(rng.uniform(0.0, MOST_SIGMA)) if rng.random() < 0.8 else 0.0
    model = slowest * float(rng.uniform(0.7, 1.4)) if rng.random() < 0.3 else 0.0
    lock = 0.0
    if rng.random() < 0.2:
        sigma = float(rng.uniform(LOCKED_SIGMA, MOST_SIGMA))
        lock = min(0.9, float(slowest * rng.uniform(0.5, 1.4) / work[odd]))
    calls = [*np.delete(work, odd), *(work[odd] * part for part in (lock, 1.0 - lock) if part)]
    limit = max(slowest, model, lock * float(work[odd]))
    scale = max(SHORTEST_CALL_S / float(min(calls)), len(calls) / MOST_CALLS_PER_S / limit)
    stage_s = tuple(float(s) for s in work * scale)
    given = (stage_s, odd, lock, model * scale, tuple(map(int, workers)), tuple(map(int, windows)))
    return Drawn("torchdata", cpus, sum(stage_s), sigma, seed, *given)
