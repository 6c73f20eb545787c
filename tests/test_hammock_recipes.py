"""The recipes of Hammock reach what gradient boosted trees reach on the same rows, and print both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("yaml")

from dlrm_examples import recipes
from dlrm_examples.recipes import runner
from dlrm_examples.recipes.config import load
from tests.dlrm_rows import real_file

NEEDED = {"lightning": ("torch", "torchdata", "pytorch_lightning"), "keras": ("keras", "tensorflow")}
TABLE = re.compile(r"^AUC .*\n(0\.\d+) .*\n(0\.\d+) .* gradient boosted trees$", re.MULTILINE)


def trained(framework: str, data: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    for package in NEEDED[framework]:
        pytest.importorskip(package)
    runner.run(load(recipes.source(f"hammock-{framework}"), [data, f"run_dir={folder / 'run'}"]))
    found = TABLE.search(capsys.readouterr().out)
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("framework", sorted(NEEDED))
def test_on_real_rows(framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = real_file("criteo_kaggle_100k.tsv")
    network, trees = trained(framework, f"data={rows}", tmp_path, capsys)
    assert trees > 0.745
    assert network > trees - 0.01


@pytest.mark.parametrize("framework", sorted(NEEDED))
def test_on_generated_rows(framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, trees = trained(framework, "rows=40000", tmp_path, capsys)
    assert min(network, trees) > 0.6


def test_tables_of_a_hammock_are_not_divided() -> None:
    with pytest.raises(recipes.ConfigError, match=r"trainer\.strategy=hybrid divides the tables of a DLRM"):
        load(recipes.source("hammock-lightning"), ["trainer.strategy=hybrid"])
