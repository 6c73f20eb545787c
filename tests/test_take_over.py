"""Stock workers stay fed until ours can compute; then ours go on where the sampler is, and no batch shows when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from busy_machine import eventually

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402

PATIENCE_S = 240.0  # a process that imports torch takes half a minute on a busy machine


class Squares(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, i * i])


def waits(folder: Path, worker_id: int) -> None:
    """What a worker begins with: no end while there is a file ``closed``, its own end where there is one ``die``."""
    while (folder / "closed").exists():
        if (folder / "die").exists():
            os._exit(5)
        time.sleep(0.01)


def loader_of(folder: Path, items: int, method: str = "fork", **options: Any) -> DataLoader[Any]:
    torch.manual_seed(7)
    return DataLoader(
        Squares(items),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        worker_init_fn=partial(waits, folder),
        **options,
    )


def epochs_of(loader: DataLoader[Any], count: int = 1) -> list[list[Any]]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def until(true: Callable[[], bool], iterator: Any, got: list[Any]) -> None:
    """Go on with the training until something is so."""
    until_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until_s
        got.append(next(iterator).tolist())
        time.sleep(0.02)


def take_over(folder: Path, method: str, items: int) -> None:
    """Batches go on while our first workers, and then more of them, cannot compute yet."""
    (expected,) = epochs_of(loader_of(folder, items, method))
    loader = loader_of(folder, items, method)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    got = [next(iterator).tolist() for _ in range(3)]
    (folder / "closed").touch()
    assert pipeline.resize({"load": 3, "load.window": 6}) == {"load": 3, "load.window": 6}
    got += [next(iterator).tolist() for _ in range(20)]  # five times what stock workers have in flight
    assert iterator.engine is None and len(iterator.children.pool.pids) == 2 and pipeline.is_growing
    (folder / "closed").unlink()
    until(lambda: iterator.engine is not None and iterator.engine.delivered > 0, iterator, got)
    until(lambda: iterator.engine.workers == 3 and not iterator.children.pool.starting, iterator, got)
    until(lambda: not pipeline.is_growing, iterator, got)

    (folder / "closed").touch()
    pipeline.resize({"load": 5, "load.window": 10})
    until(lambda: iterator.children.pool.starting > 0, iterator, got)
    got += [next(iterator).tolist() for _ in range(50)]
    assert iterator.children.pool.starting > 0
    pipeline.resize({"load": 2})
    got += [next(iterator).tolist() for _ in range(20)]
    pipeline.resize({"load": 4})
    (folder / "closed").unlink()
    until(lambda: iterator.engine.workers == 4 and not iterator.children.pool.starting, iterator, got)
    got += [batch.tolist() for batch in iterator]
    assert got == expected and pipeline.why_not == ""
    pipeline.close()


def test_batches_go_on_while_ours_begin(tmp_path: Path) -> None:
    take_over(tmp_path, "fork", 4_000)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_ends_before_ours_can_compute(persistent: bool, tmp_path: Path) -> None:
    expected = epochs_of(loader_of(tmp_path, 60, persistent_workers=persistent), 4)
    loader = loader_of(tmp_path, 60, persistent_workers=persistent)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    got = [[next(iterator).tolist() for _ in range(2)]]  # one of each stock worker: they have begun
    (tmp_path / "closed").touch()
    pipeline.resize({"load": 3})
    got[0] += [batch.tolist() for batch in iterator]
    assert iterator.engine is None
    if persistent:  # its stock workers are there, and begin the next one
        got += epochs_of(loader)
        assert loader._iterator.engine is None
    (tmp_path / "closed").unlink()
    got += epochs_of(loader, 4 - len(got))
    assert got == expected
    pipeline.close()


@pytest.mark.parametrize("how", ["own", "die", "release", "close", "drop"])
def test_ours_are_let_go_before_they_can_compute(how: str, tmp_path: Path) -> None:
    (expected,) = epochs_of(loader_of(tmp_path, 400))
    loader = loader_of(tmp_path, 400)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    got = [next(iterator).tolist() for _ in range(2)]
    (tmp_path / "closed").touch()
    pipeline.resize({"load": 3})
    got.append(next(iterator).tolist())
    pool = iterator.children.pool
    assert len(pool.pids) == 2
    if how == "own":
        pipeline.resize({"load": 2, "load.window": 4})
        (tmp_path / "closed").unlink()
    elif how == "die":
        (tmp_path / "die").touch()
        until(lambda: pipeline.why_not != "", iterator, got)
        assert "died before it could compute" in pipeline.why_not
        assert pipeline.resize({}) == {"load": 2, "load.window": 4}
    elif how == "release":
        pipeline.release()
        (tmp_path / "closed").unlink()
    elif how == "close":
        pipeline.close()
    else:
        del iterator
        assert pool.pids == ()
        return
    if how == "close":
        assert pool.pids == ()
    got += [batch.tolist() for batch in iterator]
    assert got == expected and iterator.engine is None
    pipeline.close()


def test_ours_with_no_workers_before(tmp_path: Path) -> None:
    """The training loop goes on computing itself."""
    (expected,) = epochs_of(loader_of(tmp_path, 400))
    loader = DataLoader(
        Squares(400),
        batch_size=4,
        sampler=[pair[0] for batch in expected for pair in batch],
        worker_init_fn=partial(waits, tmp_path),
        multiprocessing_context=None,
    )
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    (tmp_path / "closed").touch()
    pipeline.resize({"load": 2})
    got = [next(iterator).tolist() for _ in range(20)]
    assert iterator.engine is None
    (tmp_path / "closed").unlink()
    until(lambda: iterator.engine is not None, iterator, got)
    got += [batch.tolist() for batch in iterator]
    assert got == expected
    pipeline.close()


@pytest.mark.parametrize("how", ["release", "close"])
def test_a_loader_that_keeps_its_workers_goes_on_with_the_orders_of_stock(how: str, tmp_path: Path) -> None:
    """A new iterator would draw a seed that the kept one of stock does not draw."""
    stock = loader_of(tmp_path, 60, persistent_workers=True)
    expected, drawn = epochs_of(stock, 4), torch.rand(1)
    loader = loader_of(tmp_path, 60, persistent_workers=True)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 3})
    assert eventually(lambda: not iterator.children.are_late())
    got = [[batch.tolist() for batch in iterator]]
    got += epochs_of(loader)
    assert iterator.engine is not None
    getattr(pipeline, how)()
    got += epochs_of(loader)
    again = find(loader, workers_kind="process").pipeline
    got.append([batch.tolist() for batch in again.adopt(iter(loader))])
    assert got == expected and torch.equal(torch.rand(1), drawn)
    again.close()


class Stops(Squares):
    def __getitem__(self, i: int) -> Any:
        if i == 3:
            raise StopIteration
        return super().__getitem__(i)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_an_item_that_stops_the_iteration_ends_the_epoch_as_in_stock(prefetch: int) -> None:
    """Whether a worker of ours gets it, or behind the first batch one of the stock iterator has it already."""
    loader = DataLoader(Stops(40), batch_size=None, num_workers=2, prefetch_factor=prefetch)
    pipeline = find(loader).pipeline
    assert pipeline is not None
    pipeline.prepare()
    for _ in range(3):
        seen = []
        for number, batch in enumerate(loader):
            seen.append(int(batch[0]))
            if number == 0:
                pipeline.resize({"load": 3, "load.window": 8})
        assert seen == [0, 1, 2]
    pipeline.close()


class Days(Dataset[Any]):
    """As DLRM's memory-mapped Criteo rows: a day is loaded by whoever is asked for its first one."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> Any:
        if i % 80 == 0:
            self.day = list(range(i, i + 80))
        if i == self.bad:
            raise ValueError(f"row {i} is bad")
        return torch.tensor(self.day[i % 80])


def days(loader: DataLoader[Any], pipeline: Any = None) -> list[Any]:
    """Two epochs, in which others than the user's numbers are asked for again and again."""
    seen: list[Any] = []
    for _ in range(2):
        batches = iter(loader)
        for _ in range(41):
            if pipeline is not None:
                pipeline.resize({"load": 4, "load.window": 12})
            try:
                seen.append(next(batches).tolist())
            except (ValueError, StopIteration) as error:
                seen.append(type(error))
    return seen


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("bad", [-1, 12])
def test_items_that_depend_on_those_before_them_stay_with_the_users_worker(bad: int, persistent: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "persistent_workers": persistent}
    expected = days(DataLoader(Days(bad), **options))
    loader = DataLoader(Days(bad), **options)
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    try:
        assert days(loader, pipeline) == expected
        assert [(stage.low, stage.current, stage.high) for stage in pipeline.stages()] == [(1, 1, 1), (2, 2, 2)]
        assert "AttributeError" in pipeline.why_not
        assert "items of Days seem to depend on those before them" in pipeline.late_hints[0].what
    finally:
        pipeline.close()


@pytest.mark.parametrize("bad", [4, 8, 12, 16, 20])
def test_a_bad_row_is_the_users_wherever_ours_begin(bad: int) -> None:
    class Bad(Squares):
        def __getitem__(self, i: int) -> Any:
            if i == bad:
                raise ValueError(f"row {i} is bad")
            return super().__getitem__(i)

    expected = days(DataLoader(Bad(160), batch_size=4, num_workers=1))
    loader = DataLoader(Bad(160), batch_size=4, num_workers=1)
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    try:
        assert days(loader, pipeline) == expected
        assert pipeline.stages()[0].current == 4 and not pipeline.late_hints
    finally:
        pipeline.close()
