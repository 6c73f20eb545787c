"""Criteo TSV parsed by a compiled loop over bytes: `swar.py`'s result, bit for bit, in a fraction of its time.

Needs numba, and compiles once per machine: the machine code is kept beside this file, or in numba's cache folder where
that cannot be written. Whatever has threads calls `warm_up` before it starts them. Positions are unsigned all through:
numba turns a negative index into one counted from the end, and that test costs a quarter of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.scratch import scratch
from dlrm_examples.criteo.swar import logarithms
from dlrm_examples.criteo.tsv import CATEGORIES, DENSE, LONGEST_INTEGER, Block, Rows, Select, bad_row
from intune_callbacks.errors import MissingPackage

try:
    from numba import njit
except ModuleNotFoundError:
    raise MissingPackage("numba", "criteo") from None

__all__ = ["parse", "warm_up"]

Words = npt.NDArray[np.uint64]
Text = npt.NDArray[np.uint8]

ZERO, ONE, EIGHT, LONGEST = (np.uint64(n) for n in (0, 1, 8, LONGEST_INTEGER))
EACH_BYTE = np.uint64(0x0101010101010101)
EACH_TAB, EACH_ZERO, EACH_SIX = (np.uint64(n * 0x0101010101010101) for n in (9, 0x30, 6))
HIGH_BIT, HIGH_HALF = (np.uint64(n * 0x0101010101010101) for n in (0x80, 0xF0))
LOW_16, LOW_32 = np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
TAB, NEWLINE, MINUS = np.uint8(9), np.uint8(10), np.uint8(45)

ROOM, CHUNK = 16, 128

# numpy's float32 logarithm is not the C library's: both paths must take it from numpy. The table stays in the L2 cache;
# larger integers, about one field in a hundred, are left to numpy after the loop.
LOGARITHMS = logarithms(np.arange(1 << 16))
LOGARITHMS_SIZE = np.uint64(len(LOGARITHMS))
NO_DIGITS = np.uint16(256)


def _two_digits() -> npt.NDArray[np.uint16]:
    """Return the numbers two characters write in hex, by the 16-bit word they are, `NO_DIGITS` for all other words.

    What is read of it, some 2 kB, stays in the L1 cache: four looks are cheaper than decoding eight characters at once
    and checking them.
    """
    numbers = np.full(1 << 16, NO_DIGITS)
    digits = np.frombuffer(b"0123456789abcdefABCDEF", np.uint8).astype(np.uint16)
    worth = np.array([int(chr(digit), 16) for digit in digits], np.uint16)
    numbers[digits[:, None] + 256 * digits] = 16 * worth[:, None] + worth
    return numbers


HEXADECIMAL = _two_digits()


def parse(block: Block, table_rows: Sequence[int], on_bad_row: str, select: Select | None) -> Rows:
    """Do what `parse.parse_block` says."""
    data = block.data if block.data.endswith(b"\n") or not block.data else block.data + b"\n"
    text = np.frombuffer(data, np.uint8)
    lines = int(_newlines(text))
    starts = np.empty(0, np.uint64)
    if select is not None:
        starts = _line_starts(text, np.empty(lines, np.uint64))
        starts = starts[select(starts.view(np.int64) + block.offset)]
        lines = len(starts)
    rows = Rows(np.empty(lines, np.float32), np.empty((lines, DENSE), np.float32), np.empty((lines, CATEGORIES), "i4"))
    large = scratch("large", lines * DENSE, np.int64)
    moduli, reciprocals = _reciprocals(tuple(table_rows))
    # Fields are read 8 bytes at a time: the last lines, which have nothing behind them, are parsed in a copy with room.
    cut = data.rfind(b"\n", 0, max(len(data) - ROOM, 0)) + 1
    first_of_last = np.searchsorted(starts, np.uint64(cut))
    kept = skipped = larger = 0
    for begin, end, piece, chosen in (
        (0, cut, data, starts[:first_of_last]),
        (cut, len(data), data[cut:] + bytes(ROOM), starts[first_of_last:] - np.uint64(cut)),
    ):
        words = np.ndarray((max(len(piece) - 7, 0),), np.dtype("<u8"), piece, strides=(1,))
        kept, skipped, larger, refused = _parse(
            np.frombuffer(piece, np.uint8), words, end - begin, chosen, select is not None, on_bad_row == "skip",
            moduli, reciprocals, LOGARITHMS, HEXADECIMAL, rows.labels, rows.dense, rows.categories, large,
            kept, skipped, larger,
        )  # fmt: skip
        if refused >= 0:
            start = begin + refused
            raise bad_row(block.path, block.offset + start, data[start : data.index(b"\n", start)])
    flat = rows.dense.reshape(-1)
    flat[large[:larger]] = np.log(flat[large[:larger]])
    return Rows(rows.labels[:kept], rows.dense[:kept], rows.categories[:kept], skipped)


@functools.cache
def warm_up() -> None:
    """Compile, or load what was compiled before: seconds the first time on a machine, then tenths of a second."""
    for select in (None, lambda offsets: np.ones(len(offsets), np.bool_)):
        parse(Block("", 0, b""), (1,) * CATEGORIES, "error", select)


@functools.lru_cache(maxsize=16)
def _reciprocals(table_rows: tuple[int, ...]) -> tuple[Words, Words]:
    """Return the moduli, [26], and ceil(2**64 / modulus), [26]: with it a modulus is two multiplications."""
    moduli = np.array(table_rows, np.uint64)
    return moduli, np.uint64(2**64 - 1) // moduli + ONE


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL, and keep the machine code on disk if there is a place for it."""
    try:
        compiled: Callable[..., Any] = njit(nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = njit(nogil=True)(function)
    return compiled


# What is called for every field takes numbers only: an array handed over is counted, which costs more than the work.
_inlined = njit(nogil=True, forceinline=True)


@_compiled
def _newlines(text: Text) -> int:
    # Counted in bytes, chunk by chunk, the compiler takes 32 characters at once.
    count, whole = 0, len(text) // CHUNK
    for chunk in range(whole):
        few = np.uint8(0)
        for position in range(chunk * CHUNK, (chunk + 1) * CHUNK):
            few = np.uint8(few + np.uint8(text[position] == NEWLINE))
        count += int(few)
    for position in range(whole * CHUNK, len(text)):
        count += text[position] == NEWLINE
    return count


@_compiled
def _line_starts(text: Text, starts: Words) -> Words:
    """Write where the lines begin, of which there are `len(starts)`."""
    number, start = np.uint64(0), np.uint64(0)
    for position in range(len(text)):
        if text[position] == NEWLINE:
            starts[number] = start
            number += ONE
            start = np.uint64(position) + ONE
    return starts


@_inlined
def _before_tab(word: np.uint64) -> tuple[np.uint64, np.bool_]:
    """Return how many characters stand before the first tab of eight, and whether there is one."""
    other = word ^ EACH_TAB
    tabs = (other - EACH_BYTE) & ~other & HIGH_BIT
    first = tabs & (~tabs + ONE)
    # `first` is bit 7 of the tab's byte; the factor's bytes count up, so that its top byte becomes the byte's number.
    return ((first >> np.uint64(7)) * np.uint64(0x0001020304050607)) >> np.uint64(56), tabs != ZERO


@_inlined
def _decimal(word: np.uint64, length: np.uint64) -> tuple[np.uint64, np.bool_]:
    """Return the number written in the first `length` < 8 characters, and whether they are digits."""
    digits = ((word ^ EACH_ZERO) << (np.uint64(56) - EIGHT * length)) << EIGHT
    right = ((digits | (digits + EACH_SIX)) & HIGH_HALF) == ZERO
    digits = (digits * np.uint64(10 * 2**8 + 1)) >> EIGHT
    digits = ((digits & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(100 * 2**16 + 1)) >> np.uint64(16)
    digits = ((digits & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(10000 * 2**32 + 1)) >> np.uint64(32)
    return digits, right


@_compiled
def _any_integer(text: Text, position: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return max(x, 0) of the field that begins here, and where its tab is: 0 if this is no integer."""
    negative = text[position] == MINUS
    if negative:
        position += ONE
    value, start = ZERO, position
    while np.uint8(48) <= text[position] <= np.uint8(57):
        value = value * np.uint64(10) + np.uint64(text[position] - np.uint8(48))
        position += ONE
    right = text[position] == TAB and position > start and position - start <= LONGEST
    return (ZERO if negative else value), (position if right else ZERO)


@_inlined
def _hexadecimal(
    first: np.uint16, second: np.uint16, third: np.uint16, fourth: np.uint16
) -> tuple[np.uint64, np.bool_]:
    """Return the number four entries of `HEXADECIMAL` make, and whether all are digits."""
    upper = (np.uint64(first) << np.uint64(24)) | (np.uint64(second) << np.uint64(16))
    number = upper | (np.uint64(third) << EIGHT) | np.uint64(fourth)
    return number, (first | second | third | fourth) < NO_DIGITS


@_inlined
def _remainder(value: np.uint64, modulus: np.uint64, reciprocal: np.uint64) -> np.uint64:
    """Return value % modulus of 32-bit numbers.

    Lemire, Kaser, Kurz: Faster remainder by direct computation (2019), the high 64 bits put together by hand.
    """
    low = reciprocal * value
    return ((low >> np.uint64(32)) * modulus + (((low & LOW_32) * modulus) >> np.uint64(32))) >> np.uint64(32)


@_compiled
def _parse(
    text: Text,
    words: Words,
    end: int,
    starts: Words,
    chosen: bool,
    skip: bool,
    moduli: Words,
    reciprocals: Words,
    logarithms: npt.NDArray[np.float32],
    hexadecimal: npt.NDArray[np.uint16],
    labels: npt.NDArray[np.float32],
    dense: npt.NDArray[np.float32],
    categories: npt.NDArray[np.int32],
    large: npt.NDArray[np.int64],
    row: int,
    skipped: int,
    larger: int,
) -> tuple[int, int, int, Any]:
    """Parse the lines at `starts`, or all if not `chosen`.

    Returns:
        Rows written, malformed lines left out, large integers written, each on top of the numbers given, and the
        start of the malformed line it ended at or -1.
    """
    here, position, line = ZERO, ZERO, 0
    while (line < len(starts)) if chosen else (position < np.uint64(end)):
        here = starts[line] if chosen else position
        line += 1
        label = text[here] - np.uint8(48)
        good = label <= np.uint8(1) and text[here + ONE] == TAB
        labels[row] = label
        position = here + np.uint64(2)
        seen = larger
        for column in range(DENSE if good else 0):
            word = words[position]
            length, closed = _before_tab(word)
            value, right = _decimal(word, length)
            position += length
            if not (closed and right):
                value, position = _any_integer(text, position - length)
                if position == ZERO:
                    good = False
                    break
            position += ONE
            if value < LOGARITHMS_SIZE:
                dense[row, column] = logarithms[value]
            else:
                dense[row, column] = np.float32(value) + np.float32(1)
                large[seen] = row * DENSE + column
                seen += 1
        for column in range(CATEGORIES if good else 0):
            closing = NEWLINE if column == CATEGORIES - 1 else TAB
            if text[position] == closing:
                categories[row, column] = 0
                position += ONE
                continue
            word = words[position]
            upper, lower = word & LOW_32, word >> np.uint64(32)
            value, right = _hexadecimal(
                hexadecimal[upper & LOW_16],
                hexadecimal[upper >> np.uint64(16)],
                hexadecimal[lower & LOW_16],
                hexadecimal[lower >> np.uint64(16)],
            )
            position += EIGHT
            if not (right and text[position] == closing):
                good = False
                break
            position += ONE
            categories[row, column] = _remainder(value, moduli[column], reciprocals[column])
        if good:
            row, larger = row + 1, seen
            continue
        if not skip:
            return row, skipped, larger, np.int64(here)
        skipped += 1
        position = here
        while text[position] != NEWLINE:
            position += ONE
        position += ONE
    return row, skipped, larger, -1
