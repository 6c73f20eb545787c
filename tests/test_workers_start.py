"""A worker process computes nothing, and holds up nobody, before it says that it can; what it needs is pickled once."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from busy_machine import eventually

from intune_callbacks import WorkerDied
from intune_callbacks.pipelines.workers import processes as workers
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.payload import Payload
from intune_callbacks.pipelines.workers.processes import ProcessPool

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
PATIENCE_S = 60.0  # longer than any machine stalls; nothing waits for it that goes well


class Begins:
    """Workers from number `first` on wait for a file before they can compute; what the first returns is told."""

    told: Any = None

    def __init__(self, gate: Path, first: int = 0, last: int = 10**6) -> None:
        self.gate, self.first, self.last = gate, first, last

    def __call__(self, number: int) -> int:
        while self.first <= number <= self.last and not self.gate.exists():
            time.sleep(0.01)
        return 1000 + number


class Work:
    """Says which process computed an item, and what it was told."""

    def __init__(self, start: Begins) -> None:
        self.start = start

    def __call__(self, item: int) -> tuple[int, int, Any]:
        return item, os.getpid(), self.start.told


@pytest.fixture
def stage_of(tmp_path: Path) -> Iterator[Callable[..., ElasticMap[Any]]]:
    made: list[ElasticMap[Any]] = []

    def make(workers: int, first: int = 0, last: int = 10**6, **options: Any) -> ElasticMap[Any]:
        start = Begins(tmp_path / "gate", first, last)
        pool = ProcessPool(Work(start), options.pop("context", FORK), start)
        source = iter(range(options.pop("items", 10**6)))
        stage: ElasticMap[Any] = ElasticMap(
            source, None, workers=workers, window=2 * workers, pool=pool, timeout_s=PATIENCE_S, **options
        )
        made.append(stage)
        return stage

    yield make
    (tmp_path / "gate").touch()
    for stage in made:
        assert stage.close()
        assert stage.pool is not None
        stage.pool.close()
        assert stage.pool.pids == ()


def test_items_go_on_while_new_workers_cannot_compute(stage_of: Any, tmp_path: Path) -> None:
    stage = stage_of(2, first=2)
    seen = [next(stage) for _ in range(20)]
    stage.resize(6, 12)
    seen += [next(stage) for _ in range(200)]
    assert len({pid for _, pid, _ in seen}) <= 2
    (tmp_path / "gate").touch()
    assert eventually(lambda: seen.append(next(stage)) or len({pid for _, pid, _ in seen}) == 6)
    assert [item for item, _, _ in seen] == list(range(len(seen)))
    assert {told for _, _, told in seen} == {1000}


@pytest.mark.parametrize("fewer", [1, 2, 3])
def test_those_that_cannot_compute_leave_first(fewer: int, stage_of: Any, tmp_path: Path) -> None:
    stage = stage_of(2, first=2)
    next(stage)
    stage.resize(6, 12)
    stage.resize(fewer)
    seen = [next(stage) for _ in range(200)]
    assert eventually(lambda: stage.pool.idle == 6 - fewer)
    assert stage._threads.starting == max(0, fewer - 2) and stage.pool.starting == 4
    seen += [next(stage) for _ in range(20)]
    (tmp_path / "gate").touch()
    stage.resize(6, 12)  # they are there already
    assert eventually(lambda: seen.append(next(stage)) or len({pid for _, pid, _ in seen[-50:]}) == 6)
    assert [item for item, _, _ in seen] == list(range(1, len(seen) + 1))
    assert len(stage.pool.pids) == 6


@pytest.mark.parametrize("context", [FORK, SPAWN], ids=["fork", "spawn"])
def test_a_stage_closes_while_all_its_workers_begin(context: Any, stage_of: Any, tmp_path: Path) -> None:
    stage = stage_of(3, context=context)
    begin_s = time.monotonic()
    assert stage.close()
    stage.pool.close()
    assert stage.pool.pids == ()
    assert time.monotonic() - begin_s < PATIENCE_S / 2
    with pytest.raises(StopIteration):
        next(stage)


@pytest.mark.parametrize("feed", [False, True])
def test_a_consumer_waits_for_the_first_one_that_can_compute(feed: bool, stage_of: Any, tmp_path: Path) -> None:
    stage = stage_of(3, items=30, feed=feed)
    threading.Timer(0.2, (tmp_path / "gate").touch).start()
    assert [item for item, _, _ in stage] == list(range(30))


def test_nobody_computes_before_the_first_one_has_told(stage_of: Any, tmp_path: Path) -> None:
    stage = stage_of(3, last=0, items=30, feed=True)
    stage.prime()
    assert eventually(lambda: len(stage._line.inbox) == 6)
    time.sleep(0.3)  # for one that would not wait
    assert len(stage._line.inbox) == 6
    (tmp_path / "gate").touch()
    assert {told for _, _, told in stage} == {1000}


class Dies:
    told: Any = None

    def __call__(self, number: int) -> None:
        if number == 0:
            os._exit(3)


class Fails:
    told: Any = None

    def __call__(self, number: int) -> None:
        raise FileNotFoundError("the user's own")


def test_one_that_dies_as_it_begins_is_an_error_in_the_place_of_its_first_item() -> None:
    stage: ElasticMap[int] = ElasticMap(iter(range(40)), None, pool=ProcessPool(abs, FORK, Dies()))
    with pytest.raises(WorkerDied, match="exit code 3"):
        next(stage)
    assert list(stage) == list(range(1, 40))
    assert stage.close() and stage.pool is not None
    stage.pool.close()


@pytest.mark.parametrize("context", [FORK, SPAWN], ids=["fork", "spawn"])
def test_one_that_fails_to_begin_says_so_in_the_place_of_its_first_item(context: Any) -> None:
    stage: ElasticMap[int] = ElasticMap(iter(range(3)), None, pool=ProcessPool(abs, context, Fails()))
    for _ in range(3):
        with pytest.raises(FileNotFoundError, match="the user's own"):
            next(stage)
    with pytest.raises(StopIteration):
        next(stage)
    assert stage.close() and stage.pool is not None
    stage.pool.close()


# -- pickled once ----------------------------------------------------------------------------------------------------


class Held:
    """A dataset that knows how often it was pickled."""

    pickled = 0

    def __init__(self, **held: Any) -> None:
        self.rows = np.arange(300_000)
        self.held = held

    def __getstate__(self) -> dict[str, Any]:
        Held.pickled += 1
        return self.__dict__

    def __call__(self, item: int) -> Any:
        if "counter" in self.held:
            with self.held["counter"]:
                self.held["counter"].value += item
        if "lock" in self.held:
            with self.held["lock"]:
                pass
        if "queue" in self.held:
            self.held["queue"].put(item)
        if "descriptor" in self.held:
            return os.pread(self.held["descriptor"].number, 5, 0)
        return int(self.rows[item])


class Descriptor:
    """Of a file; pickled in the way of multiprocessing, for one process at its start."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return opened, (reduction.DupFd(self.number),)


def opened(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


def computed(held: Held, context: Any = SPAWN) -> list[Any]:
    """What two children make of it."""
    Held.pickled = 0
    pool = ProcessPool(held, context)
    children = [pool.get() for _ in range(2)]
    try:
        return [pool.call(child, 299_999, lambda: False)[0] for child in children]
    finally:
        for child in children:
            pool.put(child)
        pool.close()


def test_what_all_need_is_pickled_once() -> None:
    assert computed(Held()) == [299_999] * 2
    assert Held.pickled == 1


def test_what_is_shared_stays_shared() -> None:
    counter, lock, queue = SPAWN.Value("q", 0), SPAWN.Lock(), SPAWN.Queue()
    computed(Held(counter=counter, lock=lock, queue=queue))
    assert counter.value == 2 * 299_999
    assert [queue.get(timeout=PATIENCE_S) for _ in range(2)] == [299_999] * 2
    assert Held.pickled == 1
    queue.close()
    queue.join_thread()


def test_what_belongs_to_the_start_of_one_process_is_pickled_for_each(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    with (tmp_path / "file").open("rb") as file:
        assert computed(Held(descriptor=Descriptor(file.fileno()))) == [b"bytes"] * 2
    assert Held.pickled == 3  # once in vain


def test_what_cannot_be_pickled_is_the_error_of_the_start() -> None:
    with pytest.raises(Exception, match="pickle"):
        computed(Held(nothing=lambda: 0))


class Unwelcome:
    def __setstate__(self, state: Any) -> None:
        raise FileNotFoundError("not on this machine")

    def __getstate__(self) -> dict[str, Any]:
        return {"a": 1}


def test_what_cannot_be_unpickled_is_the_error_of_the_first_item() -> None:
    with pytest.raises(FileNotFoundError, match="not on this machine"):
        computed(Held(nothing=Unwelcome()))


def test_methods_and_partials_are_for_all_and_no_part() -> None:
    held = Held()
    payload = Payload([held.__call__, functools.partial(int, "7"), [].append, int.__add__, np.zeros(1 << 20)])
    assert payload.parts == []
    assert sum(part.nbytes for part in payload.message()) > 8 << 20
    assert sum(part.nbytes for part in payload.message()) > 8 << 20  # as often as it is wanted


def test_a_child_that_is_put_back_while_the_collector_closes_its_pool_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run in the thread that puts it back, between any two steps of it."""
    pool = ProcessPool(abs, FORK)
    child = pool.get()

    def collected() -> float:
        monkeypatch.undo()
        pool.close()
        return time.monotonic()

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=collected))
    pool.put(child, surplus=True)
    assert not child.process.is_alive() and not pool.pids
