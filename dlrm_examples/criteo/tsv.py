"""The TSV format of the Criteo click logs: rows, bad rows, and a plain parser that defines what a line means.

A line is ``label, I1..I13, C1..C26``, tab-separated: the label 0 or 1, the integers possibly negative, the
categories 8 hex digits, an empty field a missing value. The Kaggle data and the 1 TB logs both have these 40 columns,
but C1 of the one is not C1 of the other and their hashes differ; Criteo never said which column is which, so nothing
is mapped. What differs for a model are the sizes of the tables: `TABLE_ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.hashing import ALL_BITS
from intune_callbacks.errors import BadData

__all__ = [
    "ALL_BITS_OF_EACH",
    "CATEGORIES",
    "COLUMNS",
    "DENSE",
    "KAGGLE_TABLE_ROWS",
    "LONGEST_INTEGER",
    "TABLE_ROWS",
    "TERABYTE_TABLE_ROWS",
    "WIDTH",
    "BadRow",
    "Block",
    "Rows",
    "Select",
    "bad_row",
    "expected_in",
    "hashed_table_rows",
    "parse_block_slowly",
]

DENSE, CATEGORIES = 13, 26
COLUMNS = ("label", *(f"I{i}" for i in range(1, DENSE + 1)), *(f"C{i}" for i in range(1, CATEGORIES + 1)))
WIDTH = len(COLUMNS)

KAGGLE_TABLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct values of C1..C26 in the full Kaggle data (mlcommons/inference, dlrm/pytorch/python/main.py)."""

TERABYTE_TABLE_ROWS = (
    *(227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36),
)
"""Distinct values of C1..C26 in the 1 TB logs (NVIDIA/DeepLearningExamples, DLRM, generate_feature_spec.py, in Criteo's
column order). Cut at 40 million they are MLPerf's tables (facebookresearch/dlrm, torchrec_dlrm/README.MD)."""

TABLE_ROWS = {"kaggle": KAGGLE_TABLE_ROWS, "terabyte": TERABYTE_TABLE_ROWS}

ALL_BITS_OF_EACH = (ALL_BITS,) * CATEGORIES
"""As the rows of the tables: no modulus is taken of any category."""

LONGEST_INTEGER = 16
Select = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


class BadRow(BadData):
    """A line, or a row of a Parquet file, that is not a Criteo row.

    Args:
        message: what is wrong and what to do. It alone must do: torch re-raises a worker's error with a text only.
        path: the file.
        offset: byte offset of the line in the file, decompressed; of Parquet the number of the row in the file.
        column: name of the first wrong column, ``columns`` if their number is wrong.
    """

    def __init__(self, message: str, *, path: str = "", offset: int = -1, column: str = "") -> None:
        super().__init__(message)
        self.path, self.offset, self.column = path, offset, column


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file.

    Args:
        path: the file.
        offset: byte offset of the first line in it, after decompression.
        data: the lines; the last newline may be missing.
    """

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Parsed rows.

    Args:
        labels: [n] float32, 0 or 1.
        dense: [n, 13] float32, log(max(x, 0) + 1), missing 0.
        categories: [n, 26] int32, the hex number modulo the table's rows, missing 0.
        skipped: malformed rows that were left out.
    """

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    categories: npt.NDArray[np.int32]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts, of which there is at least one."""
        return Rows(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.categories for part in parts]),
            sum(part.skipped for part in parts),
        )

    def take(self, which: slice | npt.NDArray[Any]) -> Rows:
        """Return the chosen rows: a view for a slice, a copy for an index."""
        return Rows(self.labels[which], self.dense[which], self.categories[which], self.skipped)


def hashed_table_rows(limit: int, data: str = "kaggle") -> tuple[int, ...]:
    """Return rows for 26 hashed tables: ten times the cardinality, from 1000 to `limit`.

    A table as small as its cardinality would make most of a small column's values collide under the modulus.

    Args:
        limit: rows of the largest table.
        data: whose cardinalities, of `TABLE_ROWS`: ``kaggle`` or ``terabyte``.
    """
    return tuple(min(limit, max(1000, 10 * rows)) for rows in TABLE_ROWS[data])


def parse_block_slowly(
    block: Block,
    table_rows: Sequence[int],
    *,
    on_bad_row: str = "error",
    select: Select | None = None,
) -> Rows:
    """Do what `parse.parse_block` does, one field after the other: the definition it is tested against."""
    labels, dense, categories = [], [], []
    offset, skipped = block.offset, 0
    for line in block.data.removesuffix(b"\n").split(b"\n") if block.data else []:
        here, offset = offset, offset + len(line) + 1
        if select is not None and not select(np.array([here]))[0]:
            continue
        fields = line.split(b"\t")
        if _wrong_column(fields) is None:
            labels.append(float(fields[0]))
            integers = [int(f or b"0") for f in fields[1 : 1 + DENSE]]
            dense.append([math.log(max(x, 0) + 1) for x in integers])
            values = [int(f or b"0", 16) for f in fields[1 + DENSE :]]
            categories.append([value % modulus for value, modulus in zip(values, table_rows, strict=True)])
        elif on_bad_row == "error":
            raise bad_row(block.path, here, line)
        else:
            skipped += 1
    return Rows(
        np.array(labels, np.float32),
        np.array(dense, np.float32).reshape(-1, DENSE),
        np.array(categories, np.int64).astype(np.int32).reshape(-1, CATEGORIES),
        skipped,
    )


def _wrong_column(fields: Sequence[bytes]) -> int | None:
    """Return the first column whose field is wrong, -1 if there are not 40 columns, None if all is well."""
    return -1 if len(fields) != WIDTH else next((i for i, f in enumerate(fields) if not _is_valid(i, f)), None)


def _is_valid(column: int, field: bytes) -> bool:
    if column == 0:
        return field in (b"0", b"1")
    if field == b"":
        return True
    if column <= DENSE:
        digits = field.removeprefix(b"-")
        return 1 <= len(digits) <= LONGEST_INTEGER and set(digits) <= set(b"0123456789")
    return len(field) == 8 and set(field) <= set(b"0123456789abcdefABCDEF")


def bad_row(path: str, offset: int, line: bytes) -> BadRow:
    """Return the error for a malformed `line` (without its newline) at byte `offset` of the file `path`."""
    fields = line.split(b"\t")
    column = _wrong_column(fields)
    if column is None:
        raise AssertionError(f"{path}: the line at byte {offset} was refused, but nothing is wrong with it")
    name, why = "columns", f"found {len(fields)}, expected {WIDTH}"
    if column >= 0:
        name, why = COLUMNS[column], f"found {fields[column][:40]!r}, expected {expected_in(column)}"
    remedy = "correct the line, or pass on_bad_row='skip' to leave it out"
    return BadRow(f"{path}: line at byte {offset}, {name}: {why}; {remedy}", path=path, offset=offset, column=name)


def expected_in(column: int) -> str:
    """Return what a field of the column with this number may hold, in words."""
    if column > DENSE:
        return "8 hex digits or nothing"
    return f"an integer of up to {LONGEST_INTEGER} digits or nothing" if column else "0 or 1"
