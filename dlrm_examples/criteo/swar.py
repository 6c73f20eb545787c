"""Criteo TSV parsed by numpy, without a Python loop over rows.

All separators of a block are found at once, each field is loaded as one 64-bit word, and its 8 characters are decoded
by a few multiplications (https://kholdstare.github.io/technical/2020/05/26/faster-integer-parsing.html, done here on
arrays of words). `kernel.py` does the same several times faster where numba is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.hashing import remainders
from dlrm_examples.criteo.tsv import DENSE, LONGEST_INTEGER, WIDTH, Block, Rows, Select, bad_row

__all__ = ["PAD", "hexadecimals", "logarithms", "padded", "parse"]

# A word is read up to 16 bytes before the end of a field, so the text gets this much room on both sides.
PAD = 16
EACH_BYTE = 0x0101010101010101


def parse(block: Block, table_rows: Sequence[int], on_bad_row: str, select: Select | None) -> Rows:
    """Do what `parse.parse_block` says."""
    text, words = padded(block.data)
    starts, ends, miscounted = _fields(text, block.offset, select)
    labels, bad_label = _labels(text, starts[:, 0], ends[:, 0])
    dense, bad_dense = _integers(text, words, starts[:, 1 : 1 + DENSE], ends[:, 1 : 1 + DENSE])
    hashes, bad_hash = hexadecimals(words, starts[:, 1 + DENSE :], ends[:, 1 + DENSE :])
    rows = Rows(labels, dense, np.empty(hashes.shape, np.int32))
    for column, modulus in enumerate(table_rows):
        rows.categories[:, column] = remainders(hashes[:, column], modulus)
    bad = np.concatenate((bad_label[:, None], bad_dense, bad_hash), axis=1)
    bad_rows = np.asarray(bad.any(axis=1))
    skipped = len(miscounted) + int(bad_rows.sum())
    if skipped and on_bad_row == "error":
        first = np.concatenate((miscounted, starts[bad_rows, 0])).min()
        raise bad_row(block.path, block.offset + int(first) - PAD, text[first:].tobytes().partition(b"\n")[0])
    good = rows.take(~bad_rows) if bad_rows.any() else rows
    return Rows(good.labels, good.dense, good.categories, skipped)


def padded(data: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    """Return the lines with room around them: as bytes, and as the little-endian 64-bit word at each byte."""
    newline = b"" if data.endswith(b"\n") or not data else b"\n"
    padded = b"".join((bytes(PAD), data, newline, bytes(PAD)))
    words = np.ndarray((len(padded) - 7,), np.dtype("<u8"), padded, strides=(1,))
    return np.frombuffer(padded, np.uint8), words


def _fields(
    text: npt.NDArray[np.uint8], offset: int, select: Select | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return starts and ends of the fields of the selected lines of 40 columns, and the starts of the other lines."""
    separators = np.flatnonzero((text - np.uint8(9)) < 2)
    line_ends = np.flatnonzero(text == 10)
    line_starts = np.concatenate(([PAD], line_ends[:-1] + 1)) if len(line_ends) else line_ends
    columns = np.diff(np.searchsorted(separators, line_starts), append=len(separators))
    chosen = np.ones(len(line_starts), bool) if select is None else select(line_starts + (offset - PAD))
    whole = columns == WIDTH
    kept = chosen & whole
    if not kept.all():
        separators = separators[np.repeat(kept, columns)]
    ends = separators.reshape(-1, WIDTH)
    starts = np.empty_like(ends)
    starts[:, 0] = line_starts[kept]
    starts[:, 1:] = ends[:, :-1] + 1
    return starts, ends, line_starts[chosen & ~whole]


def _labels(
    text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    digit = text[starts] - np.uint8(ord("0"))
    return digit.astype(np.float32), (digit > 1) | (ends - starts != 1)


def _integers(
    text: npt.NDArray[np.uint8],
    words: npt.NDArray[np.uint64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return log(max(x, 0) + 1) and which fields are neither empty nor an integer of up to 16 digits."""
    negative = text[starts] == ord("-")
    digits = ends - starts - negative
    values, bad = _decimal(words, ends, digits)
    bad |= (digits > LONGEST_INTEGER) | (negative & (digits == 0))
    long = digits > 8
    if long.any():
        upper, bad_upper = _decimal(words, ends[long] - 8, digits[long] - 8)
        values[long] += upper * np.uint64(10**8)
        bad[long] |= bad_upper
    values[negative] = 0
    return logarithms(values), bad


def logarithms(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return log(x + 1) of whole numbers from 0, any shape: numpy's in float32, the same wherever it is taken."""
    logarithms: npt.NDArray[np.float32] = np.log(values.astype(np.float32) + np.float32(1))
    return logarithms


def _decimal(
    words: npt.NDArray[np.uint64], ends: npt.NDArray[np.int64], digits: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return the numbers written in the last (at most 8) of `digits` characters before `ends`, and which are none."""
    # The first character is the lowest byte: shifting there and back clears what stands before the field.
    before = ((8 - np.minimum(digits, 8)) * 8).astype(np.uint64)
    word = ((words[ends - 8] ^ np.uint64(0x30 * EACH_BYTE)) >> before) << before
    bad = ((word | (word + np.uint64(0x06 * EACH_BYTE))) & np.uint64(0xF0 * EACH_BYTE)) != 0
    word = (word * np.uint64(10 * 2**8 + 1)) >> np.uint64(8)
    word = ((word & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(100 * 2**16 + 1)) >> np.uint64(16)
    word = ((word & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(10000 * 2**32 + 1)) >> np.uint64(32)
    return word, bad


def hexadecimals(
    words: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return the numbers and which fields are neither empty nor 8 hex digits."""
    length = ends - starts
    missing = length == 0
    word = words[starts]
    letter = (word >> np.uint64(6)) & np.uint64(EACH_BYTE)
    nibble = (word & np.uint64(0x0F * EACH_BYTE)) + letter * np.uint64(9)
    # Written back as lower-case text it must be what was read: that refuses every other character.
    above_nine = ((nibble + np.uint64(0x06 * EACH_BYTE)) >> np.uint64(4)) & np.uint64(EACH_BYTE)
    written = nibble + np.uint64(0x30 * EACH_BYTE) + above_nine * np.uint64(39)
    wrong = (written ^ (word | (letter << np.uint64(5)))) | (nibble & np.uint64(0xF0 * EACH_BYTE))
    bad = ~missing & ((wrong != 0) | (length != 8))
    word = (nibble * np.uint64(2**12 + 1)) >> np.uint64(8)
    word = ((word & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(2**24 + 1)) >> np.uint64(16)
    word = ((word & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(2**48 + 1)) >> np.uint64(32)
    hashes = word.astype(np.uint32)
    hashes[missing] = 0
    return hashes, bad
