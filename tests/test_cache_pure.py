"""A function marked as pure: computed once, handed out as it was; what is not pure is found out and told."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import intune_callbacks
from intune_callbacks import pure
from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.pure import tell, use
from intune_callbacks.cache.rows import Row, Rows
from intune_callbacks.cache.values import is_same

MIB = 1 << 20


def rows(arena: Arena) -> dict[str, Row]:
    return {row.name.rpartition(".")[2]: row for row in Rows(arena)}


calls: list[Any] = []


@pure
def squared(number: int, *, plus: float = 0.0) -> Any:
    """Its docstring."""
    calls.append(number)
    time.sleep(0.01)
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
        time.sleep(0.01)
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
