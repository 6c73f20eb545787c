"""A training that changes its dataset while an epoch's workers run: workers started later compute what those do."""

from __future__ import annotations

import argparse
import collections
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

import numpy as np
import torch
from busy_machine import eventually
from processes import children
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from intune_callbacks import live
from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.given import plain_values
from intune_callbacks.pipelines.torch.loader import MapLoader
from intune_callbacks.types import Clock

LEVEL = 0


def plus(value: int) -> Callable[[int], int]:
    return lambda index: index + value


def negative(index: int) -> int:
    return -index


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0


class Epochal(Dataset[Any]):
    """Each sample holds what the dataset, or a part of it, was told, in whatever form."""

    of_class = 0

    def __init__(self, part: Epochal | None = None) -> None:
        self.epoch, self.part = 0, part
        self.config: dict[str, Any] = {"deep": [{"level": 0}]}
        self.options = argparse.Namespace(level=0)
        self.array, self.tensor = np.zeros(9000), torch.zeros(9000)
        self.rows: list[Any] = [(index, 0) for index in range(80)]
        self.shown: set[int] = set()
        self.recent = collections.deque([0], maxlen=1)
        self.transform: Callable[[int], int] = plus(0)
        self.slots = Slotted()

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        told = [index, self.epoch, self.part.epoch if self.part else 0, self.config["deep"][0]["level"]]
        told += [self.options.level, int(self.array[0]), int(self.tensor[0]), self.rows[index][1], len(self.shown)]
        told += [self.recent[0], self.transform(index), self.slots.level, LEVEL, self.of_class]
        return torch.tensor(told)


def change_global(_: Epochal, value: int) -> None:
    global LEVEL
    LEVEL = value


def change_rows(dataset: Epochal, value: int) -> None:
    dataset.rows[70:] = [(index, value) for index in range(70, 80)]


CHANGES: dict[str, Callable[[Epochal, int], Any]] = {
    "a number": lambda dataset, value: setattr(dataset, "epoch", value),
    "a number of a part": lambda dataset, value: setattr(dataset.part, "epoch", value),
    "deep in a dict": lambda dataset, value: dataset.config["deep"][0].update(level=value),
    "options": lambda dataset, value: setattr(dataset.options, "level", value),
    "an array in its place": lambda dataset, value: dataset.array.fill(value),
    "another array": lambda dataset, value: setattr(dataset, "array", np.full(9000, value)),
    "a tensor in its place": lambda dataset, value: dataset.tensor.fill_(value),
    "another tensor": lambda dataset, value: setattr(dataset, "tensor", torch.full((9000,), value)),
    "the end of a list": change_rows,
    "a set": lambda dataset, value: dataset.shown.update(range(value)),
    "a deque": lambda dataset, value: dataset.recent.append(value),
    "a closure": lambda dataset, value: setattr(dataset, "transform", plus(value)),
    "another function": lambda dataset, value: setattr(dataset, "transform", negative if value == 10 else abs),
    "a partial": lambda dataset, value: setattr(dataset, "transform", functools.partial(max, value)),
    "a slot": lambda dataset, value: setattr(dataset.slots, "level", value),
    "a global": change_global,
    "the class": lambda dataset, value: setattr(Epochal, "of_class", value),
}


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    yield
    change_global(Epochal(), 0)
    Epochal.of_class = 0


def trained(change: Callable[[Epochal, int], Any], tuned: bool, persistent: bool) -> list[Any]:
    change_global(Epochal(), 0)
    dataset = Epochal(Epochal())
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=persistent)
    pipeline = MapLoader(loader, clock=Clock()) if tuned else None
    if pipeline is not None:
        pipeline.prepare()
    seen = []
    try:
        for epoch in (10, 20):
            for number, batch in enumerate(loader):
                if number == 0:
                    change(dataset, epoch)
                if pipeline is not None:
                    pipeline.resize({"load": 3 + number % 3, "load.window": 8})
                seen.append(batch.tolist())
    finally:
        if pipeline is not None:
            pipeline.close()
    return seen


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("what", ["a number", "a number of a part", "deep in a dict", "a global"])
def test_samples_are_those_of_the_stock_loader(what: str, persistent: bool) -> None:
    change = CHANGES[what]
    assert trained(change, True, persistent) == trained(change, False, persistent)


def test_workers_that_live_on_go_on_where_the_numbers_are_the_users_own_again() -> None:
    dataset = Epochal()
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        for epoch in range(3):
            dataset.epoch = epoch
            for number, batch in enumerate(loader):
                pipeline.resize({"load": 3, "load.window": 8} if number < 9 else {"load": 2, "load.window": 4})
                assert batch[:, 1].tolist() == [0, 0, 0, 0]
    finally:
        pipeline.close()


def test_workers_that_live_on_begin_the_next_epoch_alone() -> None:
    dataset = Epochal()
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        for number, _ in enumerate(loader):
            pipeline.resize({"load": 3 if number < 4 else 1})
            if number == 9:
                pipeline.trim()
        assert eventually(lambda: children() <= 1)
        dataset.epoch = 10
        pipeline.resize({"load": 2, "load.window": 8})
        assert {int(row[1]) for batch in loader for row in batch} == {0}
        assert "changed" in pipeline.why_not
    finally:
        pipeline.close()


def test_why_no_worker_came_is_said_while_it_holds() -> None:
    dataset = Epochal()
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        for number, _ in enumerate(loader):
            dataset.epoch = 1
            if number == 3:
                assert pipeline.resize({"load": 4}) == {"load": 1, "load.window": 2}
        (hint,) = pipeline.late_hints
        assert (hint.kind, hint.stage) == ("order", "load") and "their number stays 1 while it runs" in hint.what
        for _ in loader:
            pipeline.resize({"load": 2})
        assert not pipeline.late_hints
    finally:
        pipeline.close()


def test_where_none_can_come_later_all_come_with_the_next_epoch() -> None:
    dataset = Epochal()
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        for number, _ in enumerate(loader):
            dataset.epoch += 1
            if number == 3:
                assert pipeline.resize({"load": 4})["load"] == 1
        at_begin = dataset.epoch
        pipeline.resize({"load": 4, "load.window": 8})
        seen = []
        epoch = iter(loader)
        dataset.epoch += 1
        for batch in epoch:
            seen += batch[:, :2].tolist()
            assert {stage.name: stage.current for stage in pipeline.stages()}["load"] == 4
        assert seen == [[index, at_begin] for index in range(80)]
        assert not pipeline.why_not
    finally:
        pipeline.close()


def test_the_card_says_why_no_worker_came(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = Epochal()
    options: dict[str, Any] = {"decide_every_s": 0.05, "decide_every_batches": 2, "warmup_batches": 2, "cpus": 8.0}
    loader = live(DataLoader(ConcatDataset([dataset] * 4), batch_size=4, num_workers=1), **options)
    for _ in loader:
        dataset.epoch += 1
    report = loader.close()
    assert report["changes"] == 0 and report["verdict"] == "input-bound"
    assert "the training changed the dataset" in report["cause"] and report["next"] == report["cause"]
    assert "nothing to change" not in capsys.readouterr().out


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_seen(what: str) -> None:
    dataset = Epochal(Epochal())
    whole: Dataset[Any] = Subset(Subset(ConcatDataset([dataset, dataset]), list(range(160))), list(range(80)))
    before = plain_values(whole)
    assert plain_values(whole) == before
    CHANGES[what](dataset, 10)
    assert plain_values(whole) != before


class Model(torch.nn.Module):
    """A model in training, whose method collates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.steps = self.level = 0

    def scaled(self, items: list[int]) -> Any:
        return torch.tensor(items) * self.level

    def collate(self, items: list[int]) -> Any:
        return self.scaled(items)


def test_what_a_training_always_changes_is_none_of_it() -> None:
    model, shared = Model(), torch.zeros(9).share_memory_()
    given = (Epochal(), model.collate, shared)
    before = plain_values(given)
    model.steps += 1
    with torch.no_grad():
        model.layer.weight.add_(1.0)
    shared.fill_(1.0)
    assert plain_values(given) == before
    model.level = 2
    assert plain_values(given) != before


def test_an_object_that_cannot_be_looked_at_is_passed_over() -> None:
    class Raises:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    circle: list[Any] = [1, Raises()]
    circle.append(circle)
    assert plain_values(circle) == plain_values(circle)


class Scaled:
    """A map function that the training changes."""

    def __init__(self) -> None:
        self.config = {"level": 0}

    def __call__(self, item: int) -> int:
        time.sleep(0.001)
        return item + 1000 * self.config["level"]


def test_processes_of_a_mapper_compute_the_same_when_the_training_changes_its_function() -> None:
    def run(tuned: bool) -> list[list[int]]:
        scaled = Scaled()
        mapper: Any = ParallelMapper(
            IterableWrapper(range(40)), scaled, num_workers=2, method="process", multiprocessing_context="fork"
        )
        loader = Loader(mapper)
        pipeline: Any = find(loader).pipeline if tuned else None
        refused = False
        if pipeline is not None:
            pipeline.prepare()
        seen: list[list[int]] = []
        for epoch in (1, 2):
            items = []
            for number, item in enumerate(loader):
                items.append(int(item))
                if number == 2:
                    scaled.config["level"] = epoch
                if pipeline is not None and number > 2:
                    pipeline.resize({"Scaled": 3 + number % 3, "Scaled.window": 6})
                    refused |= any(hint.stage == "Scaled" for hint in pipeline.late_hints)
            seen.append(items)
        if pipeline is not None:
            assert refused
            pipeline.close()
        return seen

    assert run(True) == run(False)
