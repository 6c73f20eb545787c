"""What is read at once, lines, a row group or parsed rows; which rows are held out for the test; their order."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.hashing import mix64
from dlrm_examples.criteo.tsv import Block

__all__ = [
    "Arrays",
    "ArraysRef",
    "BlockRef",
    "Content",
    "RowGroup",
    "RowGroupRef",
    "Split",
    "block_order",
    "file_key",
    "pread",
    "read_block",
    "row_numbers",
    "row_offsets",
    "row_order",
    "scan_blocks",
]

# The order of the blocks and the orders inside them must not share a random stream.
BLOCK_ORDER, ROW_ORDER = 0, 1

LOOK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BlockRef:
    """The lines of `path` whose first byte lies in offset .. offset + length - 1.

    The rule of Hadoop's input splits: every line belongs to exactly one range, wherever the cuts fall, so a
    reference needs no look into the file and can be read anywhere.
    """

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RowGroupRef:
    """Row group `group` of the file `path`: `rows` rows, of which the first is row `first_row` of the file."""

    path: str
    group: int
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group, decoded: 40 columns in the order of a TSV line, categories of text as dictionaries."""

    ref: RowGroupRef
    table: Any

    @property
    def path(self) -> str:
        """The file."""
        return self.ref.path


@dataclass(frozen=True, slots=True)
class ArraysRef:
    """`rows` parsed rows of the file `path`, of which the first is row `first_row` of the file."""

    path: str
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Arrays:
    """Rows that were parsed before, as they lie in the file.

    Args:
        ref: which rows.
        path: the file that they were parsed from, where it is known, else the one that they are in.
        offsets: [n] int64, what a `Split` knows the rows by.
        labels: [n], 0 or 1.
        dense: [n, 13], whole numbers, or floats that are logarithms already.
        categories: [n, 26], whole numbers, no modulus taken.
    """

    ref: ArraysRef
    path: str
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[Any]
    dense: npt.NDArray[Any]
    categories: npt.NDArray[Any]


Content = Block | RowGroup | Arrays


def scan_blocks(paths: Iterable[str | os.PathLike[str]], block_bytes: int) -> list[BlockRef]:
    """Cut files into ranges of `block_bytes`; only their sizes are read."""
    return [
        BlockRef(os.fspath(path), offset, min(block_bytes, size - offset))
        for path in paths
        for size in (os.path.getsize(path),)
        for offset in range(0, size, block_bytes)
    ]


def read_block(ref: BlockRef) -> Block:
    """Read the lines that begin in the range (possibly none, when one line is longer than the range)."""
    with open(ref.path, "rb", buffering=0) as file:
        # Two short looks at the ends of the range, so that the text itself is copied once and never again.
        begin, end = (_line_start(file.fileno(), offset) for offset in (ref.offset, ref.offset + ref.length))
        if begin >= ref.offset + ref.length:
            return Block(ref.path, ref.offset + ref.length, b"")
        return Block(ref.path, begin, pread(file.fileno(), begin, end - begin))


def _line_start(descriptor: int, offset: int) -> int:
    """Return where the first line begins that does not begin before `offset`: the file's end if there is none."""
    if offset == 0:
        return 0
    position = offset - 1
    while part := pread(descriptor, position, LOOK_BYTES):
        if (found := part.find(b"\n")) >= 0:
            return position + found + 1
        position += len(part)
    return position


def pread(descriptor: int, offset: int, length: int) -> bytes:
    """Read exactly `length` bytes, fewer only at the end of the file."""
    parts = []
    while length and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class Split:
    """A random share of the rows, decided for each row by a hash of seed, file name and byte offset.

    It does not depend on block size, reading order, other files, or where the folder lies; nor on how the file is
    compressed or packed. Parquet and arrays have rows, not bytes: there a row's number in the file is its offset.

    Args:
        name: ``train`` or ``test``.
        test_fraction: share of the rows that are for testing, 0..1; 0 gives all rows to ``train``.
        seed: another seed, another split.
    """

    name: str = "train"
    test_fraction: float = 0.1
    seed: int = 0

    def select(self, path: str, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of the lines (or rows) at `offsets` [n] belong to this split [n]."""
        file = file_key(path, self.seed)
        drawn = mix64(offsets.astype(np.uint64) ^ file) >> np.uint64(11)
        test = drawn.astype(np.float64) < self.test_fraction * 2.0**53
        return test if self.name == "test" else ~test


def file_key(path: str, seed: int) -> npt.NDArray[np.uint64]:
    """Return what is mixed into the hashes of a file's byte offsets, [1]: drawn from its name and a seed."""
    name = Path(path).name.removesuffix(".packed").removesuffix(".gz").removesuffix(".zst")
    key = zlib.crc32(name.encode()) + ((seed & 0xFFFFFFFF) << 32)
    return mix64(np.array([key], np.uint64))


def block_order(blocks: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of the blocks' numbers drawn from (seed, epoch), [blocks]."""
    return np.random.default_rng([BLOCK_ORDER, seed, epoch]).permutation(np.arange(blocks))


def row_order(rows: int, seed: int, epoch: int, block: int) -> npt.NDArray[np.int64]:
    """Return a permutation of the rows of one block drawn from (seed, epoch, block), [rows]."""
    return np.random.default_rng([ROW_ORDER, seed, epoch, block]).permutation(rows)


def row_offsets(content: Content) -> npt.NDArray[np.int64]:
    """Return what a `Split` knows the rows by, [n]: a line's byte in its file, a Parquet row's number in its file."""
    if isinstance(content, Block):
        return _line_offsets(content)
    return row_numbers(content.ref) if isinstance(content, RowGroup) else content.offsets


def row_numbers(ref: RowGroupRef | ArraysRef) -> npt.NDArray[np.int64]:
    """Return the rows' numbers in their file, [n]."""
    return ref.first_row + np.arange(ref.rows)


def _line_offsets(block: Block) -> npt.NDArray[np.int64]:
    if not block.data:
        return np.empty(0, np.int64)
    after = np.flatnonzero(np.frombuffer(block.data, np.uint8)[:-1] == ord("\n")) + 1
    return np.concatenate(([0], after)) + block.offset
