"""The vectorised parser does what the plain one does; the plain one does what Criteo's format says."""

from __future__ import annotations

import functools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_examples.criteo.parse import chosen_kernel, parse_block, warm_up
from dlrm_examples.criteo.tsv import (
    COLUMNS,
    KAGGLE_TABLE_ROWS,
    TERABYTE_TABLE_ROWS,
    BadRow,
    Block,
    Rows,
    hashed_table_rows,
    parse_block_slowly,
)
from tests.dlrm_rows import good_lines, real_file, rows_text, spoilt_lines

MODULI = hashed_table_rows(1000)
KERNELS = list(dict.fromkeys((chosen_kernel(), "numpy")))
warm_up()  # a compiler is no part of what hypothesis times

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def same(one: Rows, other: Rows) -> bool:
    np.testing.assert_allclose(one.dense, other.dense, rtol=1e-6)
    return (
        one.skipped == other.skipped
        and np.array_equal(one.labels, other.labels)
        and np.array_equal(one.categories, other.categories)
        and [a.dtype for a in (one.labels, one.dense, one.categories)] == [np.float32, np.float32, np.int32]
    )


@given(st.lists(good_lines, max_size=6), st.booleans(), st.lists(st.integers(1, 2**31 - 1), min_size=26, max_size=26))
def test_good_rows(lines: list[bytes], ends_with_newline: bool, moduli: list[int]) -> None:
    data = b"\n".join(lines) + (b"\n" if ends_with_newline and lines else b"")
    block = Block("f", 0, data)
    for kernel in KERNELS:
        rows = parse_block(block, moduli, kernel=kernel)
        assert len(rows) == len(lines)
        assert same(rows, parse_block_slowly(block, moduli))


@settings(max_examples=400)
@given(st.lists(st.one_of(good_lines, spoilt_lines()), min_size=1, max_size=5), st.integers(0, 2**40))
def test_bad_rows(lines: list[bytes], offset: int) -> None:
    block = Block("f", offset, b"\n".join(lines) + b"\n")
    slow, errors = parse_block_slowly(block, MODULI, on_bad_row="skip"), []
    for kernel in KERNELS:
        assert same(parse_block(block, MODULI, on_bad_row="skip", kernel=kernel), slow)
    for parser in (parse_block_slowly, *(functools.partial(parse_block, kernel=kernel) for kernel in KERNELS)):
        try:
            parser(block, MODULI)
            errors.append(None)
        except BadRow as error:
            errors.append((str(error), error.offset, error.column))
    assert errors == errors[:1] * len(errors)


@given(st.lists(st.one_of(good_lines, spoilt_lines()), min_size=1, max_size=5), st.sets(st.integers(0, 4)))
def test_only_selected_rows(lines: list[bytes], chosen: set[int]) -> None:
    starts = np.cumsum([7, *(len(line) + 1 for line in lines)])
    wanted = [int(starts[row]) for row in chosen if row < len(lines)]
    block = Block("f", 7, b"\n".join(lines) + b"\n")

    def select(offsets):
        return np.isin(offsets, wanted)

    slow = parse_block_slowly(block, MODULI, on_bad_row="skip", select=select)
    for kernel in KERNELS:
        fast = parse_block(block, MODULI, on_bad_row="skip", select=select, kernel=kernel)
        assert len(fast) + fast.skipped == len(wanted)
        assert same(fast, slow)


@each_kernel
def test_a_row_by_hand(kernel: str) -> None:
    fields = ["1", "", "-2", "0", "7", "123456789", *[""] * 8, "0000000a", "", "ffffffff", *[""] * 23]
    moduli = (*(7, 5, 1000), *[3] * 23)
    rows = parse_block(Block("f", 0, "\t".join(fields).encode()), moduli, kernel=kernel)
    assert rows.labels.tolist() == [1.0]
    np.testing.assert_allclose(rows.dense[0, :6], [0, 0, 0, math.log(8), math.log(123456790), 0], rtol=1e-6)
    assert rows.categories[0, :4].tolist() == [3, 0, 4294967295 % 1000, 0]


@each_kernel
@pytest.mark.parametrize(
    ("column", "field"),
    [
        *((0, bad) for bad in (b"", b"2", b"01", b"a")),
        *(
            (1, bad)
            for bad in (
                b"-",
                b"--1",
                b"1.5",
                b"+1",
                b" 1",
                b"12345678x",
                b"x12345678",
                b"1" * 17,
                b"\xb0",
                b"1:",
                b"/2",
                b"?",
            )
        ),
        *((14, bad) for bad in (b"1234567", b"123456789", b"0000000g", b"0000000O", b"\x100000000", b"0x00000a", b" ")),
    ],
)
def test_what_is_not_accepted(column: int, field: bytes, kernel: str) -> None:
    first, second = (line.split(b"\t") for line in rows_text(2).splitlines())
    second[column] = field
    data = b"\t".join(first) + b"\n" + b"\t".join(second) + b"\n"
    with pytest.raises(BadRow, match=r"day_0\.tsv: line at byte") as caught:
        parse_block(Block("day_0.tsv", 100, data), MODULI, kernel=kernel)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.offset, error.column) == (100 + data.index(b"\n") + 1, COLUMNS[column])
    assert repr(field) in str(error)
    assert "on_bad_row='skip'" in str(error)


@each_kernel
def test_the_first_bad_row_is_named_whatever_is_wrong_with_it(kernel: str) -> None:
    lines = rows_text(3).splitlines()
    short, wrong = lines[1].rsplit(b"\t", 1)[0], b"x" + lines[2][1:]
    for bad, column in (((short, wrong), "columns"), ((wrong, short), "label")):
        with pytest.raises(BadRow) as caught:
            parse_block(Block("f", 0, b"\n".join((lines[0], *bad))), MODULI, kernel=kernel)
        assert (caught.value.offset, caught.value.column) == (len(lines[0]) + 1, column)


def test_table_rows_for_hashing() -> None:
    rows = hashed_table_rows(100_000)
    assert len(rows) == len(KAGGLE_TABLE_ROWS) == 26
    assert (min(rows), max(rows)) == (1000, 100_000)
    assert sum(rows) != sum(hashed_table_rows(100_000, "terabyte"))


def test_tables_of_the_terabyte_logs() -> None:
    # MLPerf's model: 204,184,588 rows, with 128 numbers each more than 25 billion parameters.
    assert sum(min(rows, 40_000_000) for rows in TERABYTE_TABLE_ROWS) == 204_184_588


@each_kernel
@pytest.mark.parametrize(("name", "rate"), [("criteo_kaggle_100k.tsv", 0.253), ("criteo_1tb_8k.tsv", 0.0275)])
def test_real_rows(name: str, rate: float, kernel: str) -> None:
    data = real_file(name).read_bytes()
    rows = parse_block(Block(name, 0, data), KAGGLE_TABLE_ROWS, kernel=kernel)
    assert len(rows) == data.count(b"\n")
    assert rows.labels.mean() == pytest.approx(rate, abs=0.001)
    start = data.rfind(b"\n", 0, 500_000) + 1
    part = Block(name, 0, data[:start])
    fast = parse_block(part, KAGGLE_TABLE_ROWS, kernel=kernel)
    assert same(fast, parse_block_slowly(part, KAGGLE_TABLE_ROWS))
