"""What cannot end well is said before it begins: files that cannot be read, too few rows, a read-only folder."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("yaml")

from dlrm_examples import recipes
from dlrm_examples.generate import generate
from dlrm_examples.recipes import ready, results, runner
from dlrm_examples.recipes.config import Config, load
from intune_callbacks import cli
from intune_callbacks.errors import BadData, ConfigError


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    (file,) = generate(tmp_path_factory.mktemp("rows"), rows=2000, shards=1, seed=3)
    return file.read_bytes().splitlines(keepends=True)


def config(folder: Path, *words: str) -> Config:
    given = [f"data={folder / 'data'}", f"run_dir={folder / 'run'}", "batch_size=64", "pipeline.block_bytes=16384"]
    (folder / "data").mkdir(exist_ok=True)
    return load(recipes.source("dlrm-lightning"), [*given, *words]).config


def problems(folder: Path, *words: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        runner.train(config(folder, *words), "off", "test")
    assert not (folder / "run").exists()
    return caught.value.problems


def test_good_files_are_ready(tmp_path: Path, lines: list[bytes]) -> None:
    asked = config(tmp_path)
    (tmp_path / "data" / "a.tsv").write_bytes(b"".join(lines))
    (tmp_path / "data" / "b.tsv.gz").write_bytes(gzip.compress(b"".join(lines)))
    ready.check_ready(asked)
    assert not asked.run_dir.exists()


@pytest.mark.parametrize(("rows", "words"), [(0, "hold 0"), (40, "do not fill one batch")])
def test_too_few_rows(rows: int, words: str, tmp_path: Path, lines: list[bytes]) -> None:
    config(tmp_path)
    (tmp_path / "data" / "a.tsv").write_bytes(b"".join(lines[:rows]))
    (said,) = problems(tmp_path)
    assert said.startswith("batch_size=64:") and words in said


def test_no_row_for_the_test(tmp_path: Path, lines: list[bytes]) -> None:
    config(tmp_path)
    (tmp_path / "data" / "a.tsv").write_bytes(b"".join(lines[:80]))
    (said,) = problems(tmp_path, "test_frac=0.001")
    assert said.startswith("test_frac=0.001: none of 80 rows")


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_wrong_columns_also_in_the_second_file(on_bad_row: str, tmp_path: Path, lines: list[bytes]) -> None:
    config(tmp_path)
    (tmp_path / "data" / "a.tsv").write_bytes(b"".join(lines))
    (tmp_path / "data" / "b.tsv").write_bytes(b"".join(line.rpartition(b"\t")[0] + b"\n" for line in lines))
    (said,) = problems(tmp_path, f"pipeline.on_bad_row={on_bad_row}")
    assert "b.tsv" in said and "found 39, expected 40" in said


def test_every_damaged_file_is_named(tmp_path: Path, lines: list[bytes]) -> None:
    config(tmp_path)
    packed = gzip.compress(b"".join(lines))
    (tmp_path / "data" / "a.tsv.gz").write_bytes(packed[:-2000])
    middle = len(packed) // 2
    (tmp_path / "data" / "b.tsv.gz").write_bytes(packed[:middle] + bytes(500) + packed[middle + 500 :])
    (tmp_path / "data" / "c.tsv").write_bytes(b"".join(lines))
    first, second = problems(tmp_path)
    assert "a.tsv.gz: not a whole gzip file: it ends too early" in first
    assert "b.tsv.gz: not a whole gzip file" in second


def test_of_a_large_file_the_beginning_is_read(
    tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "WHOLE_BYTES", 1000)
    asked = config(tmp_path)
    (tmp_path / "data" / "a.tsv.gz").write_bytes(gzip.compress(b"".join(lines))[:-2000])
    ready.check_ready(asked)


def test_damage_that_is_met_later_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def met(config: Config, mode: str, source: str) -> None:
        raise BadData("a.tsv.gz: not a whole gzip file")

    monkeypatch.setattr(runner, "train", met)
    assert cli.main(["run", "dlrm-lightning", f"run_dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == "intune: a.tsv.gz: not a whole gzip file\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (said,) = problems(tmp_path, f"run_dir={tmp_path / 'file' / 'runs' / 'mine'}")
    assert said.startswith("run_dir=") and f"{tmp_path / 'file'} is not a folder" in said
    monkeypatch.setattr(os, "access", lambda path, how: False)
    (said,) = problems(tmp_path, f"run_dir={tmp_path / 'run'}")
    assert f"may not write into {tmp_path}" in said


def test_no_auc_is_null() -> None:
    found = results.tested({"auc": float("nan"), "accuracy": 1.0, "loss": 0.1, "rows": 3.0})
    assert json.loads(json.dumps(found, allow_nan=False))["auc"] is None
