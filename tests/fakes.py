"""A pipeline, a machine and a training loop on a virtual clock: no test of the tuner's logic sleeps.

The pipeline is a fluid: it delivers at the rate of its slowest stage, of the machine's CPUs or of the model. Its
formulas are its own, so that the tuner's model is tested against something it did not compute itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.measure.window import Window
from intune_callbacks.pipelines.base import clamp
from intune_callbacks.record.history import Decision
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import (
    Allocation,
    Clock,
    Observation,
    PipelineStats,
    Resources,
    Stage,
    StageRates,
    StageStats,
)

MB = 1_000_000
GB = 1_000_000_000
MACHINE = Resources(cpus=8.0, memory_limit_bytes=64 * GB, memory_used_bytes=1 * GB)


@dataclass(frozen=True)
class Work:
    """What one worker stage costs, and where it starts.

    Args:
        service_s: wall seconds of one item on a machine with free CPUs and one worker.
        cpu_share: CPU seconds / wall seconds of an item.
        serial: share of the work only one worker can do at a time.
        cv: irregularity of the service times.
    """

    service_s: float
    cpu_share: float = 1.0
    serial: float = 0.0
    cv: float = 0.0
    items_per_batch: float = 1.0
    item_bytes: float = 1.0 * MB
    worker_bytes: float = 0.0
    workers: int = 1
    window: int = 4
    high: int = 64


@dataclass
class FakeMachine:
    """CPUs, memory and the time; change the fields while it runs."""

    cpus: float = 8.0
    memory_limit_bytes: int = 64 * GB
    memory_used_bytes: int = 1 * GB
    now_s: float = 100.0
    pipeline: FakePipeline | None = None

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now_s, cpu=lambda: 0.0)

    def read(self) -> Resources:
        held = self.pipeline.held_bytes() if self.pipeline is not None else 0.0
        return Resources(self.cpus, self.memory_limit_bytes, int(self.memory_used_bytes + held))


class FakePipeline:
    """Stages in a row, each an ordered pool with workers and a window, and a prefetcher of `depth` batches.

    Args:
        work: stage name -> what it costs.
        machine: whose clock, CPUs and memory it uses.
        depth: None leaves the prefetcher out.
    """

    def __init__(self, work: Mapping[str, Work], machine: FakeMachine, depth: int | None = None, seed: int = 0) -> None:
        self.work, self.machine = dict(work), machine
        machine.pipeline = self
        self.values: Allocation = {}
        for name, w in work.items():
            self.values |= {name: w.workers, f"{name}.window": w.window}
        if depth is not None:
            self.values["prefetch"] = depth
        self.resizes: list[Allocation] = []
        self.delivered = 0
        self._counts = {name: StageStats(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, w.window) for name, w in work.items()}
        self._started = dict.fromkeys(work, 0.0)
        self._full = dict.fromkeys(work, False)
        self._random = random.Random(seed)

    def stages(self) -> tuple[Stage, ...]:
        found = []
        for name, w in self.work.items():
            found.append(Stage(name, "cpu", "workers", 1, w.high, self.values[name]))
            window = self.values[f"{name}.window"]
            found.append(Stage(f"{name}.window", "memory", "items", 1, 1024, window, window_of=name))
        if "prefetch" in self.values:
            found.append(Stage("prefetch", "memory", "items", 1, 64, self.values["prefetch"]))
        return tuple(found)

    def stats(self) -> PipelineStats:
        stages = {
            name: replace(
                count,
                queued=self._queued(name),
                capacity=self.values[f"{name}.window"],
                item_bytes=self.work[name].item_bytes,
                worker_bytes=self.work[name].worker_bytes,
            )
            for name, count in self._counts.items()
        }
        return PipelineStats(self.machine.now_s, self.delivered, stages)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        self.resizes.append(dict(allocation))
        self.values |= clamp(allocation, self.stages())
        self.machine.now_s += 1e-4
        return dict(self.values)

    def close(self) -> None:
        pass

    def held_bytes(self) -> float:
        return sum(
            self._queued(name) * w.item_bytes + self.values[name] * w.worker_bytes for name, w in self.work.items()
        )

    def capacity(self, name: str, values: Mapping[str, int]) -> float:
        """Batches per second one stage could make on free CPUs."""
        w, n, window = self.work[name], values[name], values[f"{name}.window"]
        busy = min(n, window)
        # Measured with 32 workers and lognormal work: windows of 1, 2, 4 x the workers reached .56, .86, .98.
        in_line = 1.0 - 0.46 * w.cv * (busy / window) ** 1.8 if n > 1 else 1.0
        return busy * in_line / (w.items_per_batch * w.service_s * (1.0 + w.serial * (n - 1)))

    def cpu_capacity(self) -> float:
        work_s = sum(w.items_per_batch * w.service_s * w.cpu_share for w in self.work.values())
        return self.machine.cpus / work_s if work_s else math.inf

    def supply(self, values: Mapping[str, int] | None = None) -> float:
        """Batches per second the pipeline makes when the model takes all."""
        values = self.values | dict(values or {})
        return min([self.cpu_capacity(), *(self.capacity(name, values) for name in self.work)])

    def advance(self, batches_per_s: float, model_bound: bool) -> None:
        """Account for one delivered batch at this rate."""
        elapsed_s = 1.0 / batches_per_s
        able = {name: self.capacity(name, self.values) for name in self.work}
        slowest = min(able, key=lambda name: able[name])
        # All stages together want more CPUs than there are: the CPU part of each item takes longer.
        slowdown = max(1.0, able[slowest] / self.cpu_capacity()) if not model_bound else 1.0
        before = True
        for name, w in self.work.items():
            before = before and name != slowest
            self._started[name] += w.items_per_batch
            items = int(self._started[name]) - self._counts[name].items
            alone_s = w.service_s * (1.0 + w.serial * (self.values[name] - 1))
            size = 1.0
            if items and w.cv:
                sigma2 = math.log(1.0 + w.cv * w.cv / items)
                size = self._random.lognormvariate(-sigma2 / 2, math.sqrt(sigma2))
            mean_s = size * (alone_s + w.service_s * w.cpu_share * (slowdown - 1.0))
            busy_s = items * mean_s
            idle_s = max(0.0, self.values[name] * elapsed_s - busy_s)
            blocked = model_bound or before
            self._full[name] = blocked
            count = self._counts[name]
            self._counts[name] = replace(
                count,
                items=count.items + items,
                busy_s=count.busy_s + busy_s,
                busy_s2=count.busy_s2 + items * mean_s * mean_s * (1.0 + w.cv * w.cv),
                cpu_s=count.cpu_s + items * size * w.service_s * w.cpu_share,
                blocked_s=count.blocked_s + (idle_s if blocked else 0.0),
                starved_s=count.starved_s + (0.0 if blocked else idle_s),
            )
        self.delivered += 1

    def _queued(self, name: str) -> int:
        return self.values[f"{name}.window"] if self._full[name] else 0


@dataclass
class FakeLoop:
    """The training loop: takes batches as they come, needs `model_s` for each.

    Args:
        jitter: irregularity of the time between two batches.
        samples: samples in a batch.
    """

    pipeline: FakePipeline
    model_s: float = 0.0
    jitter: float = 0.05
    samples: int = 32
    seed: int = 1
    totals: StepTotals = field(default_factory=StepTotals)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._window = Window()

    @property
    def throughput(self) -> float:
        """Batches per second in the long run."""
        return min(self.pipeline.supply(), 1.0 / self.model_s if self.model_s else math.inf)

    def step(self) -> None:
        """Fetch and train one batch."""
        supply_s = 1.0 / self.pipeline.supply() * self._random.lognormvariate(0.0, self.jitter)
        period_s = max(self.model_s, supply_s)
        # Twice the supply leaves a reserve in the queues; short delays do not reach the trainer.
        wait_s = max(0.0, period_s - self.model_s)
        self.pipeline.machine.now_s += period_s
        self.pipeline.advance(1.0 / period_s, model_bound=wait_s <= 0.0)
        t = self.totals
        self.totals = StepTotals(
            t.steps + 1, t.wait_s + wait_s, t.model_s + self.model_s, t.paused_s, t.wall_s + period_s
        )

    def run(self, tuner: Tuner, seconds: float, until: Callable[[], bool] = lambda: False) -> list[Decision]:
        """Train under `tuner` and return its decisions of that stretch."""
        end_s = self.pipeline.machine.now_s + seconds
        first = len(self.decisions)
        while self.pipeline.machine.now_s < end_s and not until():
            self.step()
            decision = tuner.batch(self.totals, self.samples)
            if decision is not None:
                self.decisions.append(decision)
        return self.decisions[first:]

    def observe(self, batches: int = 30) -> Observation:
        """Train some batches without a tuner and return the observation."""
        pipeline = self.pipeline
        self._window.restart(self.totals, self.totals.steps * self.samples, pipeline.stats())
        for _ in range(batches):
            self.step()
        totals = self.totals
        return self._window.observe(
            totals,
            totals.steps * self.samples,
            pipeline.stats(),
            pipeline.stages(),
            pipeline.machine.read(),
        )


def best_static(pipeline: FakePipeline, windows_per_worker: int = 6) -> float:
    """Return the largest supply any allocation within the CPU budget reaches, by greedy growth of the slowest stage.

    Within the budget of the guard (all workers busy: CPUs plus one per stage); every window as wide as it helps.
    """
    values = dict.fromkeys(pipeline.work, 1)

    def full(workers: Mapping[str, int]) -> Allocation:
        return dict(workers) | {f"{name}.window": windows_per_worker * n for name, n in workers.items()}

    def busy(workers: Mapping[str, int]) -> float:
        return sum(n * pipeline.work[name].cpu_share for name, n in workers.items())

    best = pipeline.supply(full(values))
    while True:
        slowest = min(values, key=lambda name: pipeline.capacity(name, full(values)))
        values[slowest] += 1
        if values[slowest] > pipeline.work[slowest].high or busy(values) > pipeline.machine.cpus + len(values):
            return best
        best = max(best, pipeline.supply(full(values)))


def observation(stages: Sequence[Stage], resources: Resources = MACHINE, **changes: object) -> Observation:
    """Return an observation of nothing but these stages; any field can be given."""
    base = Observation(100, 100.0, 1.0, 10, 320, 10.0, 320.0, 0.5, 0.05, tuple(stages), {}, resources)
    return replace(base, **changes)  # type: ignore[arg-type]


def seen(current: int = 4, wait: float = 0.8, **more: Any) -> Observation:
    """Return an observation of one stage `load`; any field can be given, and rates and start-up time of the stage."""
    rates = more.pop("rates", StageRates(100, 1.0, 0.1, 0.001, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    stage = Stage("load", "cpu", "workers", 0, 64, current, startup_s=more.pop("startup_s", 0.0))
    known = {"wait_frac": wait, "remaining_s": 600.0, "latency_s": 0.1, "rates": {"load": rates}}
    return observation((stage,), **(known | more))
