"""A sampler that takes long for each index: the training process waits for it, and no worker changes that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Sampler  # noqa: E402

from intune_callbacks.measure.verdict import is_starved  # noqa: E402
from intune_callbacks.measure.window import rates  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.types import StageRates  # noqa: E402

ROWS, EACH_S = 400, 0.01


class Slow(Sampler[int]):
    def __init__(self) -> None:
        self.pulled = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        for index in range(ROWS):
            time.sleep(EACH_S)
            self.pulled += 1
            yield index


def seen_of(pipeline: Any, iterator: Any, batches: int = 20) -> StageRates:
    before = pipeline.stats()
    for _ in range(batches):
        next(iterator)
    return rates(before, pipeline.stats(), pipeline.stages())["load"]


@pytest.mark.parametrize("live", [False, True])
def test_the_workers_of_a_stock_loader_are_seen_to_wait_for_it(live: bool) -> None:
    """A fetch of 40 ms that finds its batch there was taken for the time of the workers: eight of them were advised."""
    loader = DataLoader(range(ROWS), batch_size=4, sampler=Slow(), num_workers=2)  # type: ignore[arg-type]
    pipeline: Any = find(loader, live=live).pipeline
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    assert is_starved(seen_of(pipeline, iterator))
    pipeline.close()


def test_a_wider_window_is_filled_by_the_fetch_that_waits_for_it() -> None:
    """Pulled between two fetches, its indices were counted as the time of the model."""
    sampler = Slow()
    loader = DataLoader(range(ROWS), batch_size=4, sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    iterator = iter(loader)
    next(iterator)
    for window in (8, 16):
        before = sampler.pulled
        pipeline.resize({"load": 2, "load.window": window})
        assert sampler.pulled == before
        for _ in range(6):
            next(iterator)
        assert sampler.pulled >= before + 4 * 4
    assert is_starved(seen_of(pipeline, iterator))
    pipeline.close()
