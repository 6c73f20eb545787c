"""`later`: a call that is made at once, unless a worker of ours decides otherwise."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import pytest

from intune_callbacks import later
from intune_callbacks.pipelines.later import Later, Token, call_of, hold, resolved

Pair = namedtuple("Pair", ["left", "right"])


@later
def double(value: int, add: int = 0) -> int:
    """Twice."""
    return 2 * value + add


def plain(value: Any) -> Any:
    return value


class Method:
    factor = 3

    @later
    def times(self, value: int) -> int:
        return self.factor * value


class Waits:
    """Makes a token of each call."""

    def __init__(self) -> None:
        self.looked_at = 0

    def call(self, made: Later[Any, Any], args: Any, kwargs: Any) -> Any:
        return Token(made, args, kwargs)

    def touched(self, token: Token) -> None:
        self.looked_at += 1


@pytest.fixture
def waits() -> Any:
    holder = Waits()
    hold(holder)
    yield holder
    hold(None)


def test_it_is_the_function_where_nobody_holds_the_process() -> None:
    assert double(2, add=1) == 5
    assert Method().times(4) == 12
    assert later(functools.partial(double, add=1))(2) == 5
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert later(double) is double


def test_what_cannot_be_called_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"later\(3\): expected the function that makes a sample; write later\(fn\)\(raw\)"
    ):
        later(3)  # type: ignore[type-var]


@pytest.mark.parametrize("made", [double, later(plain), copy.deepcopy(double)])
def test_it_is_pickled_as_functions_are(made: Any) -> None:
    again = pickle.loads(pickle.dumps(made))
    assert again is double if made is double else again(3) == made(3)


def test_tokens_are_found_in_samples(waits: Waits) -> None:
    sample = {
        "alone": double(1),
        "list": [double(2), 7],
        "pair": Pair(double(3), (double(4),)),
        "dict": OrderedDict(x={"y": double(5)}),
        "kept": [1, 2],
    }
    found = resolved([sample])[0]
    assert found["alone"] == 2 and found["list"] == [4, 7] and found["pair"] == Pair(6, (8,))
    assert found["dict"] == {"x": {"y": 10}} and type(found["dict"]) is OrderedDict
    assert found["kept"] is sample["kept"]
    assert waits.looked_at == 0


def test_a_call_is_made_once(waits: Waits) -> None:
    calls: list[int] = []
    token = later(calls.append)(1)
    assert resolved([token, token]) == [None, None]
    assert calls == [1]


@pytest.mark.parametrize(
    "look",
    [
        lambda value: value + 1 == 5,
        lambda value: 1 + value == 5,
        lambda value: value == 4,
        lambda value: value > 3,
        lambda value: bool(value),
        lambda value: str(value) == "4",
        lambda value: isinstance(value, int),
        lambda value: value.bit_length() == 3,
        lambda value: [0, 1, 2, 3, 4, 5][value] == 4,
        lambda value: hash(value) == hash(4),
    ],
)
def test_whoever_looks_gets_what_the_function_returns(look: Any, waits: Waits) -> None:
    assert look(double(2))
    assert waits.looked_at > 0


def test_a_token_nobody_has_found_travels_as_its_value(waits: Waits) -> None:
    assert pickle.loads(pickle.dumps({"far": double(2)})) == {"far": 4}


def test_a_call_is_its_function_and_arguments(waits: Waits) -> None:
    assert call_of(double(2, add=1))[:3] == (double, (2,), {"add": 1})


def test_importing_it_brings_no_framework() -> None:
    code = "import sys; from intune_callbacks import later; print('torch' in sys.modules, later(int)('3'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split() == ["False", "3"]
