"""Parsed blocks on a local disk: the same batches with and without them, whatever happens to the folder."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")
pytest.importorskip("xxhash")

from dlrm_examples.convert import convert  # noqa: E402
from dlrm_examples.criteo import cache, formats, packed, pipeline, shards  # noqa: E402
from dlrm_examples.criteo.reading import Reading  # noqa: E402
from dlrm_examples.criteo.tsv import BadRow  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402
from tests.dlrm_rows import rows_text  # noqa: E402

ROWS, FILES = 400, 2
PACKAGES = {"tsv": "numpy", "gzip": "gzip", "zstd": "zstandard", "parquet": "pyarrow", "packed": "xxhash"}


@pytest.fixture(params=sorted(PACKAGES))
def files(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    pytest.importorskip(PACKAGES[request.param])
    text = plain(tmp_path / "text")
    return (
        text if request.param == "tsv" else [convert(f, tmp_path / "data", request.param, group_rows=50) for f in text]
    )


def plain(folder: Path) -> list[Path]:
    folder.mkdir()
    for number in range(FILES):
        (folder / f"day_{number}.tsv").write_bytes(rows_text(ROWS // FILES, seed=number))
    return sorted(folder.iterdir())


def reading(files: Iterable[Path], folder: Path | None, **options: Any) -> Reading:
    given = {"block_bytes": 6_000, "test_fraction": 0.2, "seed": 3, "workers": {"read": 2, "parse": 2}}
    return Reading(files, options.pop("batch_size", 32), cache_dir=folder, **{**given, **options})


def epoch(batches: Iterable[Any]) -> list[np.ndarray]:
    return [np.concatenate([batch[key].numpy() for key in batch if key != "dense"], axis=None) for batch in batches]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) > 0 and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def read_from_files(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was read from the files themselves."""
    seen: list[Any] = []
    original = formats.Reader._read

    def noted(reader: formats.Reader, ref: Any) -> Any:
        seen.append(ref)
        return original(reader, ref)

    monkeypatch.setattr(formats.Reader, "_read", noted)
    return seen


def test_later_epochs_and_runs_read_the_same_from_the_folder(
    files: list[Path], tmp_path: Path, read_from_files: list[Any]
) -> None:
    stock = pipeline.build(reading(files, None))
    wanted = [epoch(stock) for _ in range(2)]
    is_packed = files[0].suffix == ".packed"
    for run in range(2):
        loader = pipeline.build(reading(files, tmp_path / "cache"))
        assert len(loader) == len(wanted[0])
        for index, expected in enumerate(wanted):
            read_from_files.clear()
            assert same(epoch(loader), expected)
            assert bool(read_from_files) == (is_packed or run == index == 0)
    stopped = pipeline.build(reading(files, tmp_path / "cache"))
    head = epoch(itertools.islice(stopped, 3))
    resumed = pipeline.build(reading(files, tmp_path / "cache"))
    resumed.load_state_dict(stopped.state_dict())
    assert same(head + epoch(resumed), wanted[0])


def test_tables_split_seed_and_batches_may_be_others(tmp_path: Path, read_from_files: list[Any]) -> None:
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    epoch(pipeline.build(reading(files, folder)))
    others: list[dict[str, Any]] = [
        {"table_rows": tuple(range(2, 28))},
        {"split": "test", "seed": 8},
        {"batch_size": 7, "test_fraction": 0.0},
    ]
    for options in others:
        read_from_files.clear()
        with_cache = epoch(pipeline.build(reading(files, folder, **options)))
        assert not read_from_files
        assert same(with_cache, epoch(pipeline.build(reading(files, None, **options))))
    ranks = [shards.build(reading(files, folder, workers={}), rank, 2) for rank in range(2)]
    alone = [shards.build(reading(files, None, workers={}), rank, 2) for rank in range(2)]
    read_from_files.clear()
    parts = [epoch(loader) for loader in ranks]
    assert not read_from_files
    assert all(same(one, epoch(other)) for one, other in zip(parts, alone, strict=True))


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    epoch(pipeline.build(reading(files, folder)))
    files[0].write_bytes(rows_text(ROWS // FILES, seed=9))
    os.utime(files[0], ns=(1, 1))
    assert same(*(epoch(pipeline.build(reading(files, place))) for place in (folder, None)))


@pytest.mark.parametrize("damage", ["byte", "short", "empty", "gone"])
def test_what_is_damaged_is_parsed_again(tmp_path: Path, damage: str, read_from_files: list[Any]) -> None:
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    wanted = epoch(pipeline.build(reading(files, folder)))
    blocks = sorted(folder.rglob("*.packed"))
    for block in blocks[::3]:
        data = bytearray(block.read_bytes())
        data[-9] ^= 1
        block.write_bytes({"byte": data, "short": data[:-8], "empty": b"", "gone": data}[damage])
        if damage == "gone":
            block.unlink()
    read_from_files.clear()
    assert same(epoch(pipeline.build(reading(files, folder))), wanted)
    assert len(read_from_files) == len(blocks[::3])
    read_from_files.clear()
    assert same(epoch(pipeline.build(reading(files, folder))), wanted)
    assert not read_from_files, "they were replaced"


def test_malformed_rows_are_what_they_are_without(tmp_path: Path) -> None:
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    lines = files[1].read_bytes().splitlines(keepends=True)
    for row in (3, 4, 90):
        lines[row] = b"x" + lines[row]
    files[1].write_bytes(b"".join(lines))
    for _ in range(2):
        loaders = [pipeline.build(reading(files, place, on_bad_row="skip")) for place in (folder, None)]
        assert same(*map(epoch, loaders))
        assert loaders[0].skipped_rows == loaders[1].skipped_rows > 0
        with pytest.raises(BadRow, match=r"day_1\.tsv: line at byte"):
            epoch(pipeline.build(reading(files, folder, test_fraction=0.0)))


def test_a_full_disk_ends_the_keeping_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, usage = plain(tmp_path / "text"), namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = epoch(pipeline.build(reading(files, tmp_path / "cache", workers={"read": 1})))
    assert same(got, epoch(pipeline.build(reading(files, None))))
    assert ["less than 1 GiB of its disk is free" in str(warning.message) for warning in told] == [True]
    assert not list((tmp_path / "cache").rglob("*.packed"))


def test_a_folder_that_cannot_be_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_dir=.*cannot be made.*give a folder that can"):
        pipeline.build(reading(plain(tmp_path / "text"), tmp_path / "file" / "cache"))


def test_under_tf_data(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    from dlrm_examples.criteo import pipeline_tf

    def epoch_tf(dataset: Any) -> list[np.ndarray]:
        return [
            np.concatenate((features["categories"], labels), axis=None)
            for features, labels in dataset.as_numpy_iterator()
        ]

    wanted = epoch_tf(pipeline_tf.build(reading(files, None)))
    for _ in range(2):
        assert same(epoch_tf(pipeline_tf.build(reading(files, tmp_path / "cache"))), wanted)
    # What was there when it was read, and is not when it is parsed.
    original = formats.Reader.to_bytes

    def deleting(reader: formats.Reader, content: Any) -> Any:
        found = original(reader, content)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        return found

    monkeypatch.setattr(formats.Reader, "to_bytes", deleting)
    assert same(epoch_tf(pipeline_tf.build(reading(files, tmp_path / "cache"))), wanted)


def test_not_every_block_has_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    asked = reading(files, folder, block_bytes=1_000)
    blocks = len(epoch(pipeline.build(asked))) and len(list(folder.rglob("*.packed")))
    assert blocks > 60
    monkeypatch.setattr(packed, "MOST_MAPPED", 20)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 40, before[1]))
    try:
        read = asked.reader()
        contents = [read.cached(ref) for ref in asked.refs()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert None not in contents
    assert sum(len(content.labels) for content in contents) == ROWS


def test_a_block_without_a_line(tmp_path: Path) -> None:
    """Of a file cut into pieces shorter than its lines most have none."""
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    for _ in range(2):
        assert same(*(epoch(pipeline.build(reading(files[:1], place, block_bytes=100))) for place in (folder, None)))
    assert any(cache.PackedFile(str(path)).rows == 0 for path in folder.rglob("*.packed"))


def test_a_recipe_learns_the_same_with_it(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("yaml")
    from dlrm_examples.recipes import runner, source
    from dlrm_examples.recipes.config import load

    given = [
        "rows=2000",
        "batch_size=32",
        "model.max_table_rows=1000",
        "intune.mode=observe",
        f"run_dir={tmp_path / 'r'}",
    ]
    losses = [
        runner.run(load(source("dlrm-lightning"), [*given, *keys])).losses
        for keys in ([], *2 * [[f"pipeline.cache_dir={tmp_path / 'cache'}"]])
    ]
    assert losses[0] == losses[1] == losses[2]
    assert list((tmp_path / "cache").rglob("*.packed"))


def test_a_folder_that_was_deleted_is_filled_again(tmp_path: Path, read_from_files: list[Any]) -> None:
    files, folder = plain(tmp_path / "text"), tmp_path / "cache"
    loader = pipeline.build(reading(files, folder))
    epoch(loader)
    shutil.rmtree(folder)
    epoch(loader)
    read_from_files.clear()
    epoch(loader)
    assert not read_from_files
