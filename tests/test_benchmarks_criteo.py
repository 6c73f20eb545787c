"""The Criteo benchmark runs, checks what it measures, and says what it could not run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchdata.nodes")

from benchmarks import criteo
from benchmarks.criteo_systems import CACHED, SYSTEMS, System

FIELDS = {"system", "format", "threads", "cpu_us_per_row", "rows_per_s", "peak_rss_mb", "rows", "equal_to_plain_parser"}


def test_a_short_run(tmp_path: Path) -> None:
    options = ["--rows", "9000", "--repeats", "1", "--data", str(tmp_path / "data"), "--systems", "numpy"]
    result = criteo.main([*options, "--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == result["rows"]
    assert [(row["system"], row["threads"]) for row in result["rows"]] == [("InTune loader, numpy", n) for n in (1, 2)]
    for row in result["rows"]:
        assert set(row) >= FIELDS, row
        assert row["equal_to_plain_parser"]
        assert row["rows"] == 9000
        assert row["cpu_us_per_row"] > 0


def test_what_is_missing_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = System("nothing", "tsv", lambda files, batch_size, threads: iter(()), (1,), needs=("no_such_package",))
    monkeypatch.setattr(criteo, "SYSTEMS", (nothing,))
    (row,) = criteo.main(["--quick", "--data", str(tmp_path)])["rows"]
    assert row == {"system": "nothing", "format": "tsv", "threads": 1, "error": "pip install no_such_package"}


def test_a_system_that_fails_is_a_line(tmp_path: Path) -> None:
    number = next(i for i, system in enumerate(SYSTEMS) if system.name == "torch DataLoader, rows")
    found = criteo.measure(number, 0, tmp_path / "empty")
    assert "No such file" in found["error"]
    assert "error" in criteo.summary(SYSTEMS[number], 0, [found])


def test_systems_say_what_they_are() -> None:
    settings = [(system.name, system.format, threads) for system in SYSTEMS for threads in system.threads]
    assert len(settings) == len(set(settings))
    assert {system.format for system in SYSTEMS} == {"tsv", "gzip", "zstd", "parquet", "packed", CACHED}


@pytest.mark.parametrize(
    "name",
    [
        *("pyarrow csv", "pyarrow parquet", "polars csv", "polars parquet"),
        *("InTune loader", "InTune loader, shuffled", "InTune tf.data blocks"),
        "InTune loader, numba, empty cache_dir",
    ],
)
def test_systems_give_the_rows(tmp_path: Path, name: str) -> None:
    system = next(system for system in SYSTEMS if system.name == name)
    if criteo.missing(system):
        pytest.skip(f"not installed: {criteo.missing(system)}")
    criteo.prepare(tmp_path, 3_000, 0, ["tsv", system.format])
    found = [sorted(map(str, (tmp_path / "sample" / target).glob("shard-*"))) for target in (system.format, "tsv")]
    assert criteo.same_rows(list(system.run(found[0], 1_000, 1)), found[1])


def test_wrong_output_is_noticed(tmp_path: Path) -> None:
    criteo.prepare(tmp_path, 3_000, 0, ["tsv"])
    files = sorted(map(str, (tmp_path / "sample" / "tsv").glob("*.tsv")))
    system = next(system for system in SYSTEMS if system.name == "InTune loader, numpy")
    batches = list(system.run(files, 1_000, 1))
    assert criteo.same_rows(batches, files)
    assert criteo.same_rows(batches[::-1], files)
    labels, dense, categories = batches[0]
    for wrong in ((1 - labels, dense, categories), (labels, dense + 1, categories), (labels, dense, categories[::-1])):
        assert not criteo.same_rows([wrong, *batches[1:]], files)
    assert not criteo.same_rows(batches[1:], files)
    assert np.concatenate([batch[0] for batch in batches]).shape == (criteo.SAMPLE_ROWS,)
