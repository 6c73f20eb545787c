"""The values that cross module borders: frozen, with the unit in the name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = [
    "Allocation", "Clock", "Hint", "Observation", "Pipeline", "PipelineStats", "Policy", "Probe", "Proposal",
    "Resources", "Stage", "StageRates", "StageStats",
]  # fmt: skip

Allocation = dict[str, int]
"""Stage name -> value in that stage's unit."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks everything is measured with, replaceable so that logic is tested without sleeping.

    Args:
        wall: seconds, monotonic, the same for all threads.
        cpu: CPU seconds consumed by the calling thread.
    """

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time


@dataclass(frozen=True, slots=True)
class Stage:
    """One number of a running pipeline that can be changed.

    Args:
        name: unique within the pipeline; a window carries the name of its worker stage plus ``.window``.
        kind: ``cpu`` and ``io`` stages hold workers, ``memory`` stages hold buffered items.
        unit: what `current` counts.
        low: smallest value it accepts, 0: the training loop computes; the present one where it would not rise again.
        high: largest value it accepts.
        current: the value now.
        sequential: True when it cannot be replicated (then ``low == high``).
        window_of: for a window, the name of the worker stage whose finished results it bounds.
        when: a change acts ``now``, between two batches, or with the next ``epoch``, or is the ``user``'s to make.
        knob: how the user writes the value, ``DataLoader(num_workers={})``; of a window one more argument, per worker
            (``prefetch_factor={}``) or in all (``={total}``). Behind a ``#``: a remark or, alone, who wrote it.
        startup_s: seconds the training loop waits for each worker at each epoch's start; 0 where it waits for none.
        once_s: the same at the start of the run, where workers live on from one epoch to the next.
        delivering: workers that deliver, where they own shards: none that ended without a batch; None while unknown.
        threads: that it shares with all stages that have this number; None where each worker has its own.
    """

    name: str
    kind: Literal["cpu", "io", "memory"]
    unit: Literal["workers", "items", "MiB"]
    low: int
    high: int
    current: int
    sequential: bool = False
    window_of: str | None = None
    when: Literal["now", "epoch", "user"] = "now"
    knob: str = ""
    startup_s: float = 0.0
    once_s: float = 0.0
    delivering: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """One oddity of the user's pipeline, seen without running it or while it ran.

    Args:
        what: one plain sentence with the numbers, such as ``interleave has 8 workers for 3 files``.
        line: what the user would write instead; empty where nothing can be pasted.
        kind: ``files``, ``shuffle``, ``prefetch``, ``workers``, ``loader``, ``ahead``, ``order``, ``shards``,
            ``left``, ``changing``, ``generator``, ``serial`` or ``cluster``.
        stage: the stage it is about, empty for the whole pipeline.
    """

    what: str
    line: str = ""
    kind: str = "loader"
    stage: str = ""


@dataclass(frozen=True, slots=True)
class StageStats:
    """Monotonic counters of one worker stage since it started; take differences.

    Args:
        items: results computed.
        busy_s: wall seconds its workers spent computing, summed over workers.
        busy_s2: sum of squares of the single computing times, in s^2 (gives their irregularity).
        cpu_s: CPU seconds of `busy_s`.
        starved_s: worker seconds spent waiting for input.
        blocked_s: worker seconds spent waiting for room in the window.
        queued: finished results waiting for the consumer, now.
        capacity: the window, now (the largest `queued` can be).
        item_bytes: mean size of one result in bytes, 0.0 while unknown.
        worker_bytes: memory one more worker costs in bytes, 0.0 while unknown or for threads.
        held_s: seconds the consumer waited for one result while later ones were finished, 0.0 where that is not known.
    """

    items: int
    busy_s: float
    busy_s2: float
    cpu_s: float
    starved_s: float
    blocked_s: float
    queued: int
    capacity: int
    item_bytes: float = 0.0
    worker_bytes: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Counters of a whole pipeline at one moment.

    Args:
        at_s: wall clock of the reading, in seconds.
        delivered: batches handed to the training loop since the start.
        stages: worker stage name -> its counters.
    """

    at_s: float
    delivered: int
    stages: Mapping[str, StageStats]


@runtime_checkable
class Pipeline(Protocol):
    """What every adapter implements: look at the stages, read the counters, change the numbers.

    `resize` is called between two batches, takes any subset of the stages, clamps to each one's ``low``..``high``,
    returns what is in force for *all* stages, never blocks longer than a step, loses, repeats or reorders an item or
    raises into the training.
    """

    def stages(self) -> tuple[Stage, ...]: ...
    def stats(self) -> PipelineStats: ...
    def resize(self, allocation: Mapping[str, int]) -> Allocation: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Resources:
    """What the machine gives this process right now.

    Args:
        cpus: CPUs the input pipeline may use: min(affinity, cgroup quota) / local ranks - what the trainer needs.
        memory_limit_bytes: the container's or machine's memory limit.
        memory_used_bytes: memory in use against that limit.
        shm_free_bytes: free bytes in /dev/shm; None where there is none.
        gpu_utilisation: 0..1, None without a driver.
        cpus_idle: CPUs nobody used since the last reading, whoever might have; None where that is not known.
        local_ranks: training processes that share this memory and grow alike.
        trainer_cpus: CPUs left to the training loop, which has no use for them while it waits.
        remote_cpus: CPUs of other machines that this rank's input may use.
    """

    cpus: float
    memory_limit_bytes: int
    memory_used_bytes: int
    shm_free_bytes: int | None = None
    gpu_utilisation: float | None = None
    cpus_idle: float | None = None
    local_ranks: int = 1
    trainer_cpus: float = 0.0
    remote_cpus: float = 0.0


class Probe(Protocol):
    """Where `Resources` come from: the real machine, or an emulated one."""

    def read(self) -> Resources: ...


@dataclass(frozen=True, slots=True)
class StageRates:
    """One worker stage over one decision window.

    Args:
        items: results computed in the window.
        items_per_batch: results this stage makes for one delivered batch.
        service_s: mean wall seconds one worker takes for one item.
        service_cpu_s: CPU seconds of `service_s`.
        service_cv: coefficient of variation of the single service times.
        busy_frac: share of the workers' time spent computing, 0..1.
        starved_frac: share spent waiting for input, 0..1.
        blocked_frac: share spent waiting for room in the window, 0..1.
        queue_fill: queued / capacity at the end of the window, 0..1.
        item_bytes: mean bytes of one result.
        worker_bytes: bytes one more worker costs.
        stored: results by which `queued` grew in the window, negative where it shrank.
        held_frac: share of the window in which the consumer waited for one result while later ones were finished, 0..1.
    """

    items: int
    items_per_batch: float
    service_s: float
    service_cpu_s: float
    service_cv: float
    busy_frac: float
    starved_frac: float
    blocked_frac: float
    queue_fill: float
    item_bytes: float
    worker_bytes: float
    stored: int = 0
    held_frac: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """All a policy may look at for one decision.

    Args:
        step: batches seen by the training loop so far.
        at_s: wall clock, seconds.
        elapsed_s: its length, seconds, without pauses (validation, checkpoints), with its share of epoch starts.
        batches: batches delivered in the window.
        samples: samples delivered in the window.
        batches_per_s: delivered batches / `elapsed_s`.
        samples_per_s: delivered samples / `elapsed_s`.
        wait_frac: share of the window the training loop was blocked waiting for data, 0..1.
        model_s: mean seconds per batch outside that wait.
        stages: the pipeline's stages with their current values.
        rates: worker stage name -> its rates over the window.
        resources: the machine now.
        latency_s: pipeline latency, mean seconds per batch spent blocked in the fetch.
        exposed_wait_frac: share of the window the GPU was idle for want of data; None without a GPU.
        seam_s: the part of `elapsed_s` for starts of epochs: making the iterator, starting workers, first fetch.
        epoch_batches: batches of one epoch; None while unknown or without end.
        remaining_s: seconds the training is expected to go on; None while unknown.
        may_change: False where it is too early for a change to pay: only a policy's `measured` is given such a window.
        lent_cpus: CPUs of the training loop that the input can count on, because the loop will go on waiting.
    """

    step: int
    at_s: float
    elapsed_s: float
    batches: int
    samples: int
    batches_per_s: float
    samples_per_s: float
    wait_frac: float
    model_s: float
    stages: tuple[Stage, ...]
    rates: Mapping[str, StageRates]
    resources: Resources
    latency_s: float = 0.0
    exposed_wait_frac: float | None = None
    seam_s: float = 0.0
    epoch_batches: int | None = None
    remaining_s: float | None = None
    may_change: bool = True
    lent_cpus: float = 0.0

    @property
    def cpus(self) -> float:
        """CPUs the input can count on."""
        return self.resources.cpus + self.resources.remote_cpus + self.lent_cpus

    @property
    def allocation(self) -> Allocation:
        """The current value of every stage."""
        return {stage.name: stage.current for stage in self.stages}


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a policy wants.

    Args:
        allocation: stage name -> wanted value; stages left out stay as they are.
        reason: one plain sentence for the history and the report.
        settled: True while the policy holds what it found.
    """

    allocation: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    settled: bool = False


class Policy(Protocol):
    """Chooses an allocation from an observation; keeps its own memory; knows nothing of frameworks."""

    name: str

    def decide(self, observation: Observation) -> Proposal: ...

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        """Learn that `failed` was left, measured to give only `ratio` times what the best allocation gave."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
