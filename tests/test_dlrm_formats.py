"""Whatever the format, the same rows: every line once, in any reading order, with its byte offset."""

from __future__ import annotations

import gzip
import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_examples.convert import SUFFIXES, convert, sources
from dlrm_examples.criteo import compressed
from dlrm_examples.criteo.blocks import Split, row_offsets
from dlrm_examples.criteo.compressed import FrameRef, PieceRef, scan_compressed
from dlrm_examples.criteo.formats import (
    Reader,
    count_rows,
    epoch_order,
    parse,
    parse_selected,
    scan,
)
from dlrm_examples.criteo.tsv import Block, Rows
from intune_callbacks.cli import main
from intune_callbacks.errors import ConfigError
from tests.dlrm_rows import rows_text

MODULI = (1_000_003,) * 26
ROWS = 700
ALL = Split("train", 0.0)


def need(target: str) -> None:
    package = {"zstd": "zstandard", "parquet": "pyarrow", "packed": "xxhash"}.get(target)
    if package is not None:
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    path.write_bytes(rows_text(ROWS))
    return path


def joined(parts: list[Rows]) -> list[np.ndarray]:
    return [np.concatenate([getattr(part, name) for part in parts]) for name in ("labels", "dense", "categories")]


def read_all(path: Path, split: Split = ALL, block_bytes: int = 5_000) -> list[np.ndarray]:
    reader = Reader()
    contents = [reader(ref) for ref in scan([path], block_bytes)]
    return joined([parse(content, MODULI, on_bad_row="error", split=split) for content in contents])


@pytest.mark.parametrize("target", SUFFIXES)
@pytest.mark.parametrize("block_bytes", [700, 5_000, 1 << 20])
def test_the_same_rows_to_the_last_bit(source: Path, tmp_path: Path, target: str, block_bytes: int) -> None:
    need(target)
    written = convert(source, tmp_path, target, group_rows=90)
    assert written.name == ("rows" if target == "parquet" else "rows.tsv") + SUFFIXES[target]
    for got, wanted in zip(read_all(written, block_bytes=block_bytes), read_all(source), strict=True):
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("target", SUFFIXES)
def test_splits_and_counts(source: Path, tmp_path: Path, target: str) -> None:
    need(target)
    written = convert(source, tmp_path, target, group_rows=90)
    splits = [Split(name, 0.2, 4) for name in ("train", "test")]
    sides = [read_all(written, split)[2][:, 0].tolist() for split in splits]
    assert sorted(sides[0] + sides[1]) == list(range(ROWS))
    assert [count_rows(scan([written], 3_000), split, Reader()) for split in splits] == [len(side) for side in sides]
    if target != "parquet":
        assert sides == [read_all(source, split)[2][:, 0].tolist() for split in splits]


@pytest.mark.parametrize("target", SUFFIXES)
def test_contents_can_be_sent_as_bytes(source: Path, tmp_path: Path, target: str) -> None:
    need(target)
    reader = Reader()
    for ref in scan([convert(source, tmp_path, target, group_rows=90)], 5_000):
        content = reader(ref)
        sent = reader.from_bytes(ref, *reader.to_bytes(content))
        one, other = (parse(each, MODULI, on_bad_row="error", split=ALL) for each in (content, sent))
        assert all(np.array_equal(a, b) for a, b in zip(joined([one]), joined([other]), strict=True))


@pytest.mark.parametrize("target", SUFFIXES)
def test_chosen_rows_are_those_of_the_whole(source: Path, tmp_path: Path, target: str) -> None:
    """None, one, few, most and all rows; their categories are nearly all different."""
    need(target)
    reader, random = Reader(), np.random.default_rng(0)
    for ref in scan([convert(source, tmp_path, target, group_rows=300)], 50_000):
        content = reader(ref)
        offsets, everything = row_offsets(content), parse(content, MODULI, on_bad_row="error", split=ALL)
        assert len(offsets) == len(everything)
        for wanted in (0, 1, len(offsets) // 9, len(offsets) - len(offsets) // 9, len(offsets)):
            chosen = np.sort(random.permutation(len(offsets))[:wanted])
            rows = parse_selected(content, MODULI, select=lambda found, own=offsets[chosen]: np.isin(found, own))
            for got, right in zip(joined([rows]), joined([everything.take(chosen)]), strict=True):
                assert got.dtype == right.dtype
                assert np.array_equal(got, right)


def whole(refs: list[Any], order: list[int]) -> bytes:
    """Read the references in the order given and return the text in the file's order, offsets checked."""
    reader, blocks = Reader(), {}
    for index in order:
        blocks[index] = reader(refs[index])
    text = b""
    for _, block in sorted(blocks.items()):
        assert isinstance(block, Block)
        assert not block.data or block.offset == len(text)
        text += block.data
    return text


lines = st.lists(st.integers(0, 40), max_size=60).map(lambda sizes: b"".join(b"%d\n" % 10**size for size in sizes))


@settings(max_examples=60)
@given(lines, st.integers(1, 90), st.lists(st.integers(0, 900), max_size=3), st.randoms(use_true_random=False))
def test_gzip_pieces_are_the_file(tmp_path_factory, text: bytes, block_bytes: int, cuts: list[int], random) -> None:
    path = tmp_path_factory.mktemp("gzip") / "f.tsv.gz"
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    # Several members and zeros behind them are what gzip allows.
    members = [gzip.compress(text[a:b], 1, mtime=0) for a, b in itertools.pairwise(bounds)]
    path.write_bytes(b"".join(members) + bytes(len(cuts)))
    refs = scan_compressed(str(path), block_bytes)
    for order in (list(range(len(refs))), random.sample(range(len(refs)), len(refs))):
        assert whole(refs, order) == text


@settings(max_examples=60)
@given(lines, st.lists(st.integers(0, 900), max_size=6), st.integers(1, 200), st.booleans(), st.randoms())
def test_zstd_frames_are_the_file(
    tmp_path_factory, text: bytes, cuts: list[int], block_bytes: int, checksum: bool, random
) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path_factory.mktemp("zstd") / "f.tsv.zst"
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    compressor = zstandard.ZstdCompressor(write_checksum=checksum)
    frames = [compressor.compress(text[a:b]) for a, b in itertools.pairwise(bounds)]
    skippable = (0x184D2A53).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    path.write_bytes(skippable.join(frames))
    refs = scan_compressed(str(path), block_bytes)
    assert all(isinstance(ref, FrameRef if len(frames) > 1 else PieceRef) for ref in refs)
    assert whole(refs, random.sample(range(len(refs)), len(refs))) == text


@pytest.mark.parametrize("known_size", [True, False])
def test_one_zstd_frame_is_read_in_pieces(source: Path, tmp_path: Path, known_size: bool) -> None:
    zstandard = pytest.importorskip("zstandard")
    path, text = tmp_path / "f.tsv.zst", source.read_bytes()
    stream = zstandard.ZstdCompressor().compressobj(size=len(text) if known_size else -1)
    path.write_bytes(stream.compress(text) + stream.flush() + (b"" if known_size else zstandard.compress(b"")))
    refs = scan_compressed(str(path), 9_000)
    assert len(refs) > 3
    assert {type(ref) for ref in refs} == {PieceRef}
    assert whole(refs, list(range(len(refs)))) == text


@pytest.mark.parametrize("target", ["gzip", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_files_are_named(source: Path, tmp_path: Path, target: str, damage: str) -> None:
    need(target)
    written = convert(source, tmp_path, target)
    data = written.read_bytes()
    written.write_bytes(data[:-9] if damage == "cut" else data[:50] + bytes(50) + data[100:])
    reader = Reader()
    refs = scan([written], 4_000)
    for _ in range(2):  # asking again does not help
        with pytest.raises(OSError, match=rf"rows\.tsv.*: not a whole {target} file"):
            [reader(ref) for ref in refs]


def test_a_stream_is_decompressed_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when several workers ask for its pieces a little out of order."""
    started: list[int] = []
    real = zlib.decompressobj
    monkeypatch.setattr(compressed.zlib, "decompressobj", lambda bits: started.append(bits) or real(bits))
    refs = scan_compressed(str(convert(source, tmp_path, "gzip")), 2_000)
    count = len(refs) // 4 * 4
    order = [start + step for start in range(0, count, 4) for step in (0, 2, 1, 3)]
    whole(refs, [*order, *range(count, len(refs))])
    assert len(started) == 1


def test_streams_are_shuffled_among_each_other_but_not_in_themselves(source: Path, tmp_path: Path) -> None:
    files = [convert(source, tmp_path / name, "gzip") for name in "ab"]
    refs = scan([*files, source], 2_000)
    orders = [epoch_order(refs, shuffle=True, seed=3, epoch=epoch).tolist() for epoch in (0, 1)]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order) == list(range(len(refs)))
        for path in map(str, files):
            pieces = [index for index in order if refs[index].path == path]
            assert pieces == sorted(pieces)
        plain = [index for index in order if refs[index].path == str(source)]
        assert plain != sorted(plain)
        assert len({refs[index].path for index in order[:10]}) == 3


def test_convert_from_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(tmp_path), "--format", "gzip"]) == 0
    written = tmp_path / "rows.tsv.gz"
    assert capsys.readouterr().out.strip() == str(written)
    assert gzip.decompress(written.read_bytes()) == source.read_bytes()
    assert main(["convert", "nowhere.tsv", str(tmp_path)]) == 2
    assert "nowhere.tsv: no such file or directory" in capsys.readouterr().err
    assert main(["convert", str(written), str(tmp_path), "--format", "parcet", "--dense", "float8"]) == 2
    told = capsys.readouterr().err
    assert "did you mean 'parquet'" in told and "expected one of float32, float16" in told and "from plain TSV" in told


def test_one_file_in_two_formats_is_refused(source: Path, tmp_path: Path) -> None:
    need("packed")
    written = convert(source, tmp_path, "packed")
    assert sources(tmp_path) == [written]
    (tmp_path / source.name).write_bytes(source.read_bytes())
    with pytest.raises(ConfigError, match=r"holds rows\.tsv and rows\.tsv\.packed: the same rows twice"):
        sources(tmp_path)


@pytest.mark.parametrize("target", [target for target in SUFFIXES if target != "packed"])
def test_parsed_rows_can_be_made_of_every_format(source: Path, tmp_path: Path, target: str) -> None:
    need(target)
    need("packed")
    written = convert(convert(source, tmp_path, target, group_rows=90), tmp_path / "packed", "packed", group_rows=64)
    assert written.name == f"rows{'' if target == 'parquet' else '.tsv'}{SUFFIXES[target]}.packed"
    for got, wanted in zip(read_all(written), read_all(source), strict=True):
        assert np.array_equal(got, wanted)
