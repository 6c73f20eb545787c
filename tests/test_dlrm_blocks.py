"""Every line is in exactly one block and one split, wherever the cuts fall."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_examples.criteo.blocks import BlockRef, Split, read_block, scan_blocks
from dlrm_examples.criteo.formats import Reader, count_rows
from tests.dlrm_rows import rows_text


@given(st.lists(st.integers(0, 12), max_size=30), st.booleans(), st.integers(1, 80))
def test_blocks_are_the_file(tmp_path_factory, lengths: list[int], ends_with_newline: bool, block_bytes: int) -> None:
    data = b"\n".join(b"%d" % (10**length) for length in lengths) + (b"\n" if ends_with_newline else b"")
    path = tmp_path_factory.mktemp("blocks") / "f.tsv"
    path.write_bytes(data)
    refs = scan_blocks([path], block_bytes)
    blocks = [read_block(ref) for ref in refs]
    assert b"".join(block.data for block in blocks) == data
    for ref, block in zip(refs, blocks, strict=True):
        if block.data:
            assert data[block.offset : block.offset + len(block.data)] == block.data
            assert ref.offset <= block.offset < ref.offset + ref.length
            assert block.offset == 0 or data[block.offset - 1 : block.offset] == b"\n"
            # No line that begins in the range is missing, none that begins after it is in.
            assert data.rfind(b"\n", 0, ref.offset + ref.length - 1) < block.offset + len(block.data)
            assert block.data.rstrip(b"\n").rfind(b"\n") + 1 + block.offset < ref.offset + ref.length


def test_a_line_longer_than_several_reads(tmp_path: Path) -> None:
    path = tmp_path / "f.tsv"
    path.write_bytes(b"a" * 10_000 + b"\n" + b"b\n")
    blocks = [read_block(ref).data for ref in scan_blocks([path], 100)]
    assert [len(data) for data in blocks if data] == [10_001, 2]


def test_blocks_of_several_files_in_order(tmp_path: Path) -> None:
    for name, size in (("b", 5), ("a", 0), ("c", 3)):
        (tmp_path / name).write_bytes(b"\n" * size)
    refs = scan_blocks([tmp_path / name for name in "bac"], 2)
    assert [(Path(r.path).name, r.offset, r.length) for r in refs] == [
        ("b", 0, 2), ("b", 2, 2), ("b", 4, 1), ("c", 0, 2), ("c", 2, 1),
    ]  # fmt: skip


def test_split() -> None:
    offsets = np.arange(0, 2_000_000, 10)
    train, test = (Split(name, 0.1, 3).select("x/f.tsv", offsets) for name in ("train", "test"))
    assert np.array_equal(train, ~test)
    assert test.mean() == pytest.approx(0.1, abs=0.003)
    assert np.array_equal(test, Split("test", 0.1, 3).select("elsewhere/f.tsv", offsets))
    others = [Split("test", 0.1, 4).select("f.tsv", offsets), Split("test", 0.1, 3).select("g.tsv", offsets)]
    for other in others:
        assert (test & other).mean() == pytest.approx(0.01, abs=0.002)
    assert Split("train", 0.0).select("f", offsets).all()
    assert Split("test", 1.0).select("f", offsets).all()


@pytest.mark.parametrize("ends_with_newline", [True, False])
def test_count_rows(tmp_path: Path, ends_with_newline: bool) -> None:
    path = tmp_path / "f.tsv"
    data = rows_text(500)
    path.write_bytes(data if ends_with_newline else data[:-1])
    whole = [BlockRef(str(path), 0, len(data))]
    counts = [count_rows(whole, Split(name), Reader()) for name in ("train", "test")]
    assert sum(counts) == 500
    assert 25 <= counts[1] <= 80
    assert [count_rows(scan_blocks([path], 777), Split(name), Reader()) for name in ("train", "test")] == counts
    copy = tmp_path / "moved" / "f.tsv"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    assert count_rows(scan_blocks([copy], 10_000), Split("test"), Reader()) == counts[1]
