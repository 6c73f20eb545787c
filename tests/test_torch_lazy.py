"""A DataLoader is left alone until other numbers are asked for, and a stock one again when they are the user's."""

from __future__ import annotations

import gc
import os
from multiprocessing.util import Finalize

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from processes import children  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, RandomSampler  # noqa: E402
from torch_rows import BATCH, ROWS, Eager, Noisy, Rows, engines, plain, seeded  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402

FEW = settings(max_examples=20, suppress_health_check=list(HealthCheck))
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


def fails_at_its_end(worker: int) -> None:
    Finalize(None, os._exit, args=(1,), exitpriority=0)


def test_the_users_workers_are_let_go_whatever_they_end_with() -> None:
    """Where one of its workers ends with an error torch raises in the training. In Python 3.11 all do that a thread of
    TensorFlow's has forked."""
    loader = DataLoader(Rows(sleep_s=0.01), batch_size=BATCH, num_workers=2, worker_init_fn=fails_at_its_end)
    pipeline = find(loader).pipeline
    iterator = pipeline.adopt(iter(loader))
    next(iterator)
    stock = iterator._workers
    pipeline.resize({"load": 3})
    assert len(list(iterator)) == ROWS // BATCH - 1
    assert iterator.engine is not None
    assert [worker.exitcode for worker in stock] == [1, 1]
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
