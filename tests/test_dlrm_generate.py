"""Generated data is reproducible, complete or absent, and looks like Criteo's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dlrm_examples import generate as module
from dlrm_examples.criteo.parse import parse_block
from dlrm_examples.criteo.tsv import KAGGLE_TABLE_ROWS, Block, parse_block_slowly
from dlrm_examples.generate import generate, main

ROWS = 20_000


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> bytes:
    (file,) = generate(tmp_path_factory.mktemp("data") / "one", rows=ROWS, seed=5)
    return file.read_bytes()


def test_shards_are_cuts_of_one_stream(tmp_path: Path, data: bytes) -> None:
    files = generate(tmp_path / "seven", rows=ROWS, shards=7, seed=5)
    assert b"".join(file.read_bytes() for file in files) == data
    assert [file.read_bytes().count(b"\n") for file in files] == [(k + 1) * ROWS // 7 - k * ROWS // 7 for k in range(7)]
    (other,) = generate(tmp_path / "other", rows=ROWS, seed=6)
    assert other.read_bytes() != data


def test_more_rows_continue_the_stream(tmp_path: Path, data: bytes) -> None:
    (file,) = generate(tmp_path / "few", rows=5_000, seed=5)
    # Whole draws agree; the last one is drawn at another size.
    assert file.read_bytes().splitlines()[: module.ROWS_PER_DRAW] == data.splitlines()[: module.ROWS_PER_DRAW]


def test_rows_are_valid(data: bytes) -> None:
    block = Block("g", 0, data[: data.index(b"\n", 500_000) + 1])
    fast, slow = parse_block(block, KAGGLE_TABLE_ROWS), parse_block_slowly(block, KAGGLE_TABLE_ROWS)
    assert np.array_equal(fast.categories, slow.categories)
    np.testing.assert_allclose(fast.dense, slow.dense, rtol=1e-6)
    assert data.endswith(b"\n")
    assert len(parse_block(Block("g", 0, data), KAGGLE_TABLE_ROWS)) == ROWS


def test_rates(data: bytes) -> None:
    columns = list(zip(*(line.split(b"\t") for line in data.splitlines()), strict=True))
    missing = [100 * sum(field == b"" for field in column) / ROWS for column in columns]
    np.testing.assert_allclose(missing[1:14], module.DENSE_MISSING, atol=1.5)
    np.testing.assert_allclose(missing[14:], module.CATEGORY_MISSING, atol=1.5)
    assert 0.23 < sum(label == b"1" for label in columns[0]) / ROWS < 0.27
    assert min(int(field) for field in columns[2]) == -2
    distinct = [len(set(column) - {b""}) for column in columns[14:]]
    assert all(n <= rows for n, rows in zip(distinct, KAGGLE_TABLE_ROWS, strict=True))
    assert [n for n, rows in zip(distinct, KAGGLE_TABLE_ROWS, strict=True) if rows < 20] == [3, 10, 4, 18, 15]


def test_popularity_falls_as_one_over_rank(data: bytes) -> None:
    column = [line.split(b"\t")[14 + 6] for line in data.splitlines()]
    counts = np.sort(np.unique(column, return_counts=True)[1])[::-1]
    slope = np.polyfit(np.log(np.arange(3, 200)), np.log(counts[3:200]), 1)[0]
    assert slope == pytest.approx(-1.0, abs=0.1)


def test_a_finished_directory_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    first = generate(folder, rows=100, shards=2)
    stamps = [file.stat().st_mtime_ns for file in first]
    assert generate(folder, rows=100, shards=2) == first
    assert [file.stat().st_mtime_ns for file in first] == stamps
    assert generate(folder, rows=101, shards=3) != first
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", *(f"shard-0000{k}.tsv" for k in range(3))]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("damage", ["shard", "manifest", "version", "list", "missing"])
def test_a_damaged_directory_is_made_again(tmp_path: Path, damage: str) -> None:
    files = generate(tmp_path / "d", rows=50, shards=2)
    before = [file.read_bytes() for file in files]
    manifest = tmp_path / "d" / "manifest.json"
    if damage == "shard":
        files[1].write_bytes(before[1][:-5])
    elif damage == "missing":
        files[0].unlink()
    else:
        content = {
            "manifest": "{",
            "list": "[]",
            "version": json.dumps({**json.loads(manifest.read_text()), "version": -1}),
        }
        manifest.write_text(content[damage])
    assert [file.read_bytes() for file in generate(tmp_path / "d", rows=50, shards=2)] == before


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(rows: int, seed: int):
        yield from list(whole(rows, seed))[:1]
        raise KeyboardInterrupt

    whole = module.lines
    monkeypatch.setattr(module, "lines", torn)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "d", rows=10_000)
    assert list(tmp_path.iterdir()) == []


def test_another_process_finished_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = generate(tmp_path / "reference", rows=50)
    real = module._write_shards

    def slower(folder: Path, wanted: dict[str, int]) -> None:
        real(folder, wanted)
        if not (tmp_path / "d").exists():
            (tmp_path / "d").mkdir()
            real(tmp_path / "d", wanted)
            monkeypatch.setattr(module.shutil, "rmtree", lambda *a, **k: None)

    monkeypatch.setattr(module, "_write_shards", slower)
    assert [file.read_bytes() for file in generate(tmp_path / "d", rows=50)] == [expected.read_bytes()]


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ValueError, match="holds something else") as caught:
        generate(tmp_path, rows=0, shards=-1, seed=0)
    assert all(name in str(caught.value) for name in ("rows=0", "shards=-1"))
    with pytest.raises(ValueError, match="at least one row per shard"):
        generate(tmp_path / "d", rows=3, shards=4)
    generate(tmp_path / "d", rows=3)
    (tmp_path / "d" / "precious").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        generate(tmp_path / "d", rows=4)
    for folder in (tmp_path, tmp_path / "d"):
        assert (folder / "precious").read_text() == "mine"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "d"), "--rows", "30", "--shards", "2", "--seed", "1"]) == 0
    assert "30 rows, 2 shards" in capsys.readouterr().out
    assert main([str(tmp_path / "d"), "--rows", "0"]) == 2
    assert "rows=0" in capsys.readouterr().err
