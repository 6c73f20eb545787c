"""The resizable stage: nothing lost, repeated or reordered, whatever is done to it."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from busy_machine import eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_work import Boom, counted, plain, work

from intune_callbacks import Clock
from intune_callbacks.pipelines.counters import Counters, nbytes
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.line import Hold
from intune_callbacks.pipelines.workers.processes import ProcessPool

QUICK = settings(max_examples=60, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=12, suppress_health_check=list(HealthCheck))

plans = st.fixed_dictionaries(
    {
        "items": st.integers(0, 120),
        "workers": st.integers(1, 5),
        "zero": st.booleans(),
        "window": st.integers(1, 9),
        "bad_item": st.none() | st.integers(0, 119),
        "bad_source": st.none() | st.integers(0, 119),
        "stop_after": st.none() | st.integers(1, 119),
        "feed": st.booleans(),
        "ordered": st.booleans(),
        "resizes": st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), max_size=12),
    }
)


@dataclass
class Row:
    dense: np.ndarray
    name: str


def source_of(plan: dict):
    for i in range(plan["items"]):
        if i == plan["bad_source"]:
            raise KeyError(i)
        yield -1 if i == plan["bad_item"] else i


def expected_of(plan: dict) -> list:
    whole: list = ["Boom" if i == plan["bad_item"] else i for i in range(plan["items"])]
    bad = plan["bad_source"]
    return [*whole[:bad], "KeyError"] if bad is not None and bad < plan["items"] else whole


def deliver(stage: ElasticMap, plan: dict) -> list:
    got: list = []
    while plan["stop_after"] is None or len(got) < plan["stop_after"]:
        try:
            got.append(plain(next(stage)))
        except StopIteration:
            break
        except (Boom, KeyError) as error:
            got.append(type(error).__name__)
        if len(got) % 7 == 0:
            stage.resize(len(got) % 5)
    return got


def run(plan: dict, pool: ProcessPool | None) -> None:
    """Deliver while another thread resizes, and compare with what must come."""
    settings_ = {key: plan[key] for key in ("workers", "window", "feed", "ordered")}
    if plan["zero"] and plan["feed"]:
        # Computed by the consumer while there are no workers.
        settings_["inline"] = work
        settings_["hold"] = Hold(plan["items"])
    stage = ElasticMap(source_of(plan), work, pool=pool, **settings_)
    done = threading.Event()

    def resize_from_another_thread() -> None:
        for workers, window in plan["resizes"]:
            stage.resize(workers, window)
            if done.wait(0.001):
                return

    other = threading.Thread(target=resize_from_another_thread)
    other.start()
    try:
        got = deliver(stage, plan)
    finally:
        done.set()
        other.join()
        assert stage.close()

    expected, stop = expected_of(plan), plan["stop_after"]
    assert len(got) == (len(expected) if stop is None else min(stop, len(expected)))
    if plan["ordered"]:
        assert got == expected[: len(got)]
    else:
        assert len(set(got)) == len(got) and set(got) <= set(expected)


@QUICK
@given(plans)
def test_threads_are_exact_under_any_resizes(plan: dict) -> None:
    run(plan, None)


@FEW
@given(plans)
def test_processes_are_exact_under_any_resizes(plan: dict) -> None:
    pool = ProcessPool(work, multiprocessing.get_context("fork"))
    try:
        run({**plan, "resizes": [(min(w, 3), v) for w, v in plan["resizes"]]}, pool)
    finally:
        pool.close()
    assert not pool.pids


def test_the_window_bounds_what_is_pulled_ahead() -> None:
    taken: list = []
    stage = ElasticMap(counted(1000, taken), work, workers=4, window=6)
    for number in range(1, 50):
        next(stage)
        time.sleep(0.0005)
        assert len(taken) <= number + 6
    stage.resize(window=20)
    assert eventually(lambda: len(taken) >= 49 + 20)
    assert len(taken) == 49 + 20
    stage.close()


class Held:
    """A result that can be referred to weakly."""

    def __init__(self, _: int) -> None:
        pass


@pytest.mark.parametrize("raises", [False, True])
def test_a_worker_that_waits_for_room_holds_no_result(raises: bool) -> None:
    """An error held there holds the consumer's frames, so its loader was never let go of."""

    class Failure(Exception):
        pass

    both = threading.Barrier(2)

    def fn(x: int) -> Held:
        if x < 2:  # one for each worker
            both.wait(10.0)
        if raises:
            raise Failure(x)
        return Held(x)

    stage = ElasticMap(iter(range(8)), fn, workers=2, window=2)
    assert eventually(lambda: stage.stats().queued == 2)
    stage.resize(window=1)
    if raises:
        with pytest.raises(Failure) as caught:
            next(stage)
        gone = weakref.ref(caught.value)
        del caught
    else:
        gone = weakref.ref(next(stage))

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    assert eventually(is_gone)
    stage.close()


def test_workers_is_how_many_items_are_computed_at_once() -> None:
    inside, most, lock = [0], [0], threading.Lock()

    def busy(x: int) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        with lock:
            inside[0] -= 1
        return x

    stage = ElasticMap(iter(range(10**6)), busy, workers=3, window=50)
    for _ in range(60):
        next(stage)
    assert most[0] == 3
    stage.resize(1)
    for _ in range(60):
        next(stage)
    most[0] = 0
    for _ in range(20):
        next(stage)
    assert most[0] == 1
    stage.resize(5)
    for _ in range(60):
        next(stage)
    assert most[0] == 5
    stage.close()


@pytest.mark.parametrize("feed", [False, True])
def test_no_worker_is_lost_on_the_way(feed: bool) -> None:
    stage = ElasticMap(iter(range(10**6)), work, workers=6, window=12, feed=feed, name="kept")
    for number in range(3000):
        next(stage)
        if number % 100 == 0:
            stage.resize(6, 2 + number % 11)
    assert len([t for t in threading.enumerate() if t.name == "intune-kept"]) == 6
    stage.close()


def test_a_slow_item_does_not_stop_the_others_within_the_window() -> None:
    gate = threading.Event()
    finished: list = []

    def fn(x: int) -> int:
        if x == 0:
            gate.wait(10)
        finished.append(x)
        return x

    stage = ElasticMap(iter(range(100)), fn, workers=2, window=8)
    assert eventually(lambda: len(finished) >= 7, 9.0)  # the gate opens by itself after ten seconds
    assert finished == [1, 2, 3, 4, 5, 6, 7]
    gate.set()
    assert list(stage) == list(range(100))
    stage.close()


def test_counters_add_up_over_epochs_and_use_the_given_clock() -> None:
    now = [0.0]
    counters = Counters()

    def fn(x: int) -> int:
        now[0] += 2.0
        return x

    for _ in range(2):
        stage = ElasticMap(iter(range(5)), fn, counters=counters, clock=Clock(lambda: now[0], lambda: now[0] / 4))
        list(stage)
        stage.close()
    reading = stage.stats()
    assert (reading.items, reading.busy_s, reading.busy_s2, reading.cpu_s) == (10, 20.0, 40.0, 5.0)


def test_what_does_not_tell_its_size_counts_nothing() -> None:
    class Sparse:
        @property
        def nbytes(self) -> int:
            raise RuntimeError("nbytes is not defined for sparse tensors")

    stage = ElasticMap(iter(range(3)), lambda x: Sparse(), workers=1)
    assert len(list(stage)) == 3
    stage.close()


def test_nbytes_counts_arrays_and_bytes_at_any_depth() -> None:
    assert nbytes({"a": np.zeros(10, np.float32), "b": [b"abc", (np.zeros(2, np.int64),)]}) == 40 + 3 + 16
    assert nbytes([np.zeros(1, np.int8)] * 1000) == 1000
    assert nbytes([Row(np.zeros(3, np.float64), "abc")]) == 24 + 3
