"""A DataLoader is taken over whole or not at all, and what goes wrong in it is the user's as without us."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from processes import children  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch_rows import BATCH, ROWS, Eager, Noisy, Rows, engines, plain, seeded  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402

FEW_THREADS = pytest.mark.parametrize("workers", [0, 2])


# -- all or nothing ----------------------------------------------------------------------------------------------------


class Unforkable:
    """Lets `os.fork` fail from the given call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        self.allowed, fork = allowed, os.fork

        def failing() -> int:
            self.allowed -= 1
            if self.allowed < 0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()

        monkeypatch.setattr(os, "fork", failing)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_take_over_that_fails_leaves_the_stock_iterator_as_it_was(
    workers: int, allowed: int, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"persistent_workers": True} if persistent and workers else {}
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=workers, **options)
    pipeline = find(loader, workers_kind="process").pipeline
    stock = iter(loader)
    iterator = pipeline.adopt(stock)
    untouched, before = set(vars(stock)), children()
    got = [[plain(next(iterator)) for _ in range(3)]]
    fork = Unforkable(monkeypatch, allowed)
    own = {stage.name: stage.current for stage in pipeline.stages()}
    assert pipeline.resize({"load": 4, "load.window": 9}) == own
    assert {stage.name: stage.current for stage in pipeline.stages()} == own
    assert "Resource temporarily unavailable" in pipeline.why_not
    assert set(vars(stock)) == untouched and iterator.engine is None and iterator.children.pool is None
    assert engines() == [] and children() == before
    fork.allowed = 1000
    got[0] += [plain(batch) for batch in iterator]
    got.append([plain(batch) for batch in loader])
    assert got == 2 * [[plain(batch) for batch in DataLoader(Rows(), batch_size=BATCH)]]
    pipeline.close()


def test_no_thread_left_for_a_worker_leaves_nothing_half_built(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Rows(), batch_size=BATCH)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    before, start, begun = children(), threading.Thread.start, []

    def failing(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    assert pipeline.resize({"load": 3})["load"] == 0
    monkeypatch.undo()
    assert pipeline.why_not == "RuntimeError: can't start new thread"
    assert engines() == [] and children() == before
    assert len(list(iterator)) == ROWS // BATCH
    pipeline.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_cannot_begin_in_ours_begins_in_stock(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(live: bool) -> list:
        seeded()
        loader = DataLoader(Noisy(), batch_size=BATCH, num_workers=workers, sampler=Eager())
        pipeline = find(loader, workers_kind="process").pipeline
        seen, fork = [], None
        for epoch in range(2):
            with monkeypatch.context() as patch:
                if live and epoch:
                    # The stock iterator would get its own two, but ours gets only one.
                    fork = Unforkable(patch, 1)
                    fork.allowed = 1
                    patch.setattr("intune_callbacks.pipelines.torch.engine.Engines.stock_from", _refill(fork))
                iterator = pipeline.adopt(iter(loader)) if live else iter(loader)
            if live and epoch:
                assert iterator.engine is None and pipeline.why_not and engines() == []
                assert pipeline.stages()[0].current == workers
            batches = [plain(batch) for batch in iterator]
            if live and not epoch:
                pipeline.resize({"load": 3})
            if epoch:
                seen.append(batches)
        pipeline.close()
        return seen

    assert run(True) == run(False)


def _refill(fork: Unforkable):
    from intune_callbacks.pipelines.torch.engine import Engines

    stock_from = Engines.stock_from

    def refilled(*arguments):
        fork.allowed = 1000
        return stock_from(*arguments)

    return refilled


def test_a_growth_that_fails_keeps_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    got = [plain(next(iterator))]
    with monkeypatch.context() as patch:
        Unforkable(patch, 3)
        pipeline.resize({"load": 9})
        got += [plain(batch) for batch in iterator]
    assert pipeline.stages()[0].current == 3 and "BlockingIOError" in pipeline.why_not
    assert got == [plain(batch) for batch in DataLoader(Rows(), batch_size=BATCH)]
    pipeline.close()
    assert engines() == []


# -- in the middle of an epoch -----------------------------------------------------------------------------------------


class Bad(Rows):
    def __getitem__(self, i: int):
        if i == 13:
            raise KeyError("the user's own error")
        return super().__getitem__(i)


@FEW_THREADS
def test_two_threads_that_set_numbers_at_once_take_over_once(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=workers)
    pipeline = find(loader, workers_kind="thread").pipeline
    pipeline.prepare()
    engine = type(pipeline._engines).engine

    def slowly(*arguments):
        time.sleep(0.2)
        return engine(*arguments)

    monkeypatch.setattr(type(pipeline._engines), "engine", slowly)
    iterator = pipeline.adopt(iter(loader))
    seen = next(iterator).flatten().tolist()
    threads = [threading.Thread(target=pipeline.resize, args=({"load": n, "load.window": 8},)) for n in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen += [value for batch in iterator for value in batch.flatten().tolist()]
    pipeline.close()
    assert seen == list(range(ROWS))


@FEW_THREADS
def test_numbers_that_come_during_a_fetch_are_in_force_after_it(workers: int) -> None:
    """Keras fetches from a DataLoader in a thread of TensorFlow's, while the training thread decides."""
    loader = DataLoader(Rows(sleep_s=0.05), batch_size=BATCH, num_workers=workers)
    pipeline = find(loader, workers_kind="thread").pipeline
    pipeline.prepare()
    iterator, seen = pipeline.adopt(iter(loader)), []
    thread = threading.Thread(target=lambda: seen.extend(torch.cat(list(iterator)).flatten().tolist()))
    thread.start()
    time.sleep(0.1)
    begin_s = time.perf_counter()
    pipeline.resize({"load": 6, "load.window": 12})
    assert time.perf_counter() - begin_s < 0.15
    while thread.is_alive() and len(engines()) < 6:
        time.sleep(0.005)
    assert len(engines()) >= 6
    thread.join()
    pipeline.close()
    assert seen == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resized", [None, 1, 4])
def test_an_error_of_the_dataset_comes_at_its_batch_and_the_rest_after_it(workers: int, resized: int | None) -> None:
    loader = DataLoader(Bad(), batch_size=BATCH, num_workers=workers)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    got: list = []
    while True:
        if len(got) == resized:
            pipeline.resize({"load": 0 if resized == 4 else 3, "load.window": 3})
        try:
            got.append(plain(next(iterator)))
        except KeyError:
            got.append("error")
        except StopIteration:
            break
    whole = [plain(batch) for batch in DataLoader(Rows(), batch_size=BATCH)]
    assert got == [*whole[:3], "error", *whole[4:]]
    pipeline.close()


class Spoilt(Rows):
    def __getitem__(self, index: int) -> object:
        if index >= 3 * BATCH:
            raise ValueError(f"row {index}")
        return super().__getitem__(index)


def test_an_error_of_the_first_batch_of_ours_is_told_as_in_stock() -> None:
    """Their worker made it again while ours was being handled: both errors were told, one behind the other."""
    loader = DataLoader(Spoilt(), batch_size=BATCH, num_workers=1)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    pipeline.resize({"load": 3})
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker process 0") as caught:
        list(iterator)
    assert caught.value.__context__ is None
    pipeline.close()


def test_a_timeout_of_the_user_holds_in_both_phases() -> None:
    gc.collect()  # torch waits 5 s for a hanging worker of an earlier test wherever its iterator is collected
    for resized in (False, True):
        loader = DataLoader(Rows(8, sleep_s=3.0), batch_size=1, num_workers=1, timeout=1)
        pipeline = find(loader, workers_kind="process").pipeline
        iterator = pipeline.adopt(iter(loader))
        if resized:
            pipeline.resize({"load": 2})
        with pytest.raises(RuntimeError, match="timed out after 1"):
            next(iterator)
        pipeline.close()
        del iterator


def test_out_of_order_delivery_loses_nothing() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2, in_order=False)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    got = []
    for number, batch in enumerate(iterator):
        got.append(plain(batch))
        if number == 3:
            pipeline.resize({"load": 4, "load.window": 6})
    assert sorted(got) == sorted(plain(batch) for batch in DataLoader(Rows(), batch_size=BATCH))
    pipeline.close()
