"""A training that changes its dataset while an epoch's workers run: workers started later compute what those do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

from busy_machine import eventually
from changed_rows import CHANGES, Epochal, change_global, reset
from processes import children
from torch.utils.data import ConcatDataset, DataLoader
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from intune_callbacks import live
from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.torch.loader import MapLoader
from intune_callbacks.types import Clock


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    yield
    reset()


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
        assert (hint.kind, hint.stage) == ("order", "load") and "had started (Epochal.epoch), and one" in hint.what
        assert "their number stays 1 while it runs" in hint.what
        for _ in loader:
            pipeline.resize({"load": 2})
        assert "order" not in {hint.kind for hint in pipeline.late_hints}
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("changes", [False, True])
def test_workers_that_live_on_are_not_advised_where_each_epoch_changes_the_dataset(workers: int, changes: bool) -> None:
    """They would go on with that of the first epoch, and give its samples once more."""
    dataset = Epochal()
    stock = DataLoader(dataset, batch_size=4, num_workers=workers)
    loader = live(stock, mode="advise", show_card=False, warmup_batches=2, decide_every_s=0.2)
    for epoch in range(15):
        dataset.epoch = epoch if changes else 0
        for _ in loader:
            pass
    report = loader.close()
    said = [hint["what"] for hint in report["hints"] if hint["kind"] == "changing"]
    assert bool(said) == changes
    if changes:
        assert "changes the dataset (Epochal.epoch) between epochs" in said[0]
        assert "persistent_workers=True" not in f"{report['advice']} {report['causes']} {report['next']}"
    elif workers == 0 and report["advice"] is not None:  # on a machine whose CPUs are all taken nothing is promised
        assert "persistent_workers=True" in report["advice"]["lines"][0]


def test_that_a_dataset_draws_from_a_generator_of_its_own_is_said_once_there_are_other_workers() -> None:
    dataset = Epochal()
    dataset.options.rng = random.Random(1)
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        for number, _ in enumerate(loader):
            assert [hint.kind for hint in pipeline.late_hints] == (["generator"] if number > 3 else [])
            pipeline.resize({"load": 3 if number >= 3 else 1})
        (hint,) = pipeline.late_hints
        assert "a generator of its own (Epochal.options.rng)" in hint.what
    finally:
        pipeline.close()
