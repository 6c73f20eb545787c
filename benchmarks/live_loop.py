"""A plain training loop over a live pipeline on an emulated machine, and what it measures; knows no framework."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.emulated import SHAPES, VirtualMachine, irregular
from intune_callbacks.measure.wait import StepTimer
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation, Pipeline

__all__ = [
    "DATALOADER_BATCH",
    "ENDLESS",
    "Case",
    "Delivery",
    "Loop",
    "Measured",
    "decisions_to",
    "seconds_to",
]

ENDLESS = 1 << 30
DATALOADER_BATCH = 2
FETCH_SAMPLES = 1
BALANCED = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline on one machine.

    Args:
        pipeline: ``torchdata`` or ``tfdata`` with the stages of its shape, or ``dataloader``.
        cpus: virtual CPUs.
        work_s: CPU seconds of one batch of mean cost, all stages together.
        sigma: irregularity of the udf stage (of the whole item in the DataLoader), see `irregular`.
        seed: of the irregularity.
        shape: of `SHAPES`: the stages and their shares of the work.
    """

    pipeline: str
    cpus: int
    work_s: float
    sigma: float
    seed: int
    shape: str = field(default="criteo", kw_only=True)

    @property
    def shares(self) -> dict[str, float]:
        """Each stage's share of the work."""
        return SHAPES[self.shape]

    @property
    def fluid_limit(self) -> float:
        """Batches per second if every CPU were busy all the time."""
        return self.cpus / self.work_s

    def stage_work_s(self, stage: str, batch: int) -> float:
        """Return the CPU seconds that batch number `batch` takes in a stage."""
        factor = irregular(self.seed, batch, self.sigma) if stage == "udf" else 1.0
        return self.work_s * self.shares[stage] * factor

    def batch_work_s(self, batch: int) -> float:
        """Return the CPU seconds that batch number `batch` really takes."""
        if self.pipeline != "dataloader":
            return sum(self.stage_work_s(stage, batch) for stage in self.shares)
        items = range(batch * DATALOADER_BATCH, (batch + 1) * DATALOADER_BATCH)
        return self.work_s / DATALOADER_BATCH * sum(irregular(self.seed, item, self.sigma) for item in items)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch handed to the training loop: when, and how much CPU work it stood for."""

    at_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Throughput over one stretch of training.

    Args:
        delivered: batches of mean work delivered per second. The cost of every batch is known, so the luck of the
            draw is taken out: a stretch that drew expensive batches does not count as slow.
        computed: the same from the work computed: larger while buffers fill, smaller while they drain.
        utilisation: share of the virtual CPUs that was busy.
        sleep_inflation: how much longer the host slept than told.
    """

    delivered: float
    computed: float
    utilisation: float
    sleep_inflation: float

    @property
    def throughput(self) -> float:
        """The smaller of both, so that neither filling nor draining buffers count as speed."""
        return min(self.delivered, self.computed)


class Loop:
    """A training loop whose model takes no time.

    Args:
        case: what the batches cost.
        machine: the emulated machine.
        pipeline: the live pipeline, None for a stock one.
        iterator: the batches; each is its number in the data.
    """

    def __init__(
        self, case: Case, machine: VirtualMachine, pipeline: Pipeline | None, iterator: Iterator[object]
    ) -> None:
        self.case, self.machine, self.pipeline = case, machine, pipeline
        self.deliveries: list[Delivery] = []
        self._iterator = iterator
        self._timer = StepTimer(machine.clock)
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the pipeline was built, the clock of the deliveries."""
        return time.perf_counter() - self._started

    def train(self, seconds: float, tuner: Tuner | None = None) -> None:
        """Consume batches for `seconds`; the tuner is asked at every batch, as the callback would.

        Args:
            seconds: how long.
            tuner: None for a fixed allocation.
        """
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.step(tuner)

    def measure(self, seconds: float, tuner: Tuner | None = None) -> Measured:
        """Train for `seconds`, at most twice as long, and return the throughput of that stretch.

        One slow batch can hold back a whole window of finished ones, so the stretch ends once about as much was
        delivered as was computed: neither what the line held before nor what it holds after counts.
        """
        before, first = self.machine.usage(), len(self.deliveries)
        self.train(seconds, tuner)
        while True:
            used = self.machine.usage().since(before)
            work = sum(delivery.work_s for delivery in self.deliveries[first:])
            if abs(work - used.asked_s) <= BALANCED * used.asked_s or used.at_s >= 2 * seconds:
                break
            self.step(tuner)
        batches, computed = work / self.case.work_s, used.asked_s / self.case.work_s
        return Measured(batches / used.at_s, computed / used.at_s, used.utilisation, used.sleep_inflation)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        """Set a fixed allocation by hand."""
        if self.pipeline is None:
            raise RuntimeError("this pipeline is the stock one: it cannot be resized")
        return self.pipeline.resize(allocation)

    def close(self) -> None:
        """Stop all workers."""
        if self.pipeline is not None:
            self.pipeline.close()

    def step(self, tuner: Tuner | None) -> None:
        """Consume one batch; see `train`."""
        self._timer.fetch_begin()
        batch = self._batch(next(self._iterator))
        self._timer.fetch_end()
        self.deliveries.append(Delivery(self.elapsed_s, self.case.batch_work_s(batch)))
        if tuner is not None:
            tuner.batch(self._timer.read(), FETCH_SAMPLES)

    def _batch(self, item: object) -> int:
        """Return which batch of the data was delivered; in order, that is how many there were before it."""
        return len(self.deliveries)


def seconds_to(
    target: float, deliveries: Sequence[Delivery], begin: float, work_s: float, window_s: float
) -> float | None:
    """Return the seconds from `begin` until the throughput over the next `window_s` first reaches `target`.

    Args:
        target: batches of mean work per second.
        deliveries: in the order of time.
        begin: seconds, on the clock of the deliveries.
        work_s: CPU seconds of a batch of mean work.
        window_s: length of the stretch that is judged; its end is what is returned.
    """
    later = [delivery for delivery in deliveries if delivery.at_s >= begin]
    first, work = 0, 0.0
    for delivery in later:
        work += delivery.work_s
        while delivery.at_s - later[first].at_s > window_s:
            work -= later[first].work_s
            first += 1
        if delivery.at_s - begin >= window_s and work / work_s / window_s >= target:
            return delivery.at_s - begin
    return None


def decisions_to(
    target: float, deliveries: Sequence[Delivery], decided: Sequence[int], begin: float, work_s: float, window_s: float
) -> int | None:
    """Return the decisions before the stretch begins whose end `seconds_to` returns; None if there is no such stretch.

    Args:
        target: batches of mean work per second.
        deliveries: in the order of time.
        decided: batches delivered before each decision.
        begin: of the run, in seconds, on the clock of the deliveries.
        work_s: CPU seconds of a batch of mean work.
        window_s: length of the stretch that is judged.
    """
    reached = seconds_to(target, deliveries, begin, work_s, window_s)
    if reached is None:
        return None
    return sum(deliveries[step - 1].at_s <= begin + reached - window_s for step in decided)
