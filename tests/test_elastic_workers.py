"""The resizable stage where workers fail, leave, are added late, or are none at all."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from busy_machine import eventually
from stage_work import counted, plain, work

from intune_callbacks import WorkerDied
from intune_callbacks.pipelines import base
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.line import Hold
from intune_callbacks.pipelines.workers.processes import ProcessPool


def test_stop_iteration_from_the_function_is_an_error_not_an_end() -> None:
    def fn(x: int) -> int:
        if x == 3:
            raise StopIteration
        return x

    stage = ElasticMap(iter(range(6)), fn, workers=2, window=4)
    got = [next(stage) for _ in range(3)]
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(stage)
    assert got + list(stage) == [0, 1, 2, 4, 5]
    stage.close()


@pytest.mark.timeout(20)
def test_a_thread_that_dies_before_it_runs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of memory: it is as one that could not be started, and its work is not done later, either."""
    stage = ElasticMap(iter(range(8)), plain, workers=1, window=2)
    monkeypatch.setattr(base, "BEGIN_S", 0.05, raising=False)
    before, held = threading.enumerate(), []

    def lost(run: Callable[[], None], *_: object, **__: object) -> None:
        held.append(run)

    with monkeypatch.context() as patched:
        for name in ("_start_new_thread", "_start_joinable_thread"):  # up to Python 3.12, and from 3.13 on
            patched.setattr(threading, name, lost, raising=False)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            stage.resize(workers=2)
    assert threading.enumerate() == before
    held[0].__self__.run()  # type: ignore[attr-defined]
    assert list(stage) == [plain(x) for x in range(8)]
    stage.close()


def end_at_five(end: Callable[[], None], x: int) -> int:
    if x == 5:
        end()
    return x


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "is killed by signal: Killed. Often that is the kernel's out-of-memory killer.",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "is killed by signal: Terminated."),
        (lambda: os._exit(3), "exited unexpectedly with exit code 3."),
    ],
    ids=["killed", "terminated", "left"],
)
def test_a_child_that_died_is_replaced_and_only_of_a_killed_one_memory_is_told(
    end: Callable[[], None], how: str
) -> None:
    pool = ProcessPool(partial(end_at_five, end), multiprocessing.get_context("fork"))
    stage = ElasticMap(iter(range(12)), None, workers=1, window=3, pool=pool)
    got = [next(stage) for _ in range(5)]
    with pytest.raises(WorkerDied, match=rf"DataLoader worker \(pid \d+\) {re.escape(how)}\s*$"):
        next(stage)
    assert got + list(stage) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    stage.close()
    pool.close()


def test_items_fed_to_a_worker_that_leaves_are_computed_by_the_consumer() -> None:
    """The first version hung: the worker left with its inbox full, and nobody looked there."""
    gate = threading.Event()
    by: list = []

    def fn(x: int) -> int:
        by.append((x, threading.current_thread() is threading.main_thread()))
        if x == 0:
            gate.wait(10)
        return x

    stage = ElasticMap(iter(range(9)), fn, inline=fn, workers=1, window=5, feed=True)
    stage.prime()
    assert eventually(lambda: by, 9.0)
    stage.resize(0)
    threading.Timer(0.1, gate.set).start()
    assert list(stage) == list(range(9))
    assert by == [(0, False)] + [(x, True) for x in range(1, 9)]
    assert stage.close()


def test_without_workers_nothing_is_pulled_ahead_or_past_the_end() -> None:
    taken: list = []
    stage = ElasticMap(counted(5, taken), work, inline=work, workers=0, window=8, feed=True, hold=Hold(5))
    for number in range(1, 6):
        stage.prime()
        assert plain(next(stage)) == number - 1 and len(taken) == number
    assert not stage._line.exhausted
    assert next(stage, None) is None and next(stage, None) is None
    assert stage.stats().items == 5 and stage.close()


@pytest.mark.parametrize("end", ["close", "resize"])
def test_a_stage_without_workers_can_be_closed_or_grown(end: str) -> None:
    stage = ElasticMap(iter(range(20)), work, inline=work, workers=0, window=3, feed=True)
    got = [plain(next(stage)) for _ in range(4)]
    if end == "close":
        assert stage.close() and next(stage, "end") == "end"
    else:
        stage.resize(3)
        assert got + [plain(result) for result in stage] == list(range(20))
        assert stage.close()


def test_without_a_function_for_it_one_worker_stays() -> None:
    stage = ElasticMap(iter(range(5)), work, workers=2, window=3, feed=True)
    stage.resize(0)
    assert stage.workers == 1 and [plain(result) for result in stage] == list(range(5))
    stage.close()


def test_a_stage_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(work, multiprocessing.get_context("fork"))
    get, given = pool.get, []

    def failing():
        if len(given) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        given.append(get())
        return given[-1]

    monkeypatch.setattr(pool, "get", failing)
    with pytest.raises(BlockingIOError):
        ElasticMap(iter(range(5)), None, workers=4, pool=pool, name="half")
    assert not [t for t in threading.enumerate() if t.name == "intune-half"]
    assert pool.idle == 2
    pool.close()
    assert not pool.pids


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
@pytest.mark.parametrize("what", ["fork", "pipe"])
def test_a_process_that_cannot_be_had_takes_no_descriptors(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(work, multiprocessing.get_context("fork"))
    good, calls = getattr(os, what), [0]

    def failing() -> object:
        calls[0] += 1
        if what == "pipe" and calls[0] % 2:
            return good()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, what, failing)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            pool.get()
    assert os.listdir("/proc/self/fd") == before
    pool.close()


def test_growth_acts_while_items_are_left_though_the_source_has_ended() -> None:
    """Repro 27: an epoch that fits into the window was never grown."""
    gate = threading.Event()
    stage = ElasticMap(iter(range(8)), lambda x: gate.wait(10) and x, workers=1, window=20, feed=True, name="grown")
    stage.prime()
    stage.resize(4)
    assert len([t for t in threading.enumerate() if t.name == "intune-grown"]) == 4
    gate.set()
    assert list(stage) == list(range(8))
    stage.close()


def test_the_start_of_children_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(work, multiprocessing.get_context("fork"))
    first = pool.get()
    once_s = pool.startup.total_s
    assert pool.startup.count == 1 and once_s > 0
    pool.put(first)
    assert pool.get() is first and pool.startup.count == 1 and pool.startup.total_s == once_s
    pool.put(first)
    pool.close()


def test_a_keyboard_interrupt_in_the_consumer_leaves_the_stage_usable() -> None:
    gate = threading.Event()

    def fn(x: int) -> int:
        if x == 2:
            gate.wait(10)
        return x

    stage = ElasticMap(iter(range(6)), fn, workers=1, window=2)
    got = [next(stage), next(stage)]
    # A shell that starts its jobs in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(stage)
    finally:
        signal.signal(signal.SIGINT, before)
    gate.set()
    assert got + list(stage) == list(range(6))
    assert stage.close()


def test_children_end_whatever_the_collector_takes_first() -> None:
    """An error's traceback makes a cycle of an iterator and all that it has; what is older goes before it."""

    class Holder:
        def __init__(self, pool: ProcessPool) -> None:
            self.pool, self.itself = pool, self

        def __del__(self) -> None:
            self.pool.close()

    pool = ProcessPool(abs, multiprocessing.get_context("fork"))
    assert eventually(partial(pool.prepare, 2))
    processes = pool.processes
    Holder(pool)
    del pool
    gc.collect()
    assert [process.exitcode for process in processes] == [0, 0]


def test_the_collector_may_close_a_pool_in_the_thread_that_watches_its_idle_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool: Any = ProcessPool(abs, multiprocessing.get_context("fork"))
    closed, stock = threading.Event(), threading._allocate_lock

    def collected() -> Any:
        """A thread that begins to wait for an event makes a lock, which may call the collector, inside the event's."""
        if threading.current_thread().name == "intune-reaper":
            monkeypatch.undo()
            pool.close()
            closed.set()
        return stock()

    child = pool.get()
    monkeypatch.setattr(threading, "_allocate_lock", collected)
    pool.put(child, surplus=True)
    assert eventually(closed.is_set, within_s=20.0)
    assert eventually(lambda: not child.process.is_alive())
