"""Files of Criteo rows that were parsed before, mapped into memory; what they are is told from their names.

X.packed       what `convert` writes; see packed.py
X_dense.npy    with X_sparse.npy and X_labels.npy beside it: TorchRec's and MLPerf's preprocessed days
               (pytorch/torchrec, torchrec/datasets/criteo.py, BinaryCriteoUtils); dense is taken as it is
X.bin          40 int32 a row: label, integers, categories (facebookresearch/dlrm, data_loader_terabyte.py,
               CriteoBinDataset), as MLPerf's DLRM had them before its categories became multi-hot

A file that gets shorter while it is read ends the process, as every mapped file does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.blocks import Arrays, ArraysRef, row_numbers
from dlrm_examples.criteo.hashing import remainders
from dlrm_examples.criteo.swar import logarithms
from dlrm_examples.criteo.tsv import CATEGORIES, COLUMNS, DENSE, WIDTH, BadRow, Rows, Select, expected_in
from intune_callbacks.errors import ConfigError

__all__ = ["is_arrays", "is_beside", "parse_arrays", "read_arrays", "scan_arrays", "taken"]

PACKED, BINARY = ".packed", ".bin"
DENSE_NPY, SPARSE_NPY, LABELS_NPY = "_dense.npy", "_sparse.npy", "_labels.npy"
ROW_BYTES = 4 * WIDTH
OPEN_FILES = 64  # each has up to three file descriptors

Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def is_arrays(path: str) -> bool:
    """Tell whether a file holds arrays, from its name."""
    return path.lower().endswith((PACKED, BINARY, ".npy", ".npz"))


def is_beside(path: str) -> bool:
    """Tell whether a file is read with another one, from its name."""
    return path.lower().endswith((SPARSE_NPY, LABELS_NPY))


def scan_arrays(path: str, block_bytes: int) -> list[ArraysRef]:
    """Return the blocks of a packed file, or rows of any other by `block_bytes` bytes; nothing of what lies beside one.

    Raises:
        ConfigError: the file is not what its name says, or was cut short.
        MissingPackage: what a packed file needs is not installed.
    """
    if is_beside(path):
        return []
    if not path.lower().endswith((PACKED, DENSE_NPY, BINARY)):
        raise ConfigError(
            [f"paths: {path}: of arrays, X{DENSE_NPY} with X{SPARSE_NPY} and X{LABELS_NPY} beside it is read; no other"]
        )
    file = _opened(path, os.stat(path).st_mtime_ns)
    step = file.block_rows or max(1, block_bytes // ROW_BYTES)
    return [ArraysRef(path, first, min(step, file.rows - first)) for first in range(0, file.rows, step)]


def read_arrays(ref: ArraysRef, *, checked: bool = True) -> Arrays:
    """Return rows as they lie in the file.

    Args:
        ref: which rows.
        checked: read all of them now, and compare the checksum where there is one.

    Raises:
        BadData: a block of a packed file is damaged.
    """
    return taken(_opened(ref.path, os.stat(ref.path).st_mtime_ns), ref, checked=checked)


def taken(file: Any, ref: ArraysRef, *, checked: bool) -> Arrays:
    """Do what `read_arrays` does, of a file that is open: a `PackedFile`, or what is like one."""
    arrays: Arrays = file.take(ref)
    if checked and ref.rows:
        for array in (arrays.labels, arrays.dense[:, 0], arrays.categories[:, 0]):
            # The disk is waited for here, and without Python's lock: a row comes with all of the page it lies on.
            np.maximum.reduce(array)
        file.check(ref)
    return arrays


class _Mapped:
    """A file of which any rows can be taken, with the interface of `PackedFile`."""

    block_rows = None

    def __init__(self, labels: npt.NDArray[Any], dense: npt.NDArray[Any], categories: npt.NDArray[Any]) -> None:
        self._arrays, self.rows = (labels, dense, categories), len(labels)

    def take(self, ref: ArraysRef) -> Arrays:
        parts = (array[ref.first_row : ref.first_row + ref.rows] for array in self._arrays)
        return Arrays(ref, ref.path, row_numbers(ref), *parts)

    def check(self, ref: ArraysRef) -> None:
        """Do nothing: there is no checksum."""


@functools.lru_cache(maxsize=OPEN_FILES)
def _opened(path: str, _mtime_ns: int) -> Any:
    if path.lower().endswith(PACKED):
        from dlrm_examples.criteo.packed import PackedFile

        return PackedFile(path)
    return _Mapped(*(_binary(path) if path.lower().endswith(BINARY) else _three(path)))


def _binary(path: str) -> Columns:
    size = os.path.getsize(path)
    if size % ROW_BYTES or not size:
        raise ConfigError(
            [f"paths: {path} has {size} bytes, expected {ROW_BYTES} for each row: it was cut short, or is no such file"]
        )
    rows = np.memmap(path, "<i4", "r").view(np.ndarray).reshape(-1, WIDTH)
    return rows[:, 0], rows[:, 1 : 1 + DENSE], rows[:, 1 + DENSE :]


def _three(path: str) -> Columns:
    stem, problems, found = path[: -len(DENSE_NPY)], [], []
    for suffix, width, kinds in ((LABELS_NPY, 1, "biuf"), (DENSE_NPY, DENSE, "iuf"), (SPARSE_NPY, CATEGORIES, "iu")):
        name = stem + suffix
        try:
            array = np.load(name, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except (OSError, ValueError, EOFError) as error:
            problems.append(f"paths: {name}, which belongs to {path}, cannot be read: {error}")
            continue
        if array.ndim not in (2, 1 + (width > 1)) or array.size != len(array) * width:
            problems.append(f"paths: {name} has the shape {array.shape}, expected (rows, {width})")
        elif array.dtype.kind not in kinds:
            expected = "numbers" if "f" in kinds else "whole numbers"
            problems.append(f"paths: {name} holds {array.dtype}, expected {expected}")
        found.append(array)
    if not problems and len({len(array) for array in found}) > 1:
        problems.append(f"paths: {stem}_*.npy have {', '.join(str(len(array)) for array in found)} rows: not the same")
    if problems:
        raise ConfigError(problems)
    labels, dense, categories = found
    return labels.reshape(-1), dense, categories


def parse_arrays(content: Arrays, table_rows: Sequence[int], on_bad_row: str, select: Select | None) -> Rows:
    """Do with parsed rows what is left to do of `parse.parse_block`; the lines' offsets are the rows' numbers."""
    labels, dense, categories = content.labels, content.dense, content.categories
    chosen = np.arange(content.ref.rows)
    if select is not None:
        chosen = np.flatnonzero(select(content.offsets))
        if len(chosen) < content.ref.rows:
            labels, dense, categories = labels[chosen], dense[chosen], categories[chosen]
    bad = (labels != 0) & (labels != 1)
    if dense.dtype.kind == "f":
        finite = np.isfinite(dense)
        bad |= False if finite.all() else ~finite.all(axis=1)
        numbers = dense.astype(np.float32, copy=False)
    else:
        numbers = logarithms(np.maximum(dense, 0))
    rows = Rows(labels.astype(np.float32, copy=False), numbers, _reduced(categories, table_rows), int(bad.sum()))
    if not rows.skipped:
        return rows
    if on_bad_row == "error":
        raise _bad_row(content, int(chosen[np.flatnonzero(bad)[0]]))
    return rows.take(~bad)


def _reduced(categories: npt.NDArray[Any], table_rows: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the categories modulo the tables' rows, as 32-bit numbers with the sign they have in the file."""
    if categories.dtype not in (np.dtype(np.int32), np.dtype(np.uint32)):
        categories = np.remainder(categories, np.array(table_rows, np.int64))
        return categories.astype(np.int32)
    if len(set(table_rows)) == 1:
        reduced = remainders(categories, table_rows[0])
    else:
        reduced = np.remainder(categories, np.array(table_rows, categories.dtype))
    return reduced.view(np.int32)


def _bad_row(content: Arrays, row: int) -> BadRow:
    label, dense = content.labels[row], content.dense[row]
    number = content.ref.first_row + row
    column, found, expected = 0, label, expected_in(0)
    if label in (0, 1):
        column = 1 + int(np.flatnonzero(~np.isfinite(dense))[0])
        found, expected = dense[column - 1], "a finite number"
    name = COLUMNS[column]
    message = (
        f"{content.path}: row {number}, {name}: found {found}, expected {expected}; correct the row, or pass "
        "on_bad_row='skip' to leave it out"
    )
    return BadRow(message, path=content.path, offset=number, column=name)
