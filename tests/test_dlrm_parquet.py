"""Parquet files: which columns are read as the rows they are, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_dlrm_formats import ALL, MODULI, joined, read_all

from dlrm_examples.criteo.blocks import Split
from dlrm_examples.criteo.formats import (
    Reader,
    parse,
    scan,
)
from dlrm_examples.criteo.tsv import COLUMNS, BadRow, Block, parse_block_slowly
from intune_callbacks.errors import ConfigError


def parquet(path: Path, columns: dict[str, Any], group_rows: int = 4) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=group_rows)
    return path


def columns(rows: int = 10) -> dict[str, Any]:
    """Return valid columns of `rows` rows, as Python lists."""
    found: dict[str, Any] = {"label": [row % 2 for row in range(rows)]}
    for number, name in enumerate(COLUMNS[1:]):
        found[name] = [row * number for row in range(rows)] if number < 13 else [f"{row:08x}" for row in range(rows)]
    return found


@pytest.mark.parametrize("kind", ["named", "by position", "pandas", "numbers", "dictionary", "large text"])
def test_kinds_of_parquet_columns(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    given = columns()
    given["I3"][2], given["C7"][3], given["C9"][4] = None, None, ""
    text = b"".join(
        "\t".join("" if (value := given[name][row]) is None else str(value) for name in COLUMNS).encode() + b"\n"
        for row in range(10)
    )
    wanted = parse_block_slowly(Block("f", 0, text), MODULI)
    if kind == "by position":
        given = {f"column {number}": given[name] for number, name in enumerate(COLUMNS)}
    elif kind == "pandas":
        given["I3"] = [float("nan") if value is None else float(value) for value in given["I3"]]
        given["label"] = [bool(value) for value in given["label"]]
    elif kind == "numbers":
        given |= {name: [int(value or "0", 16) for value in given[name]] for name in COLUMNS[14:]}
    elif kind in ("dictionary", "large text"):
        to = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else pa.large_string()
        given |= {name: pa.array(given[name]).cast(to) for name in COLUMNS[14:]}
    if kind == "named":
        given = {"something else": [1] * 10, **dict(reversed(given.items()))}
    got = read_all(parquet(tmp_path / "f.parquet", given))
    for one, other in zip(got, joined([wanted]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("label", 2, "int64"), ("label", None, "int64"), ("I5", 0.5, "float64"), ("I5", 10**16, "int64"),
        ("C1", "1234567", "string"), ("C26", "0000000g", "string"), ("C3", -1, "int64"), ("C3", 2**32, "uint64"),
    ],
)  # fmt: skip
def test_bad_rows_of_parquet_are_named_and_counted(tmp_path: Path, column: str, value: Any, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    given = columns()
    if column.startswith("C") and kind != "string":
        given[column] = list(range(10))
    given[column][6] = value
    given[column] = pa.array(given[column], kind)
    path = parquet(tmp_path / "f.parquet", given)
    with pytest.raises(BadRow, match=rf"f\.parquet: row group 1, row 2 of it, {column}: found .*, expected") as caught:
        read_all(path)
    assert (caught.value.offset, caught.value.column) == (6, column)
    reader = Reader()
    parts = [parse(reader(ref), MODULI, on_bad_row="skip", split=ALL) for ref in scan([path], 1)]
    assert [part.skipped for part in parts] == [0, 1, 0]
    assert [len(part) for part in parts] == [4, 3, 2]


def test_bad_rows_of_the_other_split_are_nobodys_concern(tmp_path: Path) -> None:
    given = columns()
    given["C2"][6] = "bad"
    path = parquet(tmp_path / "f.parquet", given, group_rows=10)
    for seed in range(20):
        sides = [Split(name, 0.5, seed) for name in ("train", "test")]
        mine = int(sides[1].select(str(path), np.array([6]))[0])
        with pytest.raises(BadRow, match="row group 0, row 6 of it, C2: found 'bad'"):
            read_all(path, sides[mine])
        read_all(path, sides[1 - mine])


@pytest.mark.parametrize("problem", ["not parquet", "too few columns", "wrong type"])
def test_wrong_parquet_files_are_refused_before_reading(tmp_path: Path, problem: str) -> None:
    pytest.importorskip("pyarrow")
    path, given = tmp_path / "f.parquet", columns()
    if problem == "not parquet":
        path.write_bytes(b"label\tI1\n" * 9)
    elif problem == "too few columns":
        del given["C4"]
        parquet(path, given)
    else:
        parquet(path, {**given, "C4": [1.5] * 10, "I2": ["x"] * 10})
    with pytest.raises(ConfigError) as caught:
        scan([path], 1)
    words = {"not parquet": "no Parquet file", "too few columns": "C4", "wrong type": "column C4 (C4): holds double"}
    assert words[problem] in str(caught.value)
    assert len(caught.value.problems) == (2 if problem == "wrong type" else 1)
