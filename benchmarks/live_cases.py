"""The pipelines of the live benchmark on an emulated machine, and the plain training loop that consumes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from benchmarks.emulated import SHARES, VirtualMachine, irregular
from intune_callbacks.monitor.wait import StepTimer
from intune_callbacks.pipelines.find import LiveLoader, find
from intune_callbacks.tuner import Tuner
from intune_callbacks.types import Allocation, Stage

__all__ = ["PIPELINES", "Case", "Delivery", "Live", "Measured", "even_start"]

PIPELINES = ("torchdata", "dataloader")
ENDLESS = 1 << 30
DATALOADER_BATCH = 2
FETCH_SAMPLES = 1
BALANCED = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline on one machine.

    Args:
        pipeline: one of `PIPELINES`.
        cpus: virtual CPUs.
        work_s: CPU seconds of one batch of mean cost, all stages together.
        sigma: irregularity of the udf stage (of the whole item in the DataLoader), see `irregular`.
        seed: of the irregularity.
    """

    pipeline: str
    cpus: int
    work_s: float
    sigma: float
    seed: int

    @property
    def fluid_limit(self) -> float:
        """Batches per second if every CPU were busy all the time."""
        return self.cpus / self.work_s

    def batch_work_s(self, batch: int) -> float:
        """Return the CPU seconds that batch number `batch` really takes."""
        if self.pipeline == "torchdata":
            udf = SHARES["udf"] * irregular(self.seed, batch, self.sigma)
            return self.work_s * (sum(SHARES.values()) - SHARES["udf"] + udf)
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


class Work:
    """The map function of one torchdata stage: holds a virtual CPU and passes the item on."""

    def __init__(self, case: Case, machine: VirtualMachine, stage: str) -> None:
        self.case, self.machine, self.stage, self.__name__ = case, machine, stage, stage
        self.seconds = case.work_s * SHARES[stage]
        self.sigma = case.sigma if stage == "udf" else 0.0

    def __call__(self, item: int) -> int:
        self.machine.compute(self.stage, self.seconds * irregular(self.case.seed, item, self.sigma))
        return item


class Items(Dataset[int]):
    """A map-style dataset whose every item costs virtual CPU time."""

    def __init__(self, case: Case, machine: VirtualMachine) -> None:
        self.case, self.machine = case, machine

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, item: int) -> int:
        seconds = self.case.work_s / DATALOADER_BATCH
        self.machine.compute("item", seconds * irregular(self.case.seed, item, self.case.sigma))
        return item


def even_start(case: Case) -> dict[str, int]:
    """Return the workers each torchdata stage starts with: the CPUs divided evenly."""
    each, rest = divmod(case.cpus, len(SHARES))
    return {stage: max(1, each + (i < rest)) for i, stage in enumerate(SHARES)}


@dataclass
class Live:
    """A running pipeline with its training loop.

    Args:
        case: what to build.
        tuned: False leaves the pipeline as the framework made it.
    """

    case: Case
    tuned: bool = True
    machine: VirtualMachine = field(init=False)
    deliveries: list[Delivery] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = self.case
        self.machine = VirtualMachine(case.cpus)
        loader: Any = self._torchdata() if case.pipeline == "torchdata" else self._dataloader()
        self.pipeline: LiveLoader | None = None
        if self.tuned:
            found = find(loader, clock=self.machine.clock, workers_kind="thread")
            if found.pipeline is None:
                raise RuntimeError(f"nothing to tune in {case}: {found.why}")
            self.pipeline = found.pipeline
            self.pipeline.prepare()
        self._iterator: Iterator[Any] = iter(loader)
        if self.pipeline is not None:
            self._iterator = self.pipeline.adopt(self._iterator)
        self._timer = StepTimer(self.machine.clock)
        self._started = time.perf_counter()

    @classmethod
    def stages(cls, case: Case) -> tuple[Stage, ...]:
        """Return the stages a live pipeline of `case` has."""
        live = cls(case)
        assert live.pipeline is not None
        try:
            return live.pipeline.stages()
        finally:
            live.close()

    def _torchdata(self) -> Loader[int]:
        node: Any = IterableWrapper(range(ENDLESS))
        for stage, workers in even_start(self.case).items():
            node = ParallelMapper(node, Work(self.case, self.machine, stage), num_workers=workers)
        return Loader(node)

    def _dataloader(self) -> DataLoader[int]:
        return DataLoader(Items(self.case, self.machine), batch_size=DATALOADER_BATCH)

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
            self._step(tuner)

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
            self._step(tuner)
        batches, computed = work / self.case.work_s, used.asked_s / self.case.work_s
        return Measured(batches / used.at_s, computed / used.at_s, used.utilisation, used.sleep_inflation)

    def _step(self, tuner: Tuner | None) -> None:
        self._timer.fetch_begin()
        next(self._iterator)
        self._timer.fetch_end()
        batch = len(self.deliveries)
        self.deliveries.append(Delivery(self.elapsed_s, self.case.batch_work_s(batch)))
        if tuner is not None:
            tuner.batch(self._timer.read(), FETCH_SAMPLES)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        """Set a fixed allocation by hand."""
        if self.pipeline is None:
            raise RuntimeError("this pipeline is the stock one: it cannot be resized")
        return self.pipeline.resize(allocation)

    def close(self) -> None:
        """Stop all workers."""
        if self.pipeline is not None:
            self.pipeline.close()
