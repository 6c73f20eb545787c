"""What an audit broke in the worker stage: no hang, no lost item, whatever a worker does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from busy_machine import eventually

from intune_callbacks import WorkerDied
from intune_callbacks.measure.freed import Freed
from intune_callbacks.pipelines import worker_cost
from intune_callbacks.pipelines.worker_cost import WorkerMemory
from intune_callbacks.pipelines.workers import processes as workers
from intune_callbacks.pipelines.workers import threads as elastic_threads
from intune_callbacks.pipelines.workers import wire
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.processes import ProcessPool

FORK = multiprocessing.get_context("fork")
MB = 1_000_000


def stage_of(fn: Callable[[Any], Any], source: Any, **options: Any) -> ElasticMap[Any]:
    return ElasticMap(iter(source), None, pool=ProcessPool(fn, FORK), **options)


def end(stage: ElasticMap[Any]) -> None:
    assert stage.close()
    assert stage.pool is not None
    stage.pool.close()
    assert stage.pool.pids == ()


# -- the pipe ------------------------------------------------------------------------------------------------------


def large(i: int) -> np.ndarray:
    return np.full(1_000_000, i, np.float32)


def test_a_default_timeout_of_sockets_is_nothing_to_the_pipe() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        stage = stage_of(large, range(6), workers=2, window=4)
        assert [int(batch[0]) for batch in stage] == list(range(6))
        end(stage)
    finally:
        socket.setdefaulttimeout(before)


def dies_in_mid_message(i: int) -> Any:
    if i != 2:
        return i
    if os.fork() == 0:  # a helper of the user's holds the pipe open
        time.sleep(30)
        os._exit(0)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return np.zeros(20_000_000)


def test_a_worker_killed_in_mid_message_is_noticed_though_its_helper_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(dies_in_mid_message, range(4), workers=1, window=2)
    known = set(psutil.pids())
    readv = os.readv

    def slowly(descriptor: int, buffers: list[memoryview]) -> int:
        time.sleep(0.02)
        return readv(descriptor, [buffers[0][:65536]])

    monkeypatch.setattr(wire.os, "readv", slowly)
    begin_s = time.monotonic()
    seen: list[Any] = []
    for _ in range(4):
        try:
            seen.append(next(stage))
        except WorkerDied:
            seen.append("died")
    assert seen == [0, 1, "died", 3]
    assert time.monotonic() - begin_s < 15.0
    end(stage)
    for pid in set(psutil.pids()) - known:
        if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == 1:
            os.kill(pid, signal.SIGKILL)


# -- the end of workers ----------------------------------------------------------------------------------------------


def dies_at_the_end(i: int) -> int:
    if i == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


def test_the_last_worker_dying_on_the_last_item_ends_the_epoch() -> None:
    stage = stage_of(dies_at_the_end, range(10), workers=1, window=20, feed=True)
    assert [next(stage) for _ in range(9)] == list(range(9))
    with pytest.raises(WorkerDied):
        next(stage)
    with pytest.raises(StopIteration):
        next(stage)
    end(stage)


def in_two_halves(path: Path) -> int:
    with path.open("w") as file:
        file.write("the one half,")
        file.flush()
        time.sleep(1.5)
        file.write(" the other")
    return os.getpid()


def test_a_worker_in_the_middle_of_an_item_ends_it_when_nobody_wants_it_any_more(tmp_path: Path) -> None:
    """It was killed within half a second: half a file stayed in the dataset's cache, or a lock was held for ever."""
    stage = stage_of(in_two_halves, [tmp_path / "first", tmp_path / "second"], workers=2, window=2)
    assert stage.pool is not None
    workers = set(stage.pool.pids)
    assert eventually(lambda: all((tmp_path / name).exists() for name in ("first", "second")))
    assert stage.close()
    assert {file.read_text() for file in tmp_path.iterdir()} == {"the one half, the other"}
    assert stage.pool.idle == 2 and set(stage.pool.pids) == workers
    end(stage)


PARENT = """
import multiprocessing, sys, time
from intune_callbacks.pipelines.workers.processes import ProcessPool
def work(i):
    time.sleep(60)  # in somebody's code that does not come back
if __name__ == "__main__":
    pool = ProcessPool(work, multiprocessing.get_context(sys.argv[1]))
    children = [pool.get() for _ in range(2)]
    for child in children:
        assert child.ready.wait(60.0)
        child.wire.send((0, None))
    print(*pool.pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_end_with_a_killed_parent_also_while_they_work(method: str, tmp_path: Any) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5 if method == "fork" else 2.0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_children_started_by_a_thread_that_ends_live_on() -> None:
    pool = ProcessPool(lambda i: i, FORK)
    started: list[Any] = []
    thread = threading.Thread(target=lambda: started.append(pool.get()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert pool.call(started[0], 7, lambda: False)[0] == 7
    pool.put(started[0])
    pool.close()


def test_children_nobody_needs_end_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PARKED_S", 0.3)
    stage = stage_of(lambda i: i, range(10**6), workers=5, window=10)
    assert stage.pool is not None
    for _ in range(50):
        next(stage)
    assert len(stage.pool.pids) == 5
    stage.resize(2)
    for _ in range(50):
        next(stage)
    assert eventually(lambda: len(stage.pool.pids) == 2)
    stage.resize(3)
    assert next(stage) == 100
    end(stage)


def test_an_alarm_ends_parked_children_at_once() -> None:
    stage = stage_of(lambda i: i, range(10**6), workers=4, window=8)
    assert stage.pool is not None
    for _ in range(20):
        next(stage)
    stage.resize(1)
    assert eventually(lambda: next(stage) is not None and stage.pool.idle == 3, 2.0)
    stage.pool.trim()
    assert eventually(lambda: len(stage.pool.pids) == 1, 2.0)
    end(stage)


def test_without_a_thread_to_be_had_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(lambda i: i, range(100), workers=3, window=6)
    assert stage.pool is not None
    next(stage)
    stock = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert WorkerMemory().read([os.getpid()]) == 0.0
    stage.resize(1)
    stage.pool.trim()
    assert Freed().give_back(now=False) is False
    assert [next(stage) for _ in range(20)] == list(range(1, 21))
    monkeypatch.setattr(threading.Thread, "start", stock)
    end(stage)


def test_a_look_at_the_memory_of_workers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def slow(pid: int) -> float:
        asked.set()
        time.sleep(0.5)
        return 5.0 * MB

    monkeypatch.setattr(worker_cost, "_private_bytes", slow)
    memory = WorkerMemory()
    begin_s = time.monotonic()
    assert memory.read([1, 2]) == 0.0
    assert asked.wait(5.0)
    assert memory.read([1, 2]) == 0.0
    assert time.monotonic() - begin_s < 0.4
    assert eventually(lambda: memory.read([1, 2]) == 5.0 * MB)


def test_a_hanging_thread_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_threads, "JOIN_S", 0.5)
    go_on = threading.Event()
    stage = ElasticMap(iter(range(4)), lambda i: go_on.wait(20.0), workers=1, window=2)
    begin_s = time.monotonic()
    assert not stage.close()
    assert not stage.close()
    assert not stage.close()
    assert time.monotonic() - begin_s < 1.2
    go_on.set()
    assert eventually(stage.close)
