"""What an audit broke in DataLoaders and mappers: whose random numbers count."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

from torch.utils.data import DataLoader, Dataset, get_worker_info  # noqa: E402
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([torch.rand(1).item(), random.random(), np.random.rand()], dtype=torch.float64)


def drawn(workers: int, rank: int | None = 0, seed: int = 42, epochs: int = 2, init: Any = None) -> list[Any]:
    """What the epochs draw that ours compute from the first batch on; the first epoch is stock."""
    torch.manual_seed(seed)
    if rank is not None:  # imported here, for started workers import this module
        init = partial(pytest.importorskip("lightning.fabric.utilities.seed").pl_worker_init_function, rank=rank)
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2, worker_init_fn=init)
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": workers, "load.window": 2 * workers + 1})
    out = [torch.cat(list(loader)) for _ in range(epochs)]
    pipeline.close()
    return out


def test_ranks_draw_other_numbers_as_with_the_stock_loader() -> None:
    own, other = drawn(3, rank=0), drawn(3, rank=1)
    for column in range(3):
        assert not torch.equal(own[0][:, column], other[0][:, column])


def test_no_sample_depends_on_how_many_workers_there_are() -> None:
    few, many = drawn(3), drawn(5)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))


@pytest.mark.parametrize("rank", [0, None])
def test_epochs_and_seeds_draw_other_numbers(rank: int | None) -> None:
    first, second = drawn(3, rank)
    assert len({float(value) for value in torch.cat([first, second]).reshape(-1)}) == 2 * 32 * 3
    again, other = drawn(3, rank), drawn(3, rank, seed=43)
    assert torch.equal(first, again[0])
    for column in range(3):
        assert not torch.equal(first[:, column], other[0][:, column])


def seeds_numpy(worker_id: int) -> None:
    np.random.seed(7)


def test_a_seed_of_the_users_own_counts() -> None:
    """The user wants the same numpy numbers in each epoch; Python's and torch's go on."""
    first, second = drawn(3, rank=None, init=seeds_numpy)
    assert torch.equal(first[:, 2], second[:, 2])
    assert len(set(first[:, 2].tolist())) == 32
    assert not torch.equal(first[:, 0], second[:, 0])
    assert not torch.equal(first[:, 1], second[:, 1])


def seeds_with_the_largest(worker_id: int) -> None:
    torch.manual_seed(-1)


def test_the_largest_seed_has_a_successor() -> None:
    (first,) = drawn(3, rank=None, init=seeds_with_the_largest, epochs=1)
    assert len(set(first[:, 0].tolist())) == 32


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_the_first_worker_tells_reaches_the_others_with_other_start_methods(method: str) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"multiprocessing_context": method, "worker_init_fn": seeds_numpy}
    loader = DataLoader(Noisy(), batch_size=8, num_workers=1, **options)
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": 2, "load.window": 6})
    first, second = (torch.cat(list(loader))[:, 2] for _ in range(2))
    pipeline.close()
    assert torch.equal(first, second)


class Asks(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        return info.id, info.num_workers


def test_worker_ids_stay_below_the_users_number() -> None:
    loader = DataLoader(Asks(), batch_size=1, num_workers=2)
    pipeline = find(loader).pipeline
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 6, "load.window": 12})
    seen = [tuple(int(part) for part in batch) for batch in iterator]
    pipeline.close()
    assert {number for _, number in seen} == {2}
    assert {worker for worker, _ in seen} <= {0, 1}


class OwnGenerator(Dataset[Any]):
    """Draws from a generator of its own, that `worker_init_fn` seeds."""

    own: random.Random

    def __len__(self) -> int:
        return 240

    def __getitem__(self, i: int) -> float:
        return self.own.random()


def seeds_as_told(worker_id: int) -> None:
    info = get_worker_info()
    info.dataset.own = random.Random(info.seed)


def seeds_as_torch(worker_id: int) -> None:
    get_worker_info().dataset.own = random.Random(torch.initial_seed())


@pytest.mark.parametrize("init", [seeds_as_told, seeds_as_torch])
def test_workers_that_take_over_draw_no_numbers_of_those_before_them(init: Any) -> None:
    loader = DataLoader(OwnGenerator(), batch_size=4, num_workers=2, worker_init_fn=init)
    pipeline = find(loader).pipeline
    iterator = pipeline.adopt(iter(loader))
    first = [next(iterator) for _ in range(3)]
    pipeline.resize({"load": 4, "load.window": 8})
    drawn = torch.cat([*first, *iterator]).tolist()
    pipeline.close()
    assert len(set(drawn)) == len(drawn) == 240


def test_workers_of_other_epochs_draw_other_numbers_however_often_they_change_places() -> None:
    given: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": seeds_as_told}
    loader = DataLoader(OwnGenerator(), batch_size=4, **given)
    pipeline = find(loader).pipeline
    iterator = pipeline.adopt(iter(loader))
    drawn = torch.cat(list(iterator)).tolist()
    for workers in (4, 2) * 4:  # 2: those of the stock loader
        pipeline.resize({"load": workers, "load.window": 2 * workers})
        drawn += torch.cat(list(loader)).tolist()
    pipeline.close()
    assert len(set(drawn)) == len(drawn) == 9 * 240


def augmented(i: int) -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def mapped(seed: int, workers: int) -> list[list[Any]]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loader = Loader(ParallelMapper(IterableWrapper(range(8)), augmented, num_workers=1, method="process"))
    pipeline = find(loader).pipeline
    pipeline.prepare()
    pipeline.resize({"augmented": workers})
    out = [list(loader) for _ in range(2)]
    pipeline.close()
    return out


def test_process_mappers_draw_other_numbers_in_each_epoch_and_for_each_seed() -> None:
    one = mapped(1, 1)
    assert len({value for epoch in one for item in epoch for value in item}) == 2 * 8 * 3
    assert one == mapped(1, 3)
    two = mapped(2, 1)
    assert not {value for epoch in one for item in epoch for value in item} & {
        value for epoch in two for item in epoch for value in item
    }


def test_process_mappers_leave_the_trainings_random_state_alone() -> None:
    mapped(1, 2)
    after = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert after == (torch.rand(1), random.random(), np.random.rand())
