"""A sampler that depends on the training gives what it gives in the stock loader, whatever the tuner asks for."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from reach_classes import Infinite, Lazy  # noqa: E402
from restless import Restless  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, RandomSampler  # noqa: E402
from training_samplers import (  # noqa: E402
    BATCHES,
    DEPENDING,
    EAGER,
    ROWS,
    Batches,
    ByHand,
    Drawing,
    Fed,
    Hard,
    Prioritized,
    Quiet,
    Resumable,
    Rows,
    Waiting,
    trained,
)

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

FEW = settings(max_examples=5, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("persistent", [False, True], ids=["anew", "persistent"])
@pytest.mark.parametrize("make", DEPENDING)
def test_its_batches_are_those_of_the_stock_loader(
    make: Callable[[], Batches], persistent: bool, restless: type[Restless]
) -> None:
    # At the end of an epoch the queue holds what nobody asked for any more, with the stock loader, too.
    given: dict[str, Any] = {"persistent_workers": persistent, "epochs": 1 if make is Fed else 2}
    expected, _ = trained(make(), **given)
    seen, report = trained(make(), lambda loader: live(loader, **EAGER), **given)
    assert seen == expected
    assert report["frozen"] is None
    assert restless.resizes > 1
    (hint,) = [hint["what"] for hint in report["hints"] if make.__name__ in hint["what"]]
    assert "4 batches are in flight" in hint


@pytest.mark.parametrize("inside", [False, True])
def test_what_goes_into_a_checkpoint_is_how_far_stock_has_read(inside: bool, restless: type[Restless]) -> None:
    class Outer(Batches):
        def __init__(self, sampler: Resumable) -> None:
            self.sampler, self.step = sampler, sampler.step  # type: ignore[method-assign]

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.sampler)

    stock, ours = Resumable(), Resumable()
    expected, _ = trained(Outer(stock) if inside else stock, epochs=3)
    seen, report = trained(Outer(ours) if inside else ours, lambda loader: live(loader, **EAGER), epochs=3)
    assert (seen, ours.saved) == (expected, stock.saved)
    assert restless.resizes > 1
    assert any(hint["what"].startswith("Resumable has a `state_dict`") for hint in report["hints"])


@pytest.mark.parametrize("make", [Drawing, Prioritized])
def test_one_inside_a_sampler_that_only_begins_it_anew(make: Callable[[], Batches], restless: type[Restless]) -> None:
    expected, _ = trained(make(), epochs=3, kind=Infinite)
    seen, report = trained(make(), lambda loader: live(loader, **EAGER), epochs=3, kind=Infinite)
    assert seen == expected
    assert restless.resizes > 1
    assert any(hint["what"].startswith(make.__name__) for hint in report["hints"])


def test_each_pass_over_the_rows_draws_from_a_generator_that_the_training_draws_from(restless: type[Restless]) -> None:
    def run(wrap: Callable[[Any], Any] = lambda loader: loader) -> list[Any]:
        given = torch.Generator().manual_seed(5)
        sampler = RandomSampler(range(ROWS), num_samples=3 * ROWS, generator=given)
        loader = wrap(DataLoader(Rows(), 4, sampler=sampler, num_workers=2))
        return [(batch.tolist(), torch.rand(1, generator=given).item()) for batch in loader]

    assert run(lambda loader: live(loader, **EAGER)) == run()
    assert restless.resizes > 1


class Untrue(Quiet):
    """MMEngine's InfiniteSampler: has a length and no end."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.four()


@pytest.mark.parametrize("at", [BATCHES - 4, BATCHES + 10])  # all of its length is asked for, and more
def test_a_length_that_is_no_end_is_none(at: int) -> None:
    def run(tuned: bool) -> list[Any]:
        loader, seen = DataLoader(Rows(), batch_sampler=Untrue(), num_workers=2), []
        pipeline: Any = find(loader).pipeline if tuned else None
        if tuned:
            pipeline.prepare()
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if tuned and number == at:
                pipeline.resize({"load": 3, "load.window": 12})
            if number == 2 * BATCHES:
                assert not tuned or pipeline._iterator().engine.workers == 3
                break
        if tuned:
            pipeline.close()
        return seen

    assert run(True) == run(False)


def test_one_that_only_begins_anew_is_read_ahead() -> None:
    # It draws as an epoch begins, which in stock, too, is when the one before is all asked for.
    loader = Lazy(Rows(), batch_sampler=BatchSampler(ByHand(), 4, False), num_workers=2)
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    for epoch in range(3):
        for number, _ in enumerate(loader):
            pipeline.resize({"load": 3, "load.window": 12})
            assert (epoch, number) < (1, 0) or not pipeline._engines.sampling.is_held
    assert not pipeline.late_hints
    pipeline.close()


@FEW
@given(st.lists(st.tuples(st.integers(0, BATCHES), st.integers(0, 5), st.integers(1, 12)), max_size=5), st.data())
@pytest.mark.parametrize("make", [Prioritized, Drawing])
def test_whatever_the_numbers(
    make: Callable[[], Batches], plan: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    prefetch, release = data.draw(st.integers(1, 3)), data.draw(st.integers(0, BATCHES))

    def run(tuned: bool) -> list[Any]:
        np.random.seed(0)
        sampler, seen = make(), []
        loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=2, prefetch_factor=prefetch)
        pipeline: Any = find(loader).pipeline if tuned else None
        if tuned:
            pipeline.prepare()
        for number, batch in enumerate(loader):
            rows = [int(row) for row in batch[:, 0]]
            seen.append(rows)
            sampler.step(rows)
            for at, workers, window in plan if tuned else ():
                if at == number:
                    pipeline.resize({"load": workers, "load.window": window})
            if tuned and number == release:
                pipeline.release()
        if tuned:
            pipeline.close()
        return seen

    assert run(True) == run(False)


def test_one_that_nobody_changes_is_read_ahead() -> None:
    expected, _ = trained(Quiet(), epochs=1)
    sampler, asked = Quiet(), []
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=2)
    pipeline: Any = find(loader).pipeline
    four, sampler.four = sampler.four, lambda: asked.append(1) or four()  # type: ignore[method-assign, func-returns-value]
    pipeline.prepare()
    seen = []
    for number, batch in enumerate(loader):
        seen.append([int(row) for row in batch[:, 0]])
        if number == 0:
            pipeline.resize({"load": 3, "load.window": 12})
            assert len(asked) <= 5
        if number == 20:
            assert len(asked) == 21 + 12
    assert seen == list(expected[:-1])
    assert not pipeline.late_hints
    pipeline.close()


def test_one_that_the_training_changes_late_is_held_from_then_on() -> None:
    sampler, asked = Prioritized(), []
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=2)
    pipeline: Any = find(loader).pipeline
    four, sampler.four = sampler.four, lambda: asked.append(1) or four()  # type: ignore[method-assign, func-returns-value]
    pipeline.prepare()
    pipeline.resize({"load": 3, "load.window": 12})
    for number, batch in enumerate(loader):
        if number >= 15:
            sampler.step([int(row) for row in batch[:, 0]])
        if number == 15:
            pipeline._engines.sampling._due_s = 0.0  # a later look is due by the clock
    assert pipeline.late_hints
    load, window = pipeline.stages()
    assert (load.high, window.low, window.high, window.current) == (4, 4, 4, 4)
    pipeline.close()


def test_the_card_says_that_the_sampler_keeps_workers_away() -> None:
    options: dict[str, Any] = {"decide_every_s": 0.05, "decide_every_batches": 2, "warmup_batches": 2, "cpus": 8.0}
    # As many workers as batches may be in flight: the sampler allows no more from the start.
    loader = live(DataLoader(Waiting(), batch_sampler=Drawing(), num_workers=2, prefetch_factor=1), **options)
    for _ in range(2):
        for _ in loader:
            pass
    report = loader.close()
    assert report["verdict"] == "input-bound"
    assert report["cause"].startswith("Drawing draws from the global random state")


class Counted(Batches):
    """Is iterated over to be counted, as those that fill batches with tokens."""

    asked, takes_s = 0, 0.0

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(ROWS).tolist() + random.sample(range(ROWS), 8) + np.random.permutation(ROWS)[:8].tolist()
        yield from (rows[first : first + 4] for first in range(0, len(rows), 4))

    def __len__(self) -> int:
        self.asked += 1
        time.sleep(self.takes_s)
        return sum(1 for _ in self)


def test_who_asks_for_the_length_moves_no_random_state(restless: type[Restless]) -> None:
    random.seed(0)
    expected, _ = trained(Counted(), epochs=3)
    random.seed(0)
    seen, report = trained(Counted(), lambda loader: live(loader, **EAGER), epochs=3)
    assert seen == expected
    assert report["frozen"] is None and restless.resizes > 1


def test_a_length_that_takes_long_is_seldom_asked_for() -> None:
    """It was asked for twice at each decision."""
    sampler = Counted()
    sampler.takes_s = 0.02
    pipeline: Any = find(DataLoader(Rows(), batch_sampler=sampler, num_workers=2)).pipeline
    for _ in range(100):
        pipeline.stages()
    assert 1 <= sampler.asked < 20


def test_a_loader_without_workers_reads_nothing_ahead() -> None:
    sampler = Hard()
    loader = DataLoader(Rows(), batch_sampler=sampler)
    stock = []
    for batch in loader:
        stock.append([int(row) for row in batch[:, 0]])
        sampler.step(stock[-1])
    sampler, seen = Hard(), []
    loader = DataLoader(Rows(), batch_sampler=sampler)
    pipeline: Any = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    pipeline.resize({"load": 3, "load.window": 12})
    for batch in loader:
        seen.append([int(row) for row in batch[:, 0]])
        sampler.step(seen[-1])
    assert seen == stock
    assert pipeline.stages()[0].high == 0
    pipeline.close()


@pytest.mark.parametrize("make", [Quiet, Prioritized, lambda: BatchSampler(range(ROWS), 4, False)])
def test_a_kept_iterator_ends_with_its_loader_and_not_at_a_collection(make: Callable[[], Any]) -> None:
    # Where the collector has closed their queues first, torch waits five seconds for each worker.
    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(Rows(), batch_sampler=make(), num_workers=1, persistent_workers=True)
        wrapped = live(loader, show_card=False)
        for _ in wrapped:
            pass
        wrapped.close()
        kept = weakref.ref(loader._iterator)
        del loader, wrapped
        assert kept() is None
    finally:
        gc.enable()
