"""Criteo files of any format, told from their names: ``.gz``, ``.zst``, ``.parquet``, arrays, anything else plain TSV.

parquet.py and packed.py need packages of their own and are imported only when there is a file for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.arrays import is_arrays, parse_arrays, read_arrays, scan_arrays
from dlrm_examples.criteo.blocks import (
    Arrays,
    ArraysRef,
    BlockRef,
    Content,
    RowGroupRef,
    Split,
    block_order,
    read_block,
    row_numbers,
    row_offsets,
    scan_blocks,
)
from dlrm_examples.criteo.compressed import Cursor, FrameRef, PieceRef, compression, read_frames, scan_compressed
from dlrm_examples.criteo.parse import parse_block
from dlrm_examples.criteo.tsv import ALL_BITS_OF_EACH, BadRow, Block, Rows, Select

__all__ = [
    "Reader",
    "Ref",
    "count_rows",
    "epoch_order",
    "is_parquet",
    "parse",
    "parse_selected",
    "scan",
]


MAPPED = -1

Ref = BlockRef | PieceRef | FrameRef | RowGroupRef | ArraysRef


def is_parquet(path: str) -> bool:
    """Tell whether a file is Parquet, from its name."""
    return path.lower().endswith((".parquet", ".pq"))


def scan(paths: Iterable[str | os.PathLike[str]], block_bytes: int) -> list[Ref]:
    """Cut files into what is read at once: `block_bytes` bytes of the file, a row group, or a block of a packed file.

    Raises:
        ConfigError: a file is not what its name says, was cut short, or has other columns.
        MissingPackage: what reads this format is not installed.
    """
    refs: list[Ref] = []
    for path in (os.fspath(path) for path in paths):
        if is_parquet(path):
            from dlrm_examples.criteo.parquet import scan_parquet

            refs += scan_parquet(path)
        elif is_arrays(path):
            refs += scan_arrays(path, block_bytes)
        else:
            refs += scan_compressed(path, block_bytes) if compression(path) else scan_blocks([path], block_bytes)
    return refs


class Reader:
    """Reads references; one instance per pipeline, for any number of threads.

    Args:
        cache_dir: a folder for what was parsed: a block that is not there yet is parsed and put there, one with a
            malformed row is not. None for none.
        kernel: what parses, as for `parse.parse_block`.
    """

    def __init__(self, cache_dir: str | None = None, kernel: str | None = None) -> None:
        self._cursors: dict[str, Cursor] = {}
        self._given, self._cache = (cache_dir, kernel), None
        if cache_dir is not None:
            from dlrm_examples.criteo.cache import BlockCache

            self._cache = BlockCache(cache_dir)

    def __reduce__(self) -> tuple[type[Reader], tuple[str | None, str | None]]:
        # A copy in another process begins its compressed files anew.
        return Reader, self._given

    def __call__(self, ref: Ref) -> Content:
        """Return the lines, the row group, or the parsed rows that `ref` stands for."""
        cached = self.cached(ref)
        if cached is not None:
            return cached
        content = self._read(ref)
        if self._cache is None or self._cache.is_full or isinstance(ref, ArraysRef):
            return content
        try:
            rows = parse_selected(content, ALL_BITS_OF_EACH, kernel=self._given[1])
        except BadRow:
            return content
        return self._cache.put(ref, rows, row_offsets(content))

    def cached(self, ref: Ref, *, checked: bool = True) -> Arrays | None:
        """Return what is in the cache; None where it is not there.

        Args:
            ref: what is asked for.
            checked: as for `read_arrays`.
        """
        if self._cache is None or isinstance(ref, ArraysRef):
            return None
        return self._cache.get(ref, checked=checked)

    def quickly(self, ref: Ref) -> Content:
        """Return what calling it would, without parsing, and without looking for damage."""
        if isinstance(ref, ArraysRef):
            return read_arrays(ref, checked=False)
        return self.cached(ref, checked=False) or self._read(ref)

    def _read(self, ref: Ref) -> Content:
        if isinstance(ref, BlockRef):
            return read_block(ref)
        if isinstance(ref, ArraysRef):
            return read_arrays(ref)
        if isinstance(ref, FrameRef):
            return read_frames(ref)
        if isinstance(ref, PieceRef):
            # Of two threads that come first, one cursor stays.
            return self._cursors.setdefault(ref.path, Cursor(ref.path)).read(ref)
        from dlrm_examples.criteo.parquet import read_row_group

        return read_row_group(ref)

    def to_bytes(self, content: Content) -> tuple[int, bytes]:
        """Return a number and bytes that stand for `content`, for frameworks that pass nothing else between stages."""
        if isinstance(content, Block):
            return content.offset, content.data
        if isinstance(content, Arrays):
            return MAPPED, b""
        from dlrm_examples.criteo import parquet

        return content.ref.first_row, parquet.to_bytes(content)

    def from_bytes(self, ref: Ref, number: int, data: bytes) -> Content:
        """Return what `to_bytes` was given, read from `ref`."""
        if number == MAPPED:
            # What was not kept, or is not there any more, is read again.
            return self.quickly(ref)
        if isinstance(ref, BlockRef | PieceRef | FrameRef):
            return Block(ref.path, number, data)
        from dlrm_examples.criteo import parquet

        assert isinstance(ref, RowGroupRef)
        return parquet.from_bytes(ref, data)


def parse(
    content: Content, table_rows: Sequence[int], *, on_bad_row: str, split: Split, kernel: str | None = None
) -> Rows:
    """Parse those rows that belong to the split.

    Args:
        content: what a `Reader` returned.
        table_rows, on_bad_row, kernel: as for `parse.parse_block`.
        split: which rows.
    """
    select = (lambda offsets: split.select(content.path, offsets)) if split.test_fraction else None
    return parse_selected(content, table_rows, on_bad_row=on_bad_row, select=select, kernel=kernel)


def parse_selected(
    content: Content,
    table_rows: Sequence[int],
    *,
    on_bad_row: str = "error",
    select: Select | None = None,
    kernel: str | None = None,
) -> Rows:
    """Parse those rows that `select` chooses, and do little with the others.

    Args:
        content: what a `Reader` returned.
        table_rows, on_bad_row, kernel: as for `parse.parse_block`.
        select: the rows' offsets, as of `row_offsets` -> which of them to parse [n] bool; all by default.
    """
    if isinstance(content, Block):
        return parse_block(content, table_rows, on_bad_row=on_bad_row, select=select, kernel=kernel)
    if isinstance(content, Arrays):
        return parse_arrays(content, table_rows, on_bad_row, select)
    from dlrm_examples.criteo.parquet import parse_row_group

    return parse_row_group(content, table_rows, on_bad_row, select)


def epoch_order(refs: Sequence[Ref], *, shuffle: bool, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order in which to read the references, [n]: all mixed, but the pieces of one stream in their order."""
    if not shuffle:
        return np.arange(len(refs))
    order = block_order(len(refs), seed, epoch)
    numbers: dict[str, int] = {}
    streams = [numbers.setdefault(ref.path, len(numbers)) if isinstance(ref, PieceRef) else -1 for ref in refs]
    shuffled = np.array(streams, np.int64)[order]
    for number in numbers.values():
        places = np.flatnonzero(shuffled == number)
        order[places] = np.sort(order[places])
    return order


def count_rows(refs: Sequence[Ref], split: Split, read: Reader) -> int:
    """Return how many rows of the split the references hold; text that is not in the cache is read, not parsed.

    Args:
        refs: the references.
        split: which rows count.
        read: what would read them.
    """
    rows = 0
    for ref in refs:
        offsets = row_numbers(ref) if isinstance(ref, RowGroupRef) else row_offsets(read.quickly(ref))
        rows += int(split.select(ref.path, offsets).sum())
    return rows
