"""Machines that stand against a tuner: what it does cannot be undone, what it reads is wrong, what it sees passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from intune_callbacks.decide.view import Bools, Floats, Ints, View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.flow import Flow, flow
from intune_callbacks.pretrain.machines import Machines, log_uniform

__all__ = ["EPOCH", "KINDS", "Hostile", "HostileEnv", "draw"]

KINDS = ("sticky", "lies", "stalls", "seams", "neighbours")
EPOCH = 10
"""Batches of an epoch where epochs are short. A choice: then its start is a large part of it."""
STALLED = 0.01
"""Share of the throughput that is left in a stall. A choice: nearly none, but a rate all the same."""
LEAST_CPUS = 1.0
"""What neighbours leave at least: with none nothing would be measured."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """What stands against a tuner on N machines; [N] or [N, stages].

    Args:
        sticky: workers that were taken away do not come back, and none are added; the numbers say otherwise.
        wrong_s, wrong_cpu: factors on the service times and the CPU shares that are read.
        stall: probability per decision that a stall begins.
        stall_for: decisions it lasts.
        seam_s: seconds each worker takes to start, at every start of an epoch of `EPOCH` batches.
        neighbours: probability per decision that others come, or go.
        taken: share of the CPUs they take; `cpus` does not say so.
    """

    sticky: Bools
    wrong_s: Floats
    wrong_cpu: Floats
    stall: Floats
    stall_for: Ints
    seam_s: Floats
    neighbours: Floats
    taken: Floats

    def take(self, index: Ints) -> Hostile:
        """Return those of the machines of `index`."""
        return Hostile(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def draw(
    machines: Machines, rng: np.random.Generator, share: float = 1.0, kinds: Collection[str] | None = None
) -> Hostile:
    """Draw what stands against a tuner: each kind on a third of the hostile machines, or those given on all of them.

    Args:
        share: of the machines that are hostile at all.
        kinds: some of `KINDS`.
    """
    n, shape = len(machines), machines.mask.shape
    chosen = rng.random(n) < share
    has = {name: chosen & (rng.random(n) < 1.0 / 3.0) for name in KINDS}
    if kinds is not None:
        has = {name: chosen & (name in kinds) for name in KINDS}
    # Of the sticky machines every stage but one may be sound.
    sticky = rng.random(shape) < 0.5
    sticky[np.arange(n), rng.integers(0, np.maximum(machines.mask.sum(1), 1))] = True
    lies, stalls = has["lies"][:, None], has["stalls"]
    batch_s = 1.0 / machines.nominal_rate
    return Hostile(
        sticky=sticky & machines.mask & has["sticky"][:, None],
        wrong_s=np.where(lies, log_uniform(rng, 0.3, 3.0, shape), 1.0),
        wrong_cpu=np.where(lies, rng.uniform(0.1, 1.0, shape), 1.0),
        stall=np.where(stalls, rng.uniform(0.005, 0.03, n), 0.0),
        stall_for=rng.integers(20, 61, n),
        seam_s=np.where(has["seams"], log_uniform(rng, 0.1, 3.0, n) * EPOCH * batch_s / machines.cpus, 0.0),
        neighbours=np.where(has["neighbours"], rng.uniform(0.02, 0.1, n), 0.0),
        taken=rng.uniform(0.2, 0.8, n),
    )


class HostileEnv(Env):
    """Steps machines, some of which are hostile."""

    def __init__(
        self,
        machines: Machines,
        rng: np.random.Generator,
        sizes: Mapping[int, Floats | float] | None = None,
        *,
        hostile: Hostile,
        mixed: bool = False,
    ) -> None:
        count = len(machines)
        self.hostile = hostile
        self._stalled: Ints = np.zeros(count, int)
        self._crowded: Bools = np.zeros(count, bool)
        self._real = np.full(machines.mask.shape, np.inf)
        self.shaken: Bools = np.zeros(count, bool)
        """Machines that stall, or where others came or went, in this decision."""
        super().__init__(machines, rng, sizes, mixed=mixed)
        # Split off last: what is not hostile goes as it does in `Env`.
        self._chance = rng.spawn(1)[0]

    def step(self, value: Floats, window: Floats | None = None) -> View:
        """Do as `Env`, after neighbours moved and stalls went on."""
        h, rng, count = self.hostile, self._chance, len(self)
        begins = (self._stalled == 0) & (rng.random(count) < h.stall)
        moves = rng.random(count) < h.neighbours
        ends = self._stalled == 1
        self._stalled = np.where(begins, h.stall_for, np.maximum(self._stalled - 1, 0))
        self._crowded = self._crowded ^ moves
        self.shaken = begins | ends | moves | (self._stalled > 0)
        return super().step(value, window)

    def delivered(self, workers: Floats, windows: Floats, buffer: Floats, rows: Ints | None = None) -> Flow:
        """Return what allocations really give now; arguments as for `Env.delivered`."""
        every = np.arange(len(self)) if rows is None else rows
        m, h = self.machines.take(every), self.hostile.take(every)
        real = np.where(h.sticky[:, None], np.minimum(workers, self._real[every][:, None]), workers)
        cpus = np.maximum(self.cpus * np.where(self._crowded, 1.0 - self.hostile.taken, 1.0), LEAST_CPUS)[every]
        now = flow(m, self.work_s[every], real, windows, buffer, cpus)
        per_batch_s = h.seam_s[:, None] * workers.sum(-1) / EPOCH
        slow = np.where(self._stalled[every] > 0, STALLED, 1.0)[:, None]
        return replace(now, rate=slow / (1.0 / now.rate + per_batch_s), supply=slow / (1.0 / now.supply + per_batch_s))

    def _measure(self, lost: Floats) -> tuple[View, Floats]:
        self._real = np.where(self.hostile.sticky, np.minimum(self._real, self.workers), self.workers)
        view, used = super()._measure(lost)
        wrong_s, wrong_cpu = np.ones(view.value.shape), np.ones(view.value.shape)
        wrong_s[:, :-1], wrong_cpu[:, :-1] = self.hostile.wrong_s, self.hostile.wrong_cpu
        return replace(view, work_s=view.work_s * wrong_s, cpu_share=view.cpu_share * wrong_cpu), used

    def _restart(self, out: Bools) -> None:
        super()._restart(out)
        self._real[out] = self.workers[out]
