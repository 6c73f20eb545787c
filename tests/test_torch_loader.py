"""A DataLoader that is being resized delivers what the untouched one delivers."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from intune_callbacks import Clock, WorkerDied  # noqa: E402
from intune_callbacks.pipelines.check import check_pipeline  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402


class Squares(Dataset):
    """Sample i is (i, i^2 as a tensor); some samples are slow."""

    def __init__(self, n: int = 120) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        if i % 37 == 5:
            time.sleep(0.003)
        return i, torch.full((3,), float(i * i))


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor([i]) for i in range(first, 120, step))


def key(batch):
    """A batch as nested lists, comparable with ==."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, (list, tuple)):
        return [key(part) for part in batch]
    return batch


def stock(make) -> list:
    """What the loader delivers with num_workers=0 and without us."""
    torch.manual_seed(0)
    return [key(batch) for batch in make(num_workers=0)]


def live(make, **arguments):
    """Build a pipeline and its running iterator, as `check_pipeline` wants them."""
    torch.manual_seed(0)
    loader = make()
    found = find(loader, **{"workers_kind": "process"} | arguments)
    assert found.pipeline is not None, found.why
    return found.pipeline, found.pipeline.adopt(iter(loader))


def pairs(samples):
    """A collate function of the user's."""
    return [s[0] for s in samples], torch.stack([s[1] for s in samples])


LOADERS = {
    "sequential": dict(batch_size=4),
    "shuffled": dict(batch_size=4, shuffle=True),
    "drop_last": dict(batch_size=7, shuffle=True, drop_last=True),
    "collate": dict(batch_size=4, collate_fn=pairs),
    "unbatched": dict(batch_size=None),
    "persistent": dict(batch_size=4, shuffle=True, persistent_workers=True),
    "prefetch": dict(batch_size=4, prefetch_factor=5),
}


def make(name: str):
    extra = LOADERS[name]

    def build(num_workers: int = 2):
        only_with_workers = ("persistent_workers", "prefetch_factor")
        arguments = {k: v for k, v in extra.items() if num_workers or k not in only_with_workers}
        return DataLoader(Squares(), num_workers=num_workers, **arguments)

    return build


@pytest.mark.parametrize("name", sorted(LOADERS))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_map_style_is_exact_while_resized(name: str, num_workers: int) -> None:
    build = make(name)
    made = check_pipeline(lambda: live(lambda: build(num_workers)), stock(build), key=key, resizes=20)
    assert made > 5


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: dict(sampler=RandomSampler(Squares(), generator=torch.Generator().manual_seed(3)), batch_size=4),
        lambda: dict(sampler=WeightedRandomSampler(torch.ones(120), 80), batch_size=4),
        lambda: dict(batch_sampler=BatchSampler(range(119, -1, -1), 5, False)),
    ],
    ids=["random", "weighted", "batch_sampler"],
)
def test_any_sampler(sampler) -> None:
    def build(num_workers: int = 2):
        return DataLoader(Squares(), num_workers=num_workers, **sampler())

    check_pipeline(lambda: live(build), stock(build), key=key, resizes=20)


def test_threads_when_asked_for() -> None:
    build = make("shuffled")
    check_pipeline(lambda: live(build, workers_kind="thread"), stock(build), key=key, resizes=30)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method: str) -> None:
    def build(num_workers: int = 1):
        context = method if num_workers else None
        return DataLoader(Squares(40), batch_size=8, num_workers=num_workers, multiprocessing_context=context)

    check_pipeline(lambda: live(build), stock(build), key=key, resizes=2, resize_limit_s=20.0)


def test_iterable_style_keeps_its_workers_and_order() -> None:
    def build():
        return DataLoader(Stream(), batch_size=4, num_workers=2)

    expected = [key(batch) for batch in build()]
    pipeline, _ = live(build)
    assert {s.name: s.low == s.high for s in pipeline.stages()} == {"load": True, "load.window": False}
    pipeline.close()
    check_pipeline(lambda: live(build), expected, key=key, resizes=30)


def test_two_iterators_of_one_iterable_loader_keep_apart() -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=2, timeout=20)
    expected = [key(batch) for batch in loader]
    pipeline = find(loader, workers_kind="process").pipeline
    first, second = (pipeline.adopt(iter(loader)) for _ in range(2))
    pipeline.resize({"load.window": 3})
    got = [(key(one), key(other)) for one, other in zip(first, second, strict=True)]
    assert got == [(batch, batch) for batch in expected]
    pipeline.close()


def test_iterable_style_without_workers_says_what_would_help() -> None:
    found = find(DataLoader(Stream(), num_workers=0))
    assert found.pipeline is None
    assert "num_workers=1" in found.why


def test_stateful_loader_keeps_its_state_exact() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build():
        return stateful.StatefulDataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2)

    torch.manual_seed(0)
    expected = [key(batch) for batch in build()]
    check_pipeline(lambda: live(build), expected, key=key, resizes=30)

    torch.manual_seed(0)
    loader = build()
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    head = []
    for number in range(13):
        head.append(key(next(iterator)))
        pipeline.resize({"load.window": 1 + number % 5})
    state = loader.state_dict()
    pipeline.close()
    del iterator
    resumed = build()
    resumed.load_state_dict(state)
    assert head + [key(batch) for batch in resumed] == expected


def test_epochs_are_the_stock_epochs() -> None:
    for name in ("shuffled", "persistent"):
        build = make(name)
        torch.manual_seed(0)
        plain = build(2)
        expected = [[key(batch) for batch in plain] for _ in range(3)]
        torch.manual_seed(0)
        loader = build(2)
        pipeline = find(loader, workers_kind="process").pipeline
        first = pipeline.adopt(iter(loader))
        assert [key(batch) for batch in first] == expected[0]
        pipeline.resize({"load": 3, "load.window": 5})
        assert [[key(batch) for batch in loader] for _ in range(2)] == expected[1:]
        pipeline.close()
        assert "_get_iterator" not in vars(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trainer_that_stops_at_the_length_leaves_the_sampler_as_the_stock_loader_does(num_workers: int) -> None:
    """RandomSampler draws once more at its end: whoever looks ahead of the consumer changes the next epoch."""

    def epochs(live: bool) -> list:
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            Squares(98), batch_size=4, shuffle=True, drop_last=True, generator=generator, num_workers=num_workers
        )
        pipeline = find(loader, workers_kind="process").pipeline
        out = []
        for _ in range(3):
            iterator = pipeline.adopt(iter(loader)) if live else iter(loader)
            out.append([key(next(iterator)) for _ in range(len(loader))])
        pipeline.close()
        return out

    assert epochs(True) == epochs(False)


def test_children_see_the_dataset_as_it_is_at_each_epoch() -> None:
    """A dataset changed between two epochs (set_epoch) must not be served from an old fork."""

    class Epochs(Dataset):
        epoch = 0

        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int):
            return 100 * self.epoch + i

    dataset = Epochs()
    loader = DataLoader(dataset, batch_size=3, num_workers=1)
    pipeline = find(loader, workers_kind="process").pipeline
    first = pipeline.adopt(iter(loader))  # kept, as a trainer does: its children are still there
    assert [b.tolist() for b in first] == [[0, 1, 2], [3, 4, 5]]
    dataset.epoch = 1
    assert [b.tolist() for b in loader] == [[100, 101, 102], [103, 104, 105]]
    pipeline.close()


class Noisy(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int):
        return torch.rand(1).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("workers", [1, 3])
def test_random_state_belongs_to_the_batch(workers: int) -> None:
    def run(workers: int) -> list:
        torch.manual_seed(0)
        loader = DataLoader(Noisy(), batch_size=4, num_workers=0)
        pipeline = find(loader, workers_kind="process").pipeline
        iterator = pipeline.adopt(iter(loader))
        pipeline.resize({"load": workers, "load.window": 6})
        out = [key(batch) for batch in iterator]
        pipeline.close()
        return out

    drawn = run(workers)
    assert drawn == run(2)
    assert len({tuple(part) for batch in drawn for part in batch}) == 3 * len(drawn)


def init_value(worker_id: int) -> None:
    os.environ["INTUNE_TEST_WORKER"] = str(worker_id)


class SeesWorker(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int):
        assert get_worker_info().id == int(os.environ["INTUNE_TEST_WORKER"])
        return i


def test_worker_init_fn_and_worker_info() -> None:
    loader = DataLoader(SeesWorker(), batch_size=2, num_workers=1, worker_init_fn=init_value)
    pipeline = find(loader, workers_kind="process").pipeline
    assert [b.tolist() for b in pipeline.adopt(iter(loader))] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    pipeline.close()


class Faulty(Squares):
    def __init__(self, bad: int, how: str) -> None:
        super().__init__(40)
        self.bad, self.how = bad, how

    def __getitem__(self, i: int):
        if i == self.bad and self.how == "raise":
            raise KeyError("the user's own error")
        if i == self.bad and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if i == self.bad and self.how == "hang":
            time.sleep(30)
        return super().__getitem__(i)[0]


def consume(pipeline, iterator):
    """Return (batches before the error, error, batches after it)."""
    before, after, error = [], [], None
    while True:
        try:
            (before if error is None else after).append(next(iterator).tolist())
        except StopIteration:
            pipeline.close()
            return before, error, after
        except Exception as raised:
            assert error is None
            error = raised


def adopted(dataset, **arguments):
    loader = DataLoader(dataset, batch_size=4, **arguments)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 2, "load.window": 4})
    return pipeline, iterator


def test_an_error_surfaces_at_its_batch_with_the_workers_traceback() -> None:
    before, error, after = consume(*adopted(Faulty(13, "raise")))
    assert len(before) == 3 and before[-1] == [8, 9, 10, 11]
    assert isinstance(error, KeyError) and "__getitem__" in str(error.__cause__)
    assert after == [[i, i + 1, i + 2, i + 3] for i in range(16, 40, 4)]


def test_a_killed_worker_is_an_error_at_its_batch_and_training_could_go_on() -> None:
    before, error, after = consume(*adopted(Faulty(13, "kill")))
    assert len(before) == 3
    assert isinstance(error, WorkerDied) and "exit code -9" in str(error)
    assert after == [[i, i + 1, i + 2, i + 3] for i in range(16, 40, 4)]


def test_a_hanging_worker_times_out_and_closing_does_not_wait_for_it() -> None:
    pipeline, iterator = adopted(Faulty(13, "hang"), num_workers=1, timeout=1)
    got = [next(iterator).tolist() for _ in range(3)]
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iterator)
    begin_s = time.monotonic()
    pipeline.close()
    assert time.monotonic() - begin_s < 8 and got[-1] == [8, 9, 10, 11]


def test_nothing_outlives_an_iterator_that_is_dropped() -> None:
    _pipeline, iterator = adopted(Squares())
    next(iterator)
    children = iterator.pool.pids
    assert children
    del iterator
    assert not [t for t in threading.enumerate() if t.name.startswith("intune-")]
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_parked_children_are_used_again() -> None:
    pipeline, iterator = adopted(Squares(400))
    next(iterator)
    pipeline.resize({"load": 4, "load.window": 8})
    for _ in range(10):
        next(iterator)
    children = set(iterator.pool.pids)
    pipeline.resize({"load": 1})
    for _ in range(20):
        next(iterator)
    pipeline.resize({"load": 4})
    for _ in range(10):
        next(iterator)
    assert set(iterator.pool.pids) == children and len(children) == 4
    pipeline.close()


def test_watching_changes_nothing_and_estimates_the_batch_time() -> None:
    build = make("shuffled")
    expected = stock(build)
    for workers in (0, 2):
        torch.manual_seed(0)
        loader = build(workers)
        pipeline = find(loader, live=False, clock=Clock()).pipeline
        iterator = pipeline.adopt(iter(loader))
        threads = threading.active_count()
        got = []
        for batch in iterator:
            got.append(key(batch))
            applied = pipeline.resize({"load": 5, "load.window": 9})
            assert applied["load"] == workers
        assert got == expected and threading.active_count() <= threads
        assert pipeline.stats().stages["load"].busy_s > 0
        pipeline.close()
