"""Parsed rows: the packed format, which is whole or refused, and the arrays that others preprocess Criteo into."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xxhash")

from dlrm_examples.convert import convert, sources
from dlrm_examples.criteo.blocks import Split
from dlrm_examples.criteo.formats import Reader, parse, scan
from dlrm_examples.criteo.tsv import BadRow, Block, Rows, parse_block_slowly
from intune_callbacks.errors import BadData, ConfigError, InTuneError
from tests.dlrm_rows import good_lines, rows_text

MODULI = (1_000_003,) * 26
COLUMNS = ("labels", "dense", "categories")
ROWS = 700


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    (folder / "rows.tsv").write_bytes(rows_text(ROWS))
    return convert(folder / "rows.tsv", folder, "packed", group_rows=300)


def rows_of(
    path: Path, moduli: Sequence[int] = MODULI, block_bytes: int = 5_000, on_bad_row: str = "error"
) -> list[np.ndarray]:
    reader, everything = Reader(), Split(test_fraction=0.0)
    parts = [parse(reader(ref), moduli, on_bad_row=on_bad_row, split=everything) for ref in scan([path], block_bytes)]
    return [np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS]


def equal(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


@given(
    st.lists(good_lines, min_size=1, max_size=7),
    st.integers(1, 9),
    st.one_of(
        st.integers(1, 2**31 - 1).map(lambda rows: [rows] * 26),
        st.lists(st.integers(1, 2**31 - 1), min_size=26, max_size=26),
    ),
)
def test_what_is_read_is_what_the_plain_parser_reads(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], block_rows: int, moduli: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "f.tsv").write_bytes(b"\n".join(lines))
    got = rows_of(convert(folder / "f.tsv", folder, "packed", group_rows=block_rows), moduli)
    slow = parse_block_slowly(Block("f", 0, b"\n".join(lines)), moduli)
    np.testing.assert_allclose(got[1], slow.dense, rtol=1e-6)
    assert equal((got[0], got[2]), (slow.labels, slow.categories))


def test_half_the_precision_is_asked_for(packed: Path, tmp_path: Path) -> None:
    small = convert(packed.with_suffix(""), tmp_path, "packed", dense="float16")
    got, whole = rows_of(small), rows_of(packed)
    assert equal((got[0], got[2]), (whole[0], whole[2]))
    assert got[1].dtype == np.float32 and not np.array_equal(got[1], whole[1])
    np.testing.assert_allclose(got[1], whole[1], rtol=1e-3)
    assert small.stat().st_size < 0.85 * packed.stat().st_size


@given(st.integers(0, 2**40), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(
    packed: Path, tmp_path_factory: pytest.TempPathFactory, place: int, flipped: int
) -> None:
    data = bytearray(packed.read_bytes())
    # The header as often as all the rest.
    place = place % 64 if place % 2 else 64 + place // 2 % (len(data) - 64)
    data[place] ^= flipped
    damaged = tmp_path_factory.mktemp("damaged") / "rows.packed"
    damaged.write_bytes(data)
    with contextlib.suppress(InTuneError):
        got = rows_of(damaged)
        assert place < 64, "in a block each byte counts"
        assert equal(got, rows_of(packed))


@given(st.integers(0, 2**40))
def test_a_file_cut_short_is_refused(packed: Path, tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    data = packed.read_bytes()
    short = tmp_path_factory.mktemp("short") / "rows.packed"
    short.write_bytes(data[: length % len(data)])
    with pytest.raises(ConfigError, match=r"cut short|is no packed Criteo file"):
        scan([short], 1)


def test_what_is_not_ours_is_named(packed: Path, tmp_path: Path) -> None:
    newer, foreign, swapped = (tmp_path / f"{name}.packed" for name in ("newer", "foreign", "swapped"))
    data = packed.read_bytes()
    newer.write_bytes(data[:8] + struct.pack("<I", 2) + data[12:])
    with pytest.raises(ConfigError, match="has version 2 of the packed format, expected 1; convert its source anew"):
        scan([newer], 1)
    foreign.write_bytes(rows_text(3))
    with pytest.raises(ConfigError, match="is no packed Criteo file; write one with: intune convert"):
        scan([foreign], 1)
    stride = 8 + 168 * 300
    swapped.write_bytes(
        data[:64] + data[64 + stride : 64 + 2 * stride] + data[64 : 64 + stride] + data[64 + 2 * stride :]
    )
    with pytest.raises(BadData, match="block 0 has the checksum"):
        rows_of(swapped)


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    (tmp_path / "f.tsv").write_bytes(rows_text(20_000) + b"no row\n")
    with pytest.raises(BadRow, match=r"f\.tsv: line at byte"):
        convert(tmp_path / "f.tsv", tmp_path / "out", "packed", group_rows=100)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ConfigError, match="its rows are parsed already"):
        convert(tmp_path / "f.packed", tmp_path, "packed")


def as_others_have_them(folder: Path, rows: int, **changed: Any) -> tuple[Rows, Path, Path]:
    """Write random rows as TorchRec does and as Meta's DLRM does; return what they are fed as, and the two files."""
    random = np.random.default_rng(0)
    labels, integers = (
        random.integers(0, 2, rows).astype(np.int32),
        random.integers(0, 900, (rows, 13)).astype(np.int32),
    )
    categories = random.integers(-(2**31), 2**31, (rows, 26)).astype(np.int32)
    for name, array in (
        ("dense", np.log(integers + 1, dtype=np.float32)),
        ("sparse", categories),
        ("labels", labels.reshape(-1, 1)),
    ):
        np.save(folder / f"day_0_{name}.npy", changed.get(name, array))
    np.concatenate((labels[:, None], integers, categories), axis=1).tofile(folder / "train_data.bin")
    wanted = Rows(
        labels.astype(np.float32),
        np.log(integers.astype(np.float32) + np.float32(1)),
        (categories.astype(np.int64) % np.array(MODULI)).astype(np.int32),
    )
    return wanted, folder / "day_0_dense.npy", folder / "train_data.bin"


@pytest.mark.parametrize("block_bytes", [1, 5_000, 1 << 20])
def test_what_others_preprocessed(tmp_path: Path, block_bytes: int) -> None:
    wanted, arrays, binary = as_others_have_them(tmp_path, ROWS)
    assert sources(tmp_path) == [arrays, binary], "what lies beside is no file of its own"
    for path in (arrays, binary):
        labels, dense, categories = rows_of(path, block_bytes=block_bytes)
        assert equal((labels, categories), (wanted.labels, wanted.categories))
        np.testing.assert_allclose(dense, wanted.dense, rtol=1e-6)
    moduli = tuple(range(5, 31))
    assert equal(rows_of(arrays, moduli)[2:], rows_of(binary, moduli)[2:])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dense": np.zeros((ROWS, 12), np.float32)}, r"dense\.npy has the shape \(700, 12\), expected \(rows, 13\)"),
        ({"labels": np.zeros(ROWS - 1, np.int8)}, r"have 699, 700, 700 rows: not the same"),
        ({"sparse": np.zeros((ROWS, 26))}, r"sparse\.npy holds float64, expected whole numbers"),
        ({"sparse": np.array([{}])}, r"sparse\.npy, which belongs to .*, cannot be read"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    _, arrays, _ = as_others_have_them(tmp_path, ROWS, **changed)
    with pytest.raises(ConfigError, match=told):
        scan([arrays], 1)


def test_files_that_are_no_arrays_are_named(tmp_path: Path) -> None:
    _, arrays, binary = as_others_have_them(tmp_path, ROWS)
    with open(binary, "ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"has 112001 bytes, expected 160 for each row"):
        scan([binary], 1)
    (tmp_path / "day_0_labels.npy").unlink()
    with pytest.raises(ConfigError, match=r"labels\.npy, which belongs to"):
        scan([arrays], 1)
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **{"0": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"X_dense\.npy with X_sparse\.npy"):
        scan([tmp_path / "day_0_sparse_multi_hot.npz"], 1)


def test_rows_that_would_spoil_the_model(tmp_path: Path) -> None:
    dense = np.zeros((ROWS, 13), np.float32)
    dense[37, 4] = np.nan
    _, arrays, binary = as_others_have_them(tmp_path, ROWS, dense=dense)
    with pytest.raises(BadRow, match="row 37, I5: found nan, expected a finite number") as caught:
        rows_of(arrays)
    assert (caught.value.offset, caught.value.column) == (37, "I5")
    assert len(rows_of(arrays, on_bad_row="skip")[0]) == ROWS - 1
    values = np.fromfile(binary, np.int32)
    values[40 * 500] = 2
    values.tofile(binary)
    with pytest.raises(BadRow, match="row 500, label: found 2, expected 0 or 1"):
        rows_of(binary)
