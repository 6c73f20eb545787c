"""The torch pipelines of the live benchmark on an emulated machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from benchmarks.emulated import VirtualMachine, irregular
from benchmarks.live_loop import DATALOADER_BATCH, ENDLESS, Case, Loop
from benchmarks.systems import System, all_cpus, even_start, linear_program, one_each, tuner_for
from intune_callbacks.pipelines.base import LiveLoader
from intune_callbacks.pipelines.find import find
from intune_callbacks.types import Stage

__all__ = ["PIPELINES", "SYSTEMS", "Live", "LiveNodes"]

PIPELINES = ("torchdata", "dataloader")
SYSTEMS = {
    system.name: system
    for system in (
        System("InTune (dqn)", split=even_start, policy="dqn"),
        System("InTune (model-jump)", split=even_start, policy="model-jump"),
        System("hill climb", split=even_start, policy="hill-climb"),
        System("Unoptimized", split=one_each),
        System("even split", split=even_start),
        System("even split relaunched", split=even_start, relaunched=True),
        System("Plumber LP relaunched", split=linear_program, relaunched=True),
        System("N in every stage relaunched", split=all_cpus, relaunched=True),
    )
}


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
        iterator, pipeline = adopted(case, self.machine, loader) if tuned else (iter(loader), None)
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
        return nodes(self.case, self.machine, even_start(self.case))

    def _dataloader(self) -> DataLoader[int]:
        return DataLoader(Items(self.case, self.machine), batch_size=DATALOADER_BATCH)


class LiveNodes(Loop):
    """A running ``torchdata.nodes`` pipeline with its training loop, under one of `SYSTEMS`.

    Args:
        case: what to build.
        system: how.
    """

    def __init__(self, case: Case, system: System) -> None:
        self.case, self.system, self.machine = case, system, VirtualMachine(case.cpus)
        iterator, pipeline = self._begin(0, case.cpus)
        super().__init__(case, self.machine, pipeline, iterator)
        self.tuner = None if pipeline is None else tuner_for(system, pipeline, self.machine)

    def change_cpus(self, cpus: int) -> None:
        """Resize the machine; a system that is relaunched begins anew with the next batch of the data."""
        self.machine.resize(cpus)
        if self.system.relaunched:
            self._iterator = iter(())
            self._iterator, self.pipeline = self._begin(len(self.deliveries), cpus)

    def close(self) -> None:
        """Stop everything."""
        if self.tuner is not None:
            self.tuner.close()
        super().close()
        self._iterator = iter(())

    def _begin(self, first: int, cpus: int) -> tuple[Iterator[Any], LiveLoader | None]:
        assert self.system.split is not None
        split = self.system.split(replace(self.case, cpus=cpus))
        loader = nodes(self.case, self.machine, split, first)
        if self.system.policy is None:
            return iter(loader), None
        return adopted(self.case, self.machine, loader)


def nodes(case: Case, machine: VirtualMachine, split: Mapping[str, int], first: int = 0) -> Loader[int]:
    """Return the pipeline as torchdata makes it.

    Args:
        case: its stages.
        machine: what they compute on.
        split: workers of each.
        first: batch of the data.
    """
    node: Any = IterableWrapper(range(first, ENDLESS))
    for stage, workers in split.items():
        node = ParallelMapper(node, Work(case, machine, stage), num_workers=workers)
    return Loader(node)


def adopted(case: Case, machine: VirtualMachine, loader: Any) -> tuple[Iterator[Any], LiveLoader]:
    """Return the batches of a loader, and the live pipeline that they come through.

    Args:
        case: what it is.
        machine: its clock.
        loader: of torch or torchdata.
    """
    found = find(loader, clock=machine.clock, workers_kind="thread")
    if found.pipeline is None:
        raise RuntimeError(f"nothing to tune in {case}: {found.why}")
    found.pipeline.prepare()
    return found.pipeline.adopt(iter(loader)), found.pipeline
