"""What an audit broke in the worker stage: nothing lost, held up or miscounted, whatever is in a batch."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from busy_machine import eventually
from test_trust_workers import MB, end, stage_of

from intune_callbacks.pipelines.counters import Counters, nbytes
from intune_callbacks.pipelines.workers.elastic import ElasticMap


class Unsizable:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("nbytes is not defined")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} either")


class Graph:
    """A plain class, as a library's batch is."""

    def __init__(self) -> None:
        self.x, self.name = np.zeros(MB, np.uint8), "graph"
        self.self = self


class Slotted:
    __slots__ = ("empty", "x")

    def __init__(self) -> None:
        self.x = np.zeros(MB, np.uint8)


def test_results_whose_size_cannot_be_told_are_delivered() -> None:
    stage = ElasticMap(iter(range(20)), lambda i: Unsizable(), workers=2, window=4)
    assert sum(isinstance(value, Unsizable) for value in stage) == 20
    assert stage.close()


def test_a_fault_of_the_counters_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counters, "computed", lambda *_: 1 / 0)
    stage = ElasticMap(iter(range(20)), lambda i: i, workers=2, window=4)
    assert list(stage) == list(range(20))
    assert stage.close()


def test_sizes_are_right_whatever_contains_the_arrays() -> None:
    array = np.zeros(MB, np.uint8)
    assert nbytes(collections.UserDict(x=array, y=[array])) == 2 * MB
    assert MB <= nbytes(Graph()) < MB + 100
    assert nbytes(Slotted()) == MB
    assert nbytes({"a": (array, [array, "abc"])}) == 2 * MB + 3
    assert nbytes([array] * 100) == 100 * MB
    assert nbytes([np.zeros(n, np.uint8) for n in range(1000)]) == pytest.approx(499_500, rel=0.1)
    assert nbytes(Unsizable()) == nbytes(None) == nbytes(object) == 0


def test_a_batch_that_holds_half_the_program_is_looked_at_quickly() -> None:
    tree: Any = []
    for _ in range(12):
        tree = [list(tree), *([tree] * 20)]
    begin_s = time.monotonic()
    nbytes(tree)
    nbytes(sys.modules)
    assert time.monotonic() - begin_s < 1.0


def test_what_crossed_the_pipe_is_the_size_of_a_result() -> None:
    stage = stage_of(lambda i: memoryview_free(Slotted()), range(8), workers=1, window=2)
    list(stage)
    assert stage.counters.item_bytes == pytest.approx(MB, rel=0.01)
    end(stage)


def memoryview_free(value: Slotted) -> Any:
    """A class `nbytes` finds nothing in, that pickles to a megabyte."""
    return Hidden(bytes(value.x))


class Hidden:
    def __init__(self, data: bytes) -> None:
        self._get = lambda: data

    def __reduce__(self) -> Any:
        return Hidden, (self._get(),)


class Collects:
    """A result at whose counting the garbage collector runs."""

    @property
    def nbytes(self) -> int:
        gc.collect()
        return 1


def test_the_collector_may_end_a_stage_in_one_of_its_own_workers() -> None:
    gone = threading.Event()  # only the first results of a stage are all counted

    class Owner:
        def __init__(self) -> None:
            work = lambda i: gone.wait(8.0) and Collects()  # noqa: E731
            self.stage = ElasticMap(iter(range(10**9)), work, workers=1, window=10**6)
            self.me = self

        def __del__(self) -> None:
            self.stage.close()

    gc.freeze()  # what other tests left is neither walked through nor finalized in the worker
    gc.disable()
    try:
        owner = Owner()
        threads, name = list(owner.stage._threads.threads), owner.stage.name
        assert name == "map"
        del owner
        gone.set()
        assert eventually(lambda: not any(thread.is_alive() for thread in threads))
    finally:
        gc.enable()
        gc.unfreeze()


class Fussy:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def test_what_cannot_be_sent_is_an_error_in_its_place() -> None:
    stage = stage_of(lambda i: Fussy() if i == 1 else i, range(3), workers=1, window=3)
    assert next(stage) == 0
    with pytest.raises(TypeError, match="not me"):
        next(stage)
    assert next(stage) == 2
    end(stage)


class Locked(Exception):
    """Holds what cannot be pickled, as the errors of clients of object stores hold a response."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.lock = threading.Lock()


class Two(Locked):
    def __init__(self, place: int, words: str) -> None:
        super().__init__(f"{place}: {words}")


def errs(i: int) -> int:
    if i == 1:
        raise Locked("a row that is to be skipped")
    if i == 2:
        raise Two(2, "rows")
    return i


def test_an_error_that_cannot_be_sent_is_of_its_kind_in_its_place_as_in_stock() -> None:
    stage = stage_of(errs, range(4), workers=1, window=4)
    assert next(stage) == 0
    with pytest.raises(Locked, match="a row that is to be skipped"):
        next(stage)
    with pytest.raises(RuntimeError, match="Two: 2: rows"):  # torch, too, makes it of its words alone, or this
        next(stage)
    assert next(stage) == 3
    end(stage)
