"""Malformed rows in a recipe's data: an error, or left out and counted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("yaml")

from dlrm_examples import recipes
from dlrm_examples.criteo.tsv import BadRow
from dlrm_examples.generate import generate
from dlrm_examples.recipes import runner
from dlrm_examples.recipes.config import load
from intune_callbacks.errors import ConfigError

BAD = 7
FRAMEWORKS = {"dlrm-lightning": ("pytorch_lightning", "torchdata"), "dlrm-keras": ("keras", "tensorflow")}


def damaged(folder: Path) -> Path:
    """Return a file of 3,000 rows and a few lines that are none."""
    (file,) = generate(folder / "data", rows=3000, shards=1, seed=3)
    lines = file.read_bytes().splitlines(keepends=True)
    for number in range(BAD):
        lines.insert(700 + 300 * number, b"no row\n")  # behind what is looked at before the training
    bad = folder / "damaged.tsv"
    bad.write_bytes(b"".join(lines))
    return bad


def options(folder: Path, *more: str) -> list[str]:
    words = (f"data={damaged(folder)}", f"run_dir={folder / 'run'}", "model.max_table_rows=100", "batch_size=64")
    return [*words, "pipeline.block_bytes=65536", "intune.mode=off", "test_frac=0.2", *more]


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_bad_rows_are_counted_or_an_error(name: str, tmp_path: Path) -> None:
    for package in FRAMEWORKS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    resolved = load(recipes.source(name), options(tmp_path, "pipeline.on_bad_row=skip"))
    skipped = runner.train(resolved.config, *resolved.mode).report["skipped_rows"]
    # Only those the training split would have had are counted.
    assert 1 <= skipped <= BAD
    twice = load(recipes.source(name), options(tmp_path, "pipeline.on_bad_row=skip", "trainer.max_epochs=2"))
    for mode in ("off", "tune"):
        assert runner.train(twice.config, mode, "test").report["skipped_rows"] == 2 * skipped, "in all epochs"
    whole = load(recipes.source(name), options(tmp_path))
    with pytest.raises(Exception, match=r"damaged\.tsv") as error:
        runner.train(whole.config, *whole.mode)
    assert name == "dlrm-keras" or isinstance(error.value, BadRow)


@pytest.mark.parametrize("word", ["trainer.strategy=hybrid", "pipeline.style=plain", "pipeline.on_bad_row=ignore"])
def test_what_cannot_skip_says_so(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_bad_row"):
        load(recipes.source("dlrm-lightning"), options(tmp_path, "pipeline.on_bad_row=skip", word))
