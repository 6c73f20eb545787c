"""Parquet files of Criteo rows, read a row group at a time.

The columns are called label, I1..I13, C1..C26, or are 40 in that order. Label and integers are numbers (floats too, as
pandas writes integers with gaps), categories text of 8 hex digits or the number itself. Null and "" are missing values.
A row group is what a block is in a text file: write them with some ten thousand rows, not the usual million.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.blocks import RowGroup, RowGroupRef, row_offsets
from dlrm_examples.criteo.hashing import remainders
from dlrm_examples.criteo.swar import PAD, hexadecimals, logarithms, padded
from dlrm_examples.criteo.tsv import (
    CATEGORIES,
    COLUMNS,
    DENSE,
    LONGEST_INTEGER,
    WIDTH,
    BadRow,
    Rows,
    Select,
    expected_in,
)
from intune_callbacks.errors import ConfigError, MissingPackage

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:
    raise MissingPackage("pyarrow", "criteo") from None

__all__ = ["from_bytes", "parse_row_group", "read_row_group", "scan_parquet", "to_bytes"]


def scan_parquet(path: str) -> list[RowGroupRef]:
    """Return the row groups of a file; only its footer is read.

    Raises:
        ConfigError: the file is no Parquet file, or lacks a column, or has one of another type.
    """
    metadata, _ = _layout(path, os.stat(path).st_mtime_ns)
    refs, first_row = [], 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        refs.append(RowGroupRef(path, group, first_row, rows))
        first_row += rows
    return refs


@functools.lru_cache(maxsize=4096)
def _layout(path: str, _mtime_ns: int) -> tuple[Any, tuple[str, ...]]:
    """Return a file's footer and the names of its 40 columns."""
    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowException as error:
        raise ConfigError([f"paths: {path} is no Parquet file: {error}"]) from error
    schema = metadata.schema.to_arrow_schema()
    names = tuple(COLUMNS) if set(COLUMNS) <= set(schema.names) else tuple(schema.names)
    if len(names) != WIDTH:
        missing = ", ".join(name for name in COLUMNS if name not in schema.names)
        raise ConfigError([f"paths: {path} has {len(names)} columns, expected {WIDTH}, or these by name: {missing}"])
    problems = []
    for column, name in enumerate(names):
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        number = pa.types.is_integer(kind) or (column <= DENSE and (pa.types.is_floating(kind) or kind == pa.bool_()))
        text = column > DENSE and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        if not (number or text):
            expected = "whole numbers" if column <= DENSE else "text or whole numbers"
            problems.append(f"paths: {path}, column {name} ({COLUMNS[column]}): holds {kind}, expected {expected}")
    if problems:
        raise ConfigError(problems)
    return metadata, names


def read_row_group(ref: RowGroupRef) -> RowGroup:
    """Read and decode a row group."""
    metadata, names = _layout(ref.path, os.stat(ref.path).st_mtime_ns)
    categories = list(names[1 + DENSE :])
    file = pq.ParquetFile(ref.path, metadata=metadata, read_dictionary=categories, pre_buffer=False)
    with file:
        return RowGroup(ref, file.read_row_group(ref.group, columns=list(names), use_threads=False).select(names))


def to_bytes(content: RowGroup) -> bytes:
    """Return the decoded row group as bytes, for frameworks that pass nothing else between stages."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, content.table.schema) as writer:
        writer.write_table(content.table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_bytes(ref: RowGroupRef, data: bytes) -> RowGroup:
    """Return the row group that `to_bytes` wrote."""
    return RowGroup(ref, pa.ipc.open_stream(data).read_all())


def parse_row_group(content: RowGroup, table_rows: Sequence[int], on_bad_row: str, select: Select | None) -> Rows:
    """Do with a row group what `parse.parse_block` does with a block; the lines' offsets are the rows' numbers."""
    chosen, table = np.arange(content.ref.rows), content.table
    if select is not None:
        chosen = np.flatnonzero(select(row_offsets(content)))
        # Copying rows is cheaper than converting them for nothing.
        table = table if len(chosen) == content.ref.rows else table.take(pa.array(chosen))
    columns = table.columns
    wrong = np.full(len(chosen), WIDTH, np.int64)

    def refuse(column: int, bad: npt.NDArray[np.bool_]) -> None:
        if bad.any():
            np.minimum(wrong, column, out=wrong, where=bad)

    numbers, missing, bad = _whole_numbers(columns[0])
    refuse(0, bad | missing | (numbers < 0) | (numbers > 1))
    labels = numbers.astype(np.float32)
    integers = np.empty((DENSE, len(chosen)), np.int64)
    for column in range(DENSE):
        integers[column], _, bad = _whole_numbers(columns[1 + column])
        refuse(1 + column, bad | (np.abs(integers[column]) >= 10**LONGEST_INTEGER))
    dense = np.ascontiguousarray(logarithms(np.maximum(integers, 0)).T)
    categories = np.empty((len(chosen), CATEGORIES), np.int32)
    for column, modulus in enumerate(table_rows):
        hashes, bad = _hashes(columns[1 + DENSE + column])
        refuse(1 + DENSE + column, bad)
        categories[:, column] = remainders(hashes, modulus)
    good = wrong == WIDTH
    refused = np.flatnonzero(~good)
    if len(refused) and on_bad_row == "error":
        raise _bad_row(content, int(chosen[refused[0]]), int(wrong[refused[0]]))
    rows = Rows(labels, dense, categories, len(refused))
    return rows.take(good) if len(refused) else rows


def _whole_numbers(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return a column's numbers, 0 where missing, which are missing, and which are not whole numbers, each [n]."""
    array = _plain(column)
    missing = np.asarray(array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False))
    numbers = array.cast(pa.int8()) if array.type == pa.bool_() else array
    values = numbers.fill_null(0).to_numpy(zero_copy_only=False)
    bad = np.zeros(len(values), np.bool_)
    if values.dtype.kind == "f":
        values = np.where(missing, 0, values).astype(np.float64)
        bad = (values != np.floor(values)) | (np.abs(values) >= 2.0**62)
        values = np.where(bad, 0, values)
    elif values.dtype == np.uint64:
        bad = values >= np.uint64(2**62)
        values = np.where(bad, np.uint64(0), values)
    return values.astype(np.int64), missing, bad


def _hashes(column: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return a category column's numbers, 0 where missing, and which are none, each [n]."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if not pa.types.is_dictionary(array.type) or pa.types.is_integer(array.type.value_type):
        whole, _, bad = _whole_numbers(column)
        bad |= (whole < 0) | (whole >= 2**32)
        return np.where(bad, 0, whole).astype(np.uint32), bad
    dictionary = array.dictionary
    _, offsets, data = dictionary.buffers()
    wide = np.int64 if pa.types.is_large_string(dictionary.type) else np.int32
    ends = np.frombuffer(offsets, wide)[dictionary.offset :][: len(dictionary) + 1].astype(np.int64) + PAD
    # One entry more, empty, for rows without a value.
    begins, ends = np.append(ends[:-1], PAD), np.append(ends[1:], PAD)
    _, words = padded(data.to_pybytes() if data is not None else b"")
    which = array.indices.fill_null(len(dictionary)).to_numpy(zero_copy_only=False)
    if len(which) < len(begins):
        return hexadecimals(words, begins[which], ends[which])
    numbers, bad = hexadecimals(words, begins, ends)
    return numbers[which], bad[which] if bad.any() else np.zeros(1, np.bool_)


def _plain(column: Any) -> Any:
    """Return a column as one array without a dictionary."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _bad_row(content: RowGroup, row: int, column: int) -> BadRow:
    ref, name = content.ref, COLUMNS[column]
    value = content.table.columns[column][row].as_py()
    message = (
        f"{ref.path}: row group {ref.group}, row {row} of it, {name}: found {value!r:.40}, expected "
        f"{expected_in(column)}; correct the row, or pass on_bad_row='skip' to leave it out"
    )
    return BadRow(message, path=ref.path, offset=ref.first_row + row, column=name)
