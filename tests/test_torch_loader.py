"""A DataLoader that is being resized delivers what the untouched one delivers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torch_squares import LOADERS, Squares, Stream, key, live, make, stock  # noqa: E402

from intune_callbacks import Clock  # noqa: E402
from intune_callbacks.pipelines.check import check_pipeline  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402


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


class Stateful:
    """A sampler whose iterator has the state; begun anew and skipped to the place it would give others."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Stateful:
        return self if self.at else Stateful()

    def __next__(self) -> int:
        if self.at == 40:
            raise StopIteration
        self.at += 1
        return self.at * 7 % 40

    def __len__(self) -> int:
        return 40

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Drawing:
    """A sampler that draws from the global random state as it goes."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(40) for _ in range(40))

    def __len__(self) -> int:
        return 40


def test_a_stateful_loader_with_a_sampler_that_draws_is_read_as_far_as_in_stock() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def run(window: int) -> tuple[list[int], float]:
        random.seed(0)
        loader = stateful.StatefulDataLoader(range(40), batch_size=None, sampler=Drawing(), num_workers=2)
        pipeline = find(loader).pipeline
        iterator = pipeline.adopt(iter(loader))
        for _ in range(5):
            next(iterator)
            pipeline.resize({"load.window": window} if window else {})
        pipeline.close()
        return list(loader), random.random()

    assert run(16) == run(1) == run(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_what_is_only_watched_is_the_stock_one(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def state(watched: bool) -> dict[str, object]:
        torch.manual_seed(0)
        loader = stateful.StatefulDataLoader(range(40), batch_size=None, sampler=Stateful(), num_workers=workers)
        pipeline = find(loader, live=False).pipeline
        iterator = pipeline.adopt(iter(loader)) if watched else iter(loader)
        for _ in range(5):
            next(iterator)
        pipeline.close()
        return loader.state_dict()

    expected, got = state(False), state(True)
    key = "_sampler_iter_state" if workers == 0 else "_snapshot"
    assert expected[key] is not None
    assert str(got) == str(expected)


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
