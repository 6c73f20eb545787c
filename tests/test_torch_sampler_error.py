"""A sampler that raises in the middle of an epoch: at the batch at which the stock loader meets it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from restless import Restless  # noqa: E402
from torch.utils.data import DataLoader, Sampler  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.workers.elastic import ElasticMap  # noqa: E402
from intune_callbacks.pipelines.workers.line import Hold  # noqa: E402

BAD, LENGTH = 31, 40


class Breaks(Sampler[list[int]]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i] for i in range(BAD))
        raise KeyError(BAD)


class More(random.Random):
    """No fewer batches in flight than with stock: then none is pulled later than there."""

    def randint(self, a: int, b: int) -> int:
        return super().randint(max(a, 4), b)


def seen_of(batches: Any) -> list[Any]:
    seen: list[Any] = []
    iterator = iter(batches)
    while True:
        try:
            seen.append(int(next(iterator)))
        except KeyError as error:
            seen.append(error.args)
        except StopIteration:
            return seen


def test_it_is_raised_where_the_stock_loader_raises_it(
    restless: type[Restless], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restless, "numbers", More(0))

    def loader() -> DataLoader[Any]:
        return DataLoader(range(LENGTH), batch_sampler=Breaks(), num_workers=2)  # type: ignore[arg-type]

    stock = [seen_of(loader()) for _ in range(3)]
    given = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2, "show_card": False, "cpus": 8.0}
    with live(loader(), **given) as ours:
        assert [seen_of(ours) for _ in range(3)] == stock
    assert (BAD,) in stock[0] and stock[0][-1] == BAD - 1
    assert restless.resizes


@pytest.mark.parametrize(("window", "at"), [(2, 5), (4, 3), (9, 3)])
def test_a_stage_that_pulls_ahead_raises_no_sooner(window: int, at: int) -> None:
    def source() -> Iterator[int]:
        yield from range(7)
        raise KeyError(7)

    stage = ElasticMap(source(), int, workers=2, window=window, feed=True, hold=Hold(window=4))
    assert seen_of(stage) == [*range(at), (7,), *range(at + 1, 7)]


@pytest.mark.parametrize("bad", [0, 2])
def test_one_that_raises_at_once(bad: int) -> None:
    def source() -> Iterator[int]:
        yield from range(bad)
        raise KeyError(bad)

    stage = ElasticMap(source(), int, workers=2, window=4, feed=True, hold=Hold(window=4))
    assert seen_of(stage)[0] == (bad,)


class Draws(Sampler[int]):
    """Draws each index from torch's global state; one of them is of a row that cannot be read."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            drawn = int(torch.randint(0, LENGTH, ()))
            yield LENGTH if number == 3 else drawn


@pytest.mark.parametrize("window", [0, 12])
def test_behind_an_error_of_the_dataset_as_much_was_drawn_as_in_stock(window: int) -> None:
    """One index less was: while the stock iterator delivered what it had in flight, none was asked for at an error."""
    torch.manual_seed(0)
    loader = DataLoader(list(range(LENGTH)), batch_size=None, sampler=Draws(), num_workers=2)  # type: ignore[arg-type]
    pipeline: Any = find(loader).pipeline if window else None
    if window:
        pipeline.prepare()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    if window:
        pipeline.resize({"load": 3, "load.window": window})
    with pytest.raises(IndexError):
        next(iterator)
    left = int(torch.randint(0, 1000, ()))
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # the base seed of the workers
    for _ in range(8):  # four that were delivered, or not, and four in flight
        torch.randint(0, LENGTH, ())
    assert left == int(torch.randint(0, 1000, ()))
    if window:
        pipeline.close()
