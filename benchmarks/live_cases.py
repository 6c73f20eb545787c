"""The torch pipelines of the live benchmark on an emulated machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from benchmarks.emulated import VirtualMachine, irregular
from benchmarks.live_loop import DATALOADER_BATCH, ENDLESS, Case, Loop, even_start
from intune_callbacks.pipelines.base import LiveLoader
from intune_callbacks.pipelines.find import find
from intune_callbacks.types import Stage

__all__ = ["PIPELINES", "Live"]

PIPELINES = ("torchdata", "dataloader")


class Work:
    """The map function of one torchdata stage: holds a virtual CPU and passes the item on."""

    def __init__(self, case: Case, machine: VirtualMachine, stage: str) -> None:
        self.case, self.machine, self.stage, self.__name__ = case, machine, stage, stage

    def __call__(self, item: int) -> int:
        self.machine.compute(self.stage, self.case.stage_work_s(self.stage, item))
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


class Live(Loop):
    """A running torch pipeline with its training loop.

    Args:
        case: what to build.
        tuned: False leaves the pipeline as the framework made it.
    """

    pipeline: LiveLoader | None

    def __init__(self, case: Case, tuned: bool = True) -> None:
        self.case, self.machine = case, VirtualMachine(case.cpus)
        loader: Any = self._torchdata() if case.pipeline == "torchdata" else self._dataloader()
        pipeline: LiveLoader | None = None
        if tuned:
            found = find(loader, clock=self.machine.clock, workers_kind="thread")
            if found.pipeline is None:
                raise RuntimeError(f"nothing to tune in {case}: {found.why}")
            pipeline = found.pipeline
            pipeline.prepare()
        iterator: Iterator[Any] = iter(loader)
        if pipeline is not None:
            iterator = pipeline.adopt(iterator)
        super().__init__(case, self.machine, pipeline, iterator)

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
