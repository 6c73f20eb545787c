"""The cache: what it hands out is what was computed, whoever asks, however often its size changes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.values import is_same, laid_down, taken_up

MIB = 1 << 20


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


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
