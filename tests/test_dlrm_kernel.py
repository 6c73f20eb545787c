"""The compiled parser gives numpy's bits; both refuse what the plain parser refuses."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dlrm_examples.criteo.blocks import Split
from dlrm_examples.criteo.parse import chosen_kernel, parse_block, warm_up
from dlrm_examples.criteo.tsv import BadRow, Block, Rows, hashed_table_rows, parse_block_slowly
from intune_callbacks.errors import install_line
from tests.dlrm_rows import rows_text

MODULI = hashed_table_rows(100_000)
FUZZED_ROWS, ROWS_AT_ONCE = 10_000, 8
STRANGE = (b"", b"-", b"--1", b"+1", b" 1", b"1e3", b"0x1", b"1" * 17, b"9" * 16, b"-" + b"9" * 16, b"\0", b"\xff" * 8)
STRANGE += (
    b"g" * 8,
    b"0123456G",
    b"01234567 ",
    b"abcdef0",
    b"\t",
    b"\t\t",
    b"\n",
    b"\r",
    b"ABCDEF99",
    b"12345678",
    b"/",
    b":",
)

needs_numba = pytest.mark.skipif(chosen_kernel() != "numba", reason="numba is not installed")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def bits(rows: Rows) -> list[bytes | int]:
    return [rows.labels.tobytes(), rows.dense.tobytes(), rows.categories.tobytes(), rows.skipped]


def fuzzed(rows: int, seed: int) -> list[bytes]:
    """Return lines of which nine in ten are spoilt: a field replaced, dropped or added, or some bytes changed."""
    random = np.random.default_rng(seed)
    lines = []
    for line in rows_text(rows, seed).splitlines():
        kind, fields = random.integers(10), line.split(b"\t")
        where = int(random.integers(len(fields)))
        if kind < 4:
            fields[where] = STRANGE[random.integers(len(STRANGE))]
        elif kind == 4:
            del fields[where:]
        elif kind == 5:
            fields.insert(where, fields[where])
        spoilt = bytearray(b"\t".join(fields))
        for _ in range(int(random.integers(1, 4)) if 6 <= kind < 9 and spoilt else 0):
            spoilt[random.integers(len(spoilt))] = random.integers(256)
        lines.append(bytes(spoilt))
    return lines


@pytest.mark.parametrize("kernel", ["numba", "numpy"])
def test_ten_thousand_malformed_rows(kernel: str) -> None:
    if kernel == "numba" and chosen_kernel() != "numba":
        pytest.skip("numba is not installed")
    lines, split, refused = fuzzed(FUZZED_ROWS, 3), Split("train", 0.3, 1), 0
    for start in range(0, FUZZED_ROWS, ROWS_AT_ONCE):
        block = Block("f.tsv", start, b"\n".join(lines[start : start + ROWS_AT_ONCE]) + b"\n" * (start % 3 > 0))
        for select in (None, lambda offsets: split.select("f.tsv", offsets)):
            slow = parse_block_slowly(block, MODULI, on_bad_row="skip", select=select)
            fast = parse_block(block, MODULI, on_bad_row="skip", select=select, kernel=kernel)
            np.testing.assert_allclose(fast.dense, slow.dense, rtol=1e-6)
            assert np.array_equal(fast.labels, slow.labels)
            assert np.array_equal(fast.categories, slow.categories)
            assert fast.skipped == slow.skipped
            refused += fast.skipped
            found = []
            for parse in (parse_block, parse_block_slowly):
                options = {"kernel": kernel} if parse is parse_block else {}
                try:
                    parse(block, MODULI, select=select, **options)
                    found.append(None)
                except BadRow as error:
                    found.append((str(error), error.offset, error.column))
            assert found[0] == found[1]
    assert refused > FUZZED_ROWS / 2


@needs_numba
def test_both_kernels_give_the_same_bits() -> None:
    edges = [2**24 - 1, 2**24, 2**24 + 1, 10**7, 10**8 - 1, 10**8, 10**15, 10**16 - 1, -(10**16) + 1, -1]
    integers = [*range(70_000), *edges, *np.random.default_rng(0).integers(0, 10**16, 9_000).tolist()]
    integers += [0] * (-len(integers) % 13)
    lines = [
        b"\t".join((b"1", *(b"%d" % n for n in integers[start : start + 13]), *[b"%08x" % (start * 48_611)] * 26))
        for start in range(0, len(integers), 13)
    ]
    block = Block("f", 0, b"\n".join(lines))
    moduli = [1, 2, 3, 7, 2**31 - 1, 2**31 - 2, 2**30, 65_535, 65_536, 65_537, *MODULI[10:]]
    assert bits(parse_block(block, moduli, kernel="numba")) == bits(parse_block(block, moduli, kernel="numpy"))


@needs_numba
def test_threads_do_not_share_working_memory() -> None:
    blocks = [Block("f", 0, rows_text(rows, rows)) for rows in (1, 300, 20, 700, 90)]
    expected = [bits(parse_block(block, MODULI, kernel="numpy")) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda block: bits(parse_block(block, MODULI)), blocks * 40))
    assert got == expected * 40


def test_a_result_outlives_the_next_block() -> None:
    first = parse_block(Block("f", 0, rows_text(50, 1)), MODULI)
    before = bits(first)
    parse_block(Block("f", 0, rows_text(60, 2)), MODULI)
    assert bits(first) == before


def test_without_numba_numpy_takes_over() -> None:
    code = """
import sys
sys.modules["numba"] = None
from dlrm_examples.criteo.parse import chosen_kernel, parse_block, warm_up
from dlrm_examples.criteo.tsv import Block
warm_up()
print(chosen_kernel(), len(parse_block(Block("", 0, b"1" + b"\\t" * 39), (5,) * 26)))
try:
    warm_up("numba")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "numpy 1",
        f"numba is not installed; run: {install_line('criteo')}",
    ]
