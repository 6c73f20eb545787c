"""Batches that become larger in the midst of an epoch, as schedules of the batch size make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler  # noqa: E402
from training_samplers import ROWS, Rows  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402


class Growing(Sampler[list[int]]):
    def __init__(self) -> None:
        self.batch_size = 2
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return -(-ROWS // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rows, first = torch.randperm(ROWS, generator=self.generator).tolist(), 0
        while first < ROWS:
            size = self.batch_size
            yield rows[first : first + size]
            first += size


def of_torch() -> Any:
    return BatchSampler(RandomSampler(range(ROWS), generator=torch.Generator()), 2, drop_last=False)


def batches(sampler: Any, wanted: dict[str, int]) -> tuple[list[list[float]], Any]:
    """Return the batches of two epochs, in each of which they grow once, and what was said of the sampler."""
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=2)
    pipeline: Any = find(loader).pipeline if wanted else None
    if wanted:
        pipeline.prepare()
    seen = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            seen.append(batch[:, 0].tolist())
            if wanted:
                pipeline._engines.sampling._due_s = float("inf")  # no look at all it holds comes to pass
                if epoch and not number:
                    pipeline.resize(wanted)
            if number == 15:
                sampler.batch_size += 1
    hints = pipeline.late_hints if wanted else ()
    if wanted:
        pipeline.close()
    return seen, hints


@pytest.mark.parametrize("make", [Growing, of_torch])
def test_they_grow_where_they_do_in_the_stock_loader(make: Any) -> None:
    expected, _ = batches(make(), {})
    seen, (hint,) = batches(make(), {"load": 3, "load.window": 12})
    assert seen == expected
    assert hint.what.startswith(f"{type(make()).__name__} gives what the training lets it")


@pytest.mark.parametrize("make", [Growing, of_torch])
def test_what_nobody_changes_in_mid_epoch_is_read_ahead(make: Any) -> None:
    sampler = make()
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=2)
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    for _ in range(2):
        for _ in loader:
            pass
        sampler.batch_size += 1
    assert not pipeline.late_hints
    _, window = pipeline.stages()
    assert window.high > window.current
    pipeline.close()
