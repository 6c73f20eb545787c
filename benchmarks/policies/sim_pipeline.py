"""One simulated machine as a pipeline and a probe on a virtual clock, so that the real tuner runs on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.policies.observe import MEMORY_BYTES, arrays, name_of, resources, stages, workers_in
from intune_callbacks.decide.view import Floats, View
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.pipelines.base import clamp
from intune_callbacks.pretrain.hostile import EPOCH, KINDS, HostileEnv, draw
from intune_callbacks.pretrain.machines import Machines
from intune_callbacks.types import Allocation, Clock, PipelineStats, Resources, Stage, StageStats

__all__ = ["SimPipeline"]

DECISION_S = 1.0


class SimPipeline:
    """A pipeline, its machine and the training loop that takes its batches; time passes only in `step`.

    A decision of the environment is a second of the virtual clock: so often the work drifts and noise is drawn anew. A
    resize begins a new one at once, and that one pays for it.

    Args:
        machine: a single machine.
        seed: of drift and noise.
        sizes: second -> factor on the machine's first number of CPUs.
        hostile: what stands against a tuner, some of `hostile.KINDS`. With ``seams`` each epoch of `hostile.EPOCH`
            batches begins with the start of the workers, one after another, before its first batch.

    Raises:
        ValueError: when there is not exactly one machine, or no such kind.
    """

    def __init__(
        self,
        machine: Machines,
        seed: int = 0,
        sizes: Mapping[int, float] | None = None,
        *,
        hostile: Collection[str] = (),
    ) -> None:
        if len(machine) != 1:
            raise ValueError(f"{len(machine)} machines given, expected 1: use machines.take(slice(i, i + 1))")
        if unknown := set(hostile) - set(KINDS):
            raise ValueError(f"hostile={sorted(unknown)}: expected some of {', '.join(KINDS)}")
        against = draw(machine, np.random.default_rng([seed, 1]), kinds=hostile)
        self.seam_s = float(against.seam_s[0])
        """Seconds each worker takes to start, at the beginning of every epoch."""
        rng, against = np.random.default_rng(seed), replace(against, seam_s=np.zeros(1))
        self._env = HostileEnv(machine, rng, sizes, hostile=against)
        self._now_s, self._next_s = 0.0, DECISION_S
        self._totals = StepTotals()
        self._slots = {name_of(slot): slot for slot in workers_in(self._view, 0)}
        self._counts = {name: StageStats(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0) for name in self._slots}
        self.clock = Clock(wall=lambda: self._now_s, cpu=lambda: 0.0)

    @property
    def rate(self) -> float:
        """Batches per second the present allocation gives in the long run, starts of epochs included, free of noise."""
        rate = float(self._env.steady_rate[0])
        return 1.0 / (1.0 / max(rate, 1e-12) + self._startup_s / EPOCH)

    def step(self) -> StepTotals:
        """Fetch and train one batch, and return the totals of the training loop.

        Raises:
            MemoryError: when the machine ran out of memory.
        """
        left, begin_s = 1.0, self._now_s
        if self._totals.steps % EPOCH == 0:
            self._now_s += self._startup_s
        while self._now_s + left / self._rate > self._next_s:
            left -= (self._next_s - self._now_s) * self._rate
            self._now_s = self._next_s
            self._apply(self._view.value, self._view.window)
        self._now_s += left / self._rate
        passed_s = self._now_s - begin_s
        self._count(passed_s)
        model_s = min(passed_s, 1.0 / float(self._view.demand[0]))
        t = self._totals
        self._totals = StepTotals(
            t.steps + 1, t.wait_s + passed_s - model_s, t.model_s + model_s, t.paused_s, t.wall_s + passed_s
        )
        return self._totals

    def stages(self) -> tuple[Stage, ...]:
        found = stages(self._view, 0)
        if not self.seam_s:
            return found
        return tuple(replace(stage, startup_s=self.seam_s) if stage.unit == "workers" else stage for stage in found)

    def stats(self) -> PipelineStats:
        return PipelineStats(self._now_s, self._totals.steps, {n: self._reading(n) for n in self._slots})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        value, window = arrays(wanted, self._view, 0)
        if (value != self._view.value[0]).any() or (window != self._view.window[0]).any():
            self._apply(value[None], window[None])
        return {stage.name: stage.current for stage in self.stages()}

    def close(self) -> None:
        pass

    def read(self) -> Resources:
        """Return what the machine has: this is its own probe."""
        return resources(self._view, 0)

    @property
    def _startup_s(self) -> float:
        return self.seam_s * sum(stage.current for stage in self.stages() if stage.unit == "workers")

    @property
    def _view(self) -> View:
        return self._env.view

    @property
    def _rate(self) -> float:
        return float(self._view.rate[0])

    def _apply(self, value: Floats, window: Floats) -> None:
        """Begin a second with this allocation."""
        self._env.step(value, window)
        self._next_s = self._now_s + DECISION_S
        if self._env.ran_out[0]:
            wanted = f"workers {value[0, :-1].astype(int).tolist()}, buffer {value[0, -1]:.0f}"
            raise MemoryError(f"the simulated machine ran out of memory after {self._now_s:.0f} s: {wanted}")

    def _count(self, elapsed_s: float) -> None:
        """Add one batch to the counters: what the workers did not compute they waited, for input or for room."""
        view = self._view
        for name, slot in self._slots.items():
            busy_s, cv, fill = (float(of[0, slot]) for of in (view.work_s, view.cv, view.fill))
            idle_s = max(0.0, float(view.value[0, slot]) * elapsed_s - busy_s)
            before = self._counts[name]
            self._counts[name] = replace(
                before,
                items=before.items + 1,
                busy_s=before.busy_s + busy_s,
                busy_s2=before.busy_s2 + busy_s * busy_s * (1.0 + cv * cv),
                cpu_s=before.cpu_s + busy_s * float(view.cpu_share[0, slot]),
                starved_s=before.starved_s + idle_s * (1.0 - fill),
                blocked_s=before.blocked_s + idle_s * fill,
            )

    def _reading(self, name: str) -> StageStats:
        view, slot = self._view, self._slots[name]
        window = int(view.window[0, slot])
        return replace(
            self._counts[name],
            queued=int(view.fill[0, slot] * window),
            capacity=window,
            item_bytes=float(view.item_memory[0, slot]) * MEMORY_BYTES,
            worker_bytes=float(view.unit_memory[0, slot]) * MEMORY_BYTES,
        )
