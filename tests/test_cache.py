"""The cache: what it hands out is what was computed, whoever asks, however often its size changes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import intune_callbacks
from intune_callbacks import pure
from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.pure import tell, use
from intune_callbacks.cache.rows import Row, Rows
from intune_callbacks.cache.values import is_same, laid_down, taken_up

MIB = 1 << 20


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(room_bytes=64 * MIB)
    made.limit(32 * MIB)
    use(made)
    yield made
    use(None)
    made.close()


def rows(arena: Arena) -> dict[str, Row]:
    return {row.name.rpartition(".")[2]: row for row in Rows(arena)}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 30), st.integers(0, 30_000)),
            st.tuples(st.just("limit"), st.integers(0, 400_000), st.just(0)),
        ),
        max_size=40,
    )
)
def test_what_is_found_is_what_was_put_whatever_the_limits(steps: list[tuple[str, int, int]]) -> None:
    arena, known = Arena(room_bytes=MIB), {}
    try:
        for what, number, size in steps:
            if what == "limit":
                assert arena.limit(number)
                assert arena.used_bytes() <= number
            elif arena.put(key(number), laid_down((number, known.get(number, b"%d" % number * size)))):
                known.setdefault(number, b"%d" % number * size)
            for one, value in known.items():
                found = arena.get(key(one))
                assert found is None or found == ((one, value),)
            assert arena.used_bytes() <= arena.header().limit_bytes
    finally:
        arena.close()


def test_memory_is_given_back_as_the_limit_falls_and_at_the_end(arena: Arena) -> None:
    def held_bytes() -> int:
        return os.stat(f"/proc/self/fd/{arena._descriptor}").st_blocks * 512

    for number in range(100):
        assert arena.put(key(number), laid_down(np.full(100_000, number % 251, np.uint8)))
    assert held_bytes() > 10_000_000
    arena.limit(3_000_000)
    assert held_bytes() < 3_100_000
    assert sum(arena.get(key(number)) is not None for number in range(100)) > 20
    child = Arena.at(arena.address)
    arena.close()
    assert held_bytes() < 100_000
    assert child.get(key(0)) is None
    assert not child.put(key(0), laid_down(1))


def test_values_are_copies(arena: Arena) -> None:
    arena.put(key(0), laid_down(np.zeros(50_000)))
    first = arena.get(key(0))
    assert first is not None
    first[0][:] = 7.0
    second = arena.get(key(0))
    assert second is not None
    assert not second[0].any()


def _hammer(address: str, seed: int, wrong: Any) -> None:
    arena, draw = Arena.at(address), random.Random(seed)
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        number = draw.randrange(200)
        found = arena.get(key(number))
        if found is None:
            arena.put(key(number), laid_down(np.full(20_000 + number, number, np.int64)))
        elif found[0].shape != (20_000 + number,) or (found[0] != number).any():
            wrong.value += 1


def test_processes_read_and_write_while_it_shrinks_and_grows(arena: Arena) -> None:
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    children = [context.Process(target=_hammer, args=(arena.address, seed, wrong)) for seed in range(3)]
    for child in children:
        child.start()
    draw, until_s = random.Random(7), time.monotonic() + 2.0
    while time.monotonic() < until_s:
        arena.limit(draw.randrange(32 * MIB))
        time.sleep(0.002)
    children[0].kill()  # in whatever it is doing
    for child in children:
        child.join(30.0)
    assert [child.exitcode for child in children[1:]] == [0, 0]
    assert wrong.value == 0
    assert arena.limit(32 * MIB)  # nobody holds the lock
    assert arena.put(key(1000), laid_down(1))


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary(), st.booleans()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
        max_leaves=20,
    )
)
def test_any_value_comes_back_with_the_same_bits(value: Any) -> None:
    back = taken_up(laid_down(value))
    assert is_same(back, value)
    assert pickle.dumps(back) == pickle.dumps(value) or repr(back) == repr(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1.0, 1),
        (0.0, -0.0),
        ((1,), [1]),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros((2, 3)), np.zeros((2, 3), order="F")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.array([np.nan]), np.array([1.0])),
    ],
)
def test_what_differs_is_not_the_same(one: Any, other: Any) -> None:
    assert is_same(one, one)
    assert not is_same(one, other)


# -- pure ------------------------------------------------------------------------------------------------------------

calls: list[Any] = []


@pure
def squared(number: int, *, plus: float = 0.0) -> Any:
    """Its docstring."""
    calls.append(number)
    time.sleep(0.002)
    return np.full(10, number * number + plus)


def test_outside_of_a_training_it_is_the_function() -> None:
    use(None)
    calls.clear()
    assert squared(3)[0] == squared(3)[0] == 9
    assert calls == [3, 3]
    assert squared.__doc__ == "Its docstring."
    assert pickle.loads(pickle.dumps(squared)) is squared


def test_a_result_is_computed_once_and_handed_out_as_it_was(arena: Arena) -> None:
    first = [squared(number, plus=0.5) for number in range(30)]
    calls.clear()
    again = [squared(number, plus=0.5) for number in range(30)]
    assert calls == []
    assert all(is_same(one, other) for one, other in zip(first, again, strict=True))
    assert squared(3)[0] == 9  # another argument, another result
    seen = rows(arena)["squared"]
    assert 16 <= seen.kept <= 31  # those of the last moment are not told
    assert (seen.checked, seen.why_not) == (8, "")


class Items:
    def __init__(self, size: int) -> None:
        self.size, self.order = size, list(range(100))

    @pure
    def load(self, index: int) -> tuple[int, int]:
        time.sleep(0.002)
        return self.size, self.order[index]


def test_the_attributes_of_an_object_are_part_of_the_arguments(arena: Arena) -> None:
    small, large = Items(1), Items(2)
    for _ in range(2):
        assert [small.load(index) for index in range(20)] == [(1, index) for index in range(20)]
        assert [large.load(index) for index in range(20)] == [(2, index) for index in range(20)]
    small.size = 3  # as a training that makes its images larger does
    assert small.load(5) == (3, 5)
    random.Random(0).shuffle(small.order)
    assert [small.load(index)[1] for index in range(20)] == small.order[:20]
    assert pickle.loads(pickle.dumps(large)).load(5) == (2, 5)
    assert rows(arena)["load"].why_not == ""


def test_where_memory_is_short_nothing_more_comes_in(arena: Arena) -> None:
    large = pure(lambda number: (time.sleep(0.02), np.full(2 * MIB, number, np.uint8))[1])
    arena.limit(32 * MIB, stop_bytes=1)  # more than that is always in use
    for number in range(8):
        large(number)
    assert 8 * MIB < arena.used_bytes() < 13 * MIB
    assert arena.header().limit_bytes < 13 * MIB
    assert large(0)[0] == 0


def test_a_relative_path_is_another_file_in_another_folder(
    arena: Arena, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = pure(lambda path: Path(path).read_text())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        assert [read("file"), read("file")] == [name, name]


class Lossy:
    def __init__(self) -> None:
        self.path = "here"

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pass


def _lossy(number: int) -> Lossy:
    return Lossy()


def _draws(number: int) -> float:
    return random.random() + number


def _draws_numpy(number: int) -> float:
    return float(np.random.rand()) + number


def _counts(number: int) -> int:
    calls.append(number)
    return len(calls)


_own = np.random.default_rng(0)


def _draws_of_its_own(number: int) -> float:
    return float(_own.random()) + number


def _changes_what_it_is_given(numbers: list[int]) -> int:
    numbers.append(1)
    return len(numbers)


@pytest.mark.parametrize(
    ("fn", "argument", "why"),
    [
        (_draws, 1, "draws random numbers"),
        (_draws_numpy, 1, "draws random numbers"),
        (_counts, 1, "computed twice it gave two results"),
        (_draws_of_its_own, 1, "computed twice it gave two results"),
        (_changes_what_it_is_given, [1], "changes what it is given"),
        (lambda number: threading.Lock() if number else None, 1, "cannot be kept"),
        (_lossy, 1, "comes back from memory as something else"),
    ],
)
def test_what_is_not_pure_is_not_kept_and_the_reason_is_told(arena: Arena, fn: Any, argument: Any, why: str) -> None:
    marked = pure(fn)
    for _ in range(3):
        marked(argument)
    (seen,) = rows(arena).values()
    assert why in seen.why_not
    assert (seen.hits, seen.kept) == (0, 0)


def test_a_drawn_number_is_the_one_that_would_have_been_drawn(arena: Arena) -> None:
    random.seed(5)
    stock = [_draws(n) for n in range(5)]
    random.seed(5)
    marked = pure(_draws)
    assert [marked(n) for n in range(5)] == stock


def test_what_is_cheap_is_left_alone(arena: Arena) -> None:
    marked = pure(lambda number: number + 1)
    assert [marked(number) for number in range(100)] == list(range(1, 101))
    (seen,) = rows(arena).values()
    assert "too little to gain" in seen.why_not
    assert seen.kept == 16


def test_what_changes_later_is_found_out_and_the_new_result_handed_out(arena: Arena) -> None:
    def offset(number: int) -> int:
        time.sleep(0.001)
        return number + calls[0]

    calls[:] = [0]
    marked = pure(offset)
    for _ in range(3):
        assert [marked(number) for number in range(10)] == list(range(10))
    calls[:] = [100]
    results = [marked(number % 10) for number in range(300)]
    (seen,) = rows(arena).values()
    assert "computed again it gave another result" in seen.why_not
    assert results[-1] == 109


def test_workers_of_short_epochs_find_it_out_together(arena: Arena) -> None:
    def offset(number: int) -> int:
        time.sleep(0.001)
        return number + calls[0]

    calls[:] = [0]
    for number in range(10):
        pure(offset)(number)
    calls[:] = [100]
    for _ in range(40):  # a worker each, with ten hits of its own
        worker = pure(offset)
        for number in range(10):
            worker(number)
        tell()
    (seen,) = rows(arena).values()
    assert "computed again it gave another result" in seen.why_not


def test_an_error_of_the_function_is_raised_each_time(arena: Arena) -> None:
    @pure
    def fails(number: int) -> int:
        raise ValueError(f"no {number}")

    for _ in range(3):
        with pytest.raises(ValueError, match="no 4"):
            fails(4)


def _in_child(results: Any) -> None:
    results.put([float(squared(number)[0]) for number in range(20)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_have_what_was_kept(arena: Arena, method: str) -> None:
    for number in range(20):
        squared(number)
    before = rows(arena)["squared"]
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_in_child, args=(results,))
    child.start()
    assert results.get(timeout=60.0) == [float(number * number) for number in range(20)]
    child.join(30.0)
    after = rows(arena)["squared"]
    assert after.misses == before.misses
    assert after.hits >= before.hits + 16  # those of the last moment are not told


def test_a_function_of_a_script_can_be_sent_by_value(arena: Arena) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")

    @pure
    def doubled(number: int) -> int:
        return 2 * number

    assert doubled(4) == 8
    assert cloudpickle.loads(cloudpickle.dumps(doubled))(4) == 8


def test_threads_share_it(arena: Arena) -> None:
    failed: list[int] = []

    def work() -> None:
        for number in range(50):
            if squared(number)[0] != number * number:
                failed.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed


@pytest.mark.parametrize(
    "wrong",
    [print, staticmethod(_draws), Items, (lambda: (yield)), 3],
    ids=["builtin", "static", "class", "gen", "int"],
)
def test_what_cannot_be_marked_is_refused_with_a_sentence(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected|put @pure below it"):
        intune_callbacks.pure(wrong)
