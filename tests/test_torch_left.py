"""Loops that leave their epochs before the end: what the card is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset

from intune_callbacks import live
from intune_callbacks.pipelines.find import find


class Rows(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def __len__(self) -> int:
        return 40


def begun_each_time(loader: Any) -> None:
    for _ in range(4):
        next(iter(loader))


def to_the_end(loader: Any) -> None:
    for _ in range(4):
        assert len(list(loader)) == 10


def by_number(loader: Any) -> None:
    for _ in range(4):
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)


def after_a_while(loader: Any) -> None:
    for _ in range(4):
        list(islice(loader, 7))


def once(loader: Any) -> None:
    list(islice(loader, 3))


def mostly_to_the_end(loader: Any) -> None:
    for batches in (10, 3, 10, 3, 10):
        list(islice(loader, batches))


@pytest.mark.parametrize("dataset", [range(40), Rows()], ids=["map", "iterable"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("loop", "are_left"),
    [
        (begun_each_time, True),
        (to_the_end, False),
        (by_number, False),
        (after_a_while, False),
        (once, False),
        (mostly_to_the_end, False),
    ],
)
def test_epochs_that_are_left(loop: Callable[[Any], None], are_left: bool, workers: int, dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    pipeline.resize({"load": workers})
    loop(loader)
    assert ("left" in [hint.kind for hint in pipeline.late_hints]) is are_left
    pipeline.close()


def test_epochs_of_workers_that_live_on() -> None:
    for loop, are_left in ((begun_each_time, True), (to_the_end, False)):
        loader = DataLoader(range(40), batch_size=4, num_workers=2, persistent_workers=True)
        pipeline = find(loader).pipeline
        pipeline.prepare()
        loop(loader)
        assert ("left" in [hint.kind for hint in pipeline.late_hints]) is are_left
        pipeline.close()


@pytest.mark.parametrize("mode", ["observe", "advise", "tune"])
@pytest.mark.parametrize("dataset", [range(40), Rows()], ids=["map", "iterable"])
def test_the_report_names_them(mode: str, dataset: Any) -> None:
    loader = live(DataLoader(dataset, batch_size=4, num_workers=2), show_card=False, mode=mode)
    begun_each_time(loader)
    assert "one iterator that is kept" in next(one["what"] for one in loader.close()["hints"] if one["kind"] == "left")


def test_what_to_do_about_them_is_no_nothing() -> None:
    quick: dict[str, Any] = {"decide_every_s": 0.02, "decide_every_batches": 4, "warmup_batches": 2}
    loader = live(DataLoader(range(40), batch_size=4, num_workers=2), show_card=False, mode="advise", **quick)
    for _ in range(40):
        next(iter(loader))
    report = loader.close()
    assert report["next"].startswith("starts of epochs take ") and report["advice"] is None
