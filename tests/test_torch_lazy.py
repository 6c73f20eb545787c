"""A DataLoader is left alone until other numbers are asked for, taken over whole or not at all, and given back."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from busy_machine import three_attempts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.watched import Watch  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402

FEW = settings(max_examples=20, suppress_health_check=list(HealthCheck))
FEW_THREADS = pytest.mark.parametrize("workers", [0, 2])
ROWS, BATCH = 64, 4


class Rows(Dataset):
    """Row i is i; a few are slow."""

    def __init__(self, rows: int = ROWS, sleep_s: float = 0.0, spin_s: float = 0.0) -> None:
        self.rows, self.sleep_s, self.spin_s = rows, sleep_s, spin_s

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        until = time.process_time() + self.spin_s
        while time.process_time() < until:
            pass
        if i % 29 == 3:
            time.sleep(0.001)
        return torch.tensor([i])


class Noisy(Rows):
    def __getitem__(self, i: int):
        return torch.rand(1).item(), random.random(), float(np.random.rand())


class Eager:
    """A sampler that draws at `iter()`, twice for the stock iterator with workers."""

    def __iter__(self):
        return iter(torch.randperm(ROWS).tolist())

    def __len__(self) -> int:
        return ROWS


def plain(batch):
    return [part.tolist() for part in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def children() -> int:
    return len(multiprocessing.active_children())


def engines() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("intune-")]


LOADERS = {
    "shuffled": lambda: dict(batch_size=BATCH, shuffle=True),
    "drop_last": lambda: dict(batch_size=7, shuffle=True, drop_last=True),
    "unbatched": lambda: dict(batch_size=None, sampler=RandomSampler(Rows())),
    "batch_sampler": lambda: dict(batch_sampler=BatchSampler(Eager(), 5, False)),
    "generator": lambda: dict(batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "persistent": lambda: dict(batch_size=BATCH, shuffle=True, persistent_workers=True),
    "eager": lambda: dict(batch_size=BATCH, sampler=Eager()),
}


def epochs(name: str, workers: int, kind: str | None, plan: list) -> tuple[list, list]:
    """Train three epochs, the second left early, with resizes at batches of `plan`; `kind` None is without us."""
    seeded()
    options = LOADERS[name]()
    if not workers:
        options.pop("persistent_workers", None)
    loader = DataLoader(Rows(), num_workers=workers, **options)
    pipeline = find(loader, workers_kind=kind).pipeline if kind else None
    seen: list = []
    for epoch in range(3):
        iterator = iter(loader)
        if pipeline is not None:
            iterator = pipeline.adopt(iterator)
        batches = []
        for batch in iterator:
            batches.append(plain(batch))
            for at, load, window in plan:
                if pipeline is not None and at == (epoch, len(batches)):
                    applied = pipeline.resize({"load": load, "load.window": window})
                    assert applied["load"] == max(load, min(1, workers))
            if epoch == 1 and len(batches) == 9:
                break
        seen.append(batches)
        del iterator
    state = torch.get_rng_state().tolist()
    if pipeline is not None:
        pipeline.close()
        assert pipeline.why_not == ""
        assert "_get_iterator" not in vars(loader)
    del loader
    return seen, state


plans = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 2), st.integers(1, 16)),
        st.sampled_from([0, 0, 1, 2, 3]),
        st.sampled_from([1, 2, 4, 7]),
    ),
    max_size=6,
)


@FEW
@given(name=st.sampled_from(sorted(LOADERS)), workers=st.sampled_from([0, 2]), threads=st.booleans(), plan=plans)
def test_batches_and_random_state_are_the_stock_ones_under_any_resizes(name, workers, threads, plan) -> None:
    expected = epochs(name, workers, None, [])
    # Ours pulls the sampler only as far as stock with workers does, so the state agrees where stock would have one.
    got = epochs(name, workers, "thread" if threads else "process", plan)
    assert got == expected
    assert engines() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_touched_until_another_number_is_asked_for(workers: int) -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=workers)
    before = children()
    stock = iter(loader)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(stock)
    untouched = set(vars(stock))
    got = []
    for batch in iterator:
        got.append(plain(batch))
        load, window = (stage.current for stage in pipeline.stages())
        assert load == workers
        assert pipeline.resize({"load": load, "load.window": window}) == {"load": load, "load.window": window}
        assert iterator.engine is None and engines() == [] and children() <= before + workers
    assert set(vars(stock)) == untouched
    assert got == [plain(batch) for batch in DataLoader(Rows(), batch_size=BATCH)]
    assert {s.name: s.low for s in pipeline.stages()} == {"load": min(1, workers), "load.window": 1}
    assert pipeline.stats().delivered == pipeline.stats().stages["load"].items == len(got)
    pipeline.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stock_phase_draws_the_stock_random_numbers(workers: int) -> None:
    def draws(watched: bool) -> list:
        seeded()
        loader = DataLoader(Noisy(), batch_size=BATCH, num_workers=workers)
        pipeline = find(loader, workers_kind="process").pipeline
        got = []
        for _ in range(2):
            iterator = iter(loader)
            got += [plain(batch) for batch in (pipeline.adopt(iterator) if watched else iterator)]
        pipeline.close()
        return got

    assert draws(True) == draws(False)


def test_at_zero_workers_the_stream_is_that_of_the_training_process() -> None:
    seeded()
    expected = [plain(batch) for batch in DataLoader(Noisy(), batch_size=BATCH)]
    seeded()
    loader = DataLoader(Noisy(), batch_size=BATCH)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    own = [plain(next(iterator)) for _ in range(3)]
    pipeline.resize({"load": 2, "load.window": 3})
    ahead = [plain(next(iterator)) for _ in range(3)]
    pipeline.resize({"load": 0})
    rest = [plain(batch) for batch in iterator]
    # What the two workers had in hand or finished comes first: at most a window of batches.
    inline = [batch for batch in rest if batch in expected]
    assert own == expected[:3] and not any(batch in expected for batch in ahead)
    assert inline == expected[3 : 3 + len(inline)] and len(inline) >= len(rest) - 3
    pipeline.close()


def test_a_user_with_workers_is_never_left_without() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    assert pipeline.resize({"load": 0})["load"] == 1
    assert len(list(iterator)) == ROWS // BATCH - 1
    pipeline.close()


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
    assert set(vars(stock)) == untouched and iterator.engine is None and iterator.pool is None
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
                    patch.setattr("intune_callbacks.pipelines.torch_engine.Engines.stock_from", _refill(fork))
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
    from intune_callbacks.pipelines.torch_engine import Engines

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


# -- from one epoch to the next ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_back_at_the_users_numbers_the_next_epoch_is_a_stock_one(persistent: bool) -> None:
    seeded()
    options = dict(batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)
    plain_loader = DataLoader(Rows(), **options)
    expected = [[plain(batch) for batch in plain_loader] for _ in range(4)]
    del plain_loader
    seeded()
    loader = DataLoader(Rows(), **options)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    kinds, got = [], []
    own = {stage.name: stage.current for stage in pipeline.stages()}
    for number in range(4):
        iterator = iter(loader)
        kinds.append(iterator.engine is None)
        batches = [plain(next(iterator))]
        if number == 0:
            pipeline.resize({"load": 3, "load.window": 5})
        if number == 1:
            pipeline.resize(own)
        got.append(batches + [plain(batch) for batch in iterator])
    assert kinds == [True, False, True, True]
    assert got == expected
    pipeline.close()
    assert engines() == [] and children() == (2 if persistent else 0)
    del iterator, pipeline, loader
    gc.collect()
    assert children() == 0


def test_after_the_fit_a_persistent_loader_has_its_own_iterator_back() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=1, persistent_workers=True)
    stock = iter(loader)
    pipeline = find(loader, workers_kind="process").pipeline
    list(pipeline.adopt(stock))
    pipeline.close()
    assert loader._iterator is stock
    assert len(list(loader)) == ROWS // BATCH


def test_dropping_an_unfinished_iterator_ends_its_workers() -> None:
    before = children()
    for engaged in (False, True):
        loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2)
        pipeline = find(loader, workers_kind="process").pipeline
        iterator = pipeline.adopt(iter(loader))
        next(iterator)
        if engaged:
            pipeline.resize({"load": 3})
        assert children() > before
        del iterator
        assert children() == before and engines() == []


def test_workers_are_let_go_with_the_last_batch_as_the_stock_iterator_does() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 3})
    assert len(list(iterator)) == ROWS // BATCH
    assert children() == 0 and engines() == []
    assert iterator.engine is not None  # it is still here, and ours
    pipeline.close()


def test_two_iterators_of_one_loader_keep_apart() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2)
    expected = [plain(batch) for batch in loader]
    pipeline = find(loader, workers_kind="process").pipeline
    first, second = (pipeline.adopt(iter(loader)) for _ in range(2))
    got = []
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        got.append((plain(one), plain(other)))
        if number == 3:
            pipeline.resize({"load": 3})
    assert first.engine is None and second.engine is not None
    assert got == [(batch, batch) for batch in expected]
    pipeline.close()


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


def test_a_timeout_of_the_user_holds_in_both_phases() -> None:
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


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False])
def test_without_workers_the_fetch_is_timed_exactly(live: bool) -> None:
    loader = DataLoader(Rows(40, sleep_s=0.002, spin_s=0.001), batch_size=BATCH)
    pipeline = find(loader, live=live, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    for _ in iterator:
        time.sleep(0.005)
    seen = pipeline.stats().stages["load"]
    assert seen.items == 10 and seen.item_bytes == 8 * BATCH
    assert seen.busy_s / 10 >= BATCH * 0.003
    assert BATCH * 0.001 <= seen.cpu_s / 10 < seen.busy_s / 10 - BATCH * 0.0015
    assert seen.blocked_s >= 9 * 0.005 and seen.queued == 0
    pipeline.close()


def test_a_fetch_that_is_long_now_and_then_waits_for_its_reads() -> None:
    """A shard is opened every tenth fetch: what the others compute says nothing of it."""
    wall_s, cpu_s = [0.0], [0.0]

    def fetches():
        for batch in range(320):
            wall_s[0] += 0.1 if batch % 10 == 5 else 0.0001
            cpu_s[0] += 0.0001
            yield batch

    watch, batches = Watch(0, 1, Clock(lambda: wall_s[0], lambda: cpu_s[0])), fetches()
    for _ in range(320):
        watch.fetch(batches)
    assert watch.counters.cpu_s == pytest.approx(320 * 0.0001)
    assert watch.counters.busy_s > 3.0


@pytest.mark.parametrize(
    ("model_s", "fetch_s", "reads"), [(0.0001, 0.0001, 400), (0.0001, 0.02, 1600), (0.02, 0.0001, 1600)]
)
def test_the_cpu_clock_is_read_now_and_then_where_steps_are_quick(model_s: float, fetch_s: float, reads: int) -> None:
    """A look at a thread's clock costs as much as a quick fetch; how much of one is CPU time is still measured."""
    wall_s, cpu_s, read = [0.0], [0.0], [0]

    def cpu() -> float:
        read[0] += 1
        return cpu_s[0]

    def fetches() -> Iterator[int]:
        for batch in range(800):
            wall_s[0] += fetch_s
            cpu_s[0] += 0.25 * fetch_s
            yield batch

    watch, batches = Watch(0, 1, Clock(lambda: wall_s[0], cpu)), fetches()
    for _ in range(800):
        watch.fetch(batches)
        wall_s[0] += model_s
        cpu_s[0] += model_s
    assert watch.counters.busy_s == pytest.approx(800 * fetch_s)
    assert watch.counters.cpu_s == pytest.approx(0.25 * watch.counters.busy_s)
    assert 100 <= read[0] <= reads


def test_the_time_of_a_batch_is_that_of_whole_rounds_where_batches_come_in_bursts() -> None:
    """Four workers take 1.4 s each: four batches come within .2 s, every one of them waited for, then none."""
    wall_s = [0.0]

    def fetches() -> Iterator[int]:
        for batch in range(40):
            wall_s[0] += 0.8 if batch % 4 == 0 else 0.2
            yield batch

    watch, batches = Watch(4, 8, Clock(lambda: wall_s[0], lambda: 0.0)), fetches()
    read = []
    for _ in range(40):
        watch.fetch(batches)
        read.append(watch.counters.busy_s)
    each_s = [after_s - before_s for before_s, after_s in itertools.pairwise(read)]
    assert all(1.2 < service_s < 1.5 for service_s in each_s[7:]), each_s
    assert sum(each_s[7:]) / len(each_s[7:]) == pytest.approx(1.4, rel=0.05)


@pytest.mark.parametrize("live", [True, False])
@three_attempts
def test_with_workers_time_and_cpu_of_a_batch_are_seen_from_outside(live: bool) -> None:
    loader = DataLoader(Rows(400, sleep_s=0.004, spin_s=0.002), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, live=live, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    for _ in range(10):
        next(iterator)
    before = pipeline.stats().stages["load"]
    for _ in range(60):
        next(iterator)
    after = pipeline.stats().stages["load"]
    pipeline.close()
    items = after.items - before.items
    service_s, cpu_s = (after.busy_s - before.busy_s) / items, (after.cpu_s - before.cpu_s) / items
    assert items == 60
    # 24 ms a batch on a free machine, of which 8 are computed; a busy one is slower.
    assert 0.020 < service_s < 0.2 and 0.005 < cpu_s < 0.6 * service_s
    # A loop that does nothing keeps both busy.
    assert after.blocked_s - before.blocked_s < 0.5 * (after.busy_s - before.busy_s)
    assert after.worker_bytes > 0


def test_batches_that_wait_are_seen() -> None:
    loader = DataLoader(Rows(400), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    time.sleep(0.5)
    seen = pipeline.stats().stages["load"]
    assert seen.capacity == 4 and seen.queued >= 3
    pipeline.close()


def test_the_cpu_of_workers_that_end_with_a_short_epoch_is_counted() -> None:
    loader = DataLoader(Rows(160, spin_s=0.002), batch_size=BATCH, num_workers=1)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    for _ in range(2):
        for _ in loader:
            pass
    seen = pipeline.stats().stages["load"]
    assert 0.5 * 0.008 < seen.cpu_s / seen.items < 3 * 0.008
    pipeline.close()


def spent_s(pipeline: Any) -> float:
    """Seconds the training loop has spent starting workers, the loader's own and ours."""
    return float(pipeline._engines.startup.total_s + pipeline._engines.stock_startup.total_s)


def test_the_start_of_workers_is_measured_and_charged_where_each_epoch_pays_it() -> None:
    loader = DataLoader(Rows(), batch_size=BATCH)
    pipeline = find(loader, workers_kind="process").pipeline
    guessed_s = pipeline.stages()[0].startup_s
    assert 0.01 < guessed_s < 0.5 and spent_s(pipeline) < 0.05
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 2})
    next(iterator)
    measured_s = pipeline.stages()[0].startup_s
    assert 0.0 < measured_s != guessed_s and spent_s(pipeline) >= 2 * measured_s
    pipeline.close()
    for options in ({"workers_kind": "thread"}, {}):
        loader = DataLoader(Rows(), batch_size=BATCH, num_workers=1, persistent_workers=True)
        pipeline = find(loader, **options).pipeline
        pipeline.prepare()
        assert len(list(loader)) == ROWS // BATCH
        assert pipeline.stages()[0].startup_s == 0.0 and spent_s(pipeline) > 0.0
        pipeline.close()


def test_a_new_epoch_starts_the_users_workers_and_the_rest_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Rows(400, sleep_s=0.002), batch_size=BATCH, num_workers=2)
    pipeline = find(loader, workers_kind="process").pipeline
    pipeline.prepare()
    pipeline.resize({"load": 8, "load.window": 16})
    start = multiprocessing.process.BaseProcess.start
    started = []

    def slow(process) -> None:
        started.append(process)
        time.sleep(0.1)
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", slow)
    iterator = iter(loader)
    assert len(started) == 2
    next(iterator)
    assert len(started) < 8
    for _ in range(20):
        next(iterator)
    assert len(started) == 8 and iterator.engine.workers == 8
    pipeline.close()


@pytest.mark.parametrize("taken_over", [False, True])
def test_what_people_reach_for_in_an_iterator_besides_batches(taken_over) -> None:
    """MosaicML's Composer, federated loops and scripts that clean up end the workers of the iterator a loader keeps."""
    loader = DataLoader(Rows(sleep_s=0.001), batch_size=BATCH, num_workers=2, persistent_workers=True)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    expected = list(range(ROWS))
    for _ in range(2):
        seen: list[int] = []
        for number, batch in enumerate(loader, 1):
            seen += batch.flatten().tolist()
            if number == 3 and taken_over:
                pipeline.resize({"load": 3, "load.window": 7})
            kept = loader._iterator
            assert kept._num_yielded == number
            assert kept._dataset is loader.dataset
            assert (kept._num_workers, kept._drop_last, kept._shutdown) == (2, False, False)
            assert all(worker.is_alive() for worker in kept._workers)
        assert seen == expected
        assert len(kept._workers) >= 2
        kept._shutdown_workers()
        assert kept._shutdown
        assert not children()
        loader._iterator = None
    with pytest.raises(AttributeError):
        kept.nobody_knows_this  # noqa: B018
    pipeline.close()
