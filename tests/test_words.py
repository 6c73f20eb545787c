"""Numbers are spelled alike wherever a user reads them, and in one place."""

from __future__ import annotations

import ast
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks import words
from intune_callbacks.measure.verdict import VerdictKind
from intune_callbacks.words import allocation, amount, changed, count, duration, memory, moment, percent, quantity, size
from tests.test_imports import MODULES

NOT_SAID_TO_USERS = "pretrain."


@given(st.floats(1e-3, 1e12))
def test_an_amount_has_three_digits_or_all_before_the_point(value: float) -> None:
    text = amount(value)
    assert "e" not in text
    assert float(text.replace(" ", "")) == pytest.approx(value, rel=5.1e-3)
    assert re.fullmatch(r"\d{1,3}( \d{3})*|\d+\.\d+", text)


def test_quantities() -> None:
    assert [amount(v) for v in (0, 1.234, 99.9, 999.9, 1234567)] == ["0", "1.23", "99.9", "1 000", "1 234 567"]
    assert [quantity(v, "ms") for v in (0.0123, 1.5)] == ["12.3 ms", "1 500 ms"]
    assert [quantity(v, "s") for v in (0.0, 2.6e-6, 0.0371, 0.11, 20)] == ["0 s", "2.6 us", "37 ms", "0.11 s", "20 s"]
    assert [size(v) for v in (3754, 85e6, 1.2e9)] == ["4 kB", "85 MB", "1.2 GB"]
    assert [percent(v) for v in (0.0, 0.345, 1.0)] == ["0 %", "34 %", "100 %"]
    assert [memory(1.25e9, limit) for limit in (64.4e9, 1.5e9)] == ["1.2 of 64 GB", "1.2 of 1.5 GB"]
    assert [duration(s) for s in (0, 0.4, 59, 61, 3700)] == ["0 s", "400 ms", "59 s", "1 min 1 s", "1 h 1 min"]
    assert [count(n, "change") for n in (0, 1, 2)] == ["0 changes", "1 change", "2 changes"]


def test_short_times_are_in_the_unit_a_reader_expects() -> None:
    told = [moment(s) for s in (0.0, 13.4e-6, 0.0009994, 0.0014, 0.0123, 0.85, 1.25, 14.2)]
    assert told == ["0 us", "13 us", "999 us", "1.4 ms", "12 ms", "850 ms", "1.2 s", "14 s"]
    assert moment(0.0009996) == "1 ms" and moment(0.00996e-3) == "10 us"


@pytest.mark.parametrize("value", [10**400, None, math.nan, math.inf, "many", True])
def test_what_is_no_number_is_not_known(value: object) -> None:
    assert {amount(value), percent(value), duration(value), quantity(value, "GB")} == {words.NOTHING}
    assert amount(value, words.UNKNOWN) == percent(value, words.UNKNOWN) == "?"


def test_values_of_stages_are_written_as_in_code() -> None:
    assert allocation({"decode": 4, "prefetch": 1024}, {"decode": 16}) == "decode 4 (window 16) · prefetch 1024"
    assert changed({"decode": 1, "read": 2}, {"decode": 4096, "read": 2, "new": 1}) == "decode 1 -> 4096, new – -> 1"


def test_each_verdict_has_a_colour() -> None:
    assert set(words.COLOURS) == set(VerdictKind.__args__)  # type: ignore[attr-defined]


def test_shares_and_thousands_are_spelled_in_one_place() -> None:
    formats = [
        (module, ast.unparse(node.format_spec))
        for module, file in MODULES.items()
        if module != "words" and not module.startswith(NOT_SAID_TO_USERS)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FormattedValue) and node.format_spec
    ]
    assert not [(module, text) for module, text in formats if re.search(r"%|,", text)]
