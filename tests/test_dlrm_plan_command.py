"""The `intune plan` command: what it prints and writes, what it refuses, and the documentation of it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dlrm_examples.models.tables import MLPERF_BAGS, TABLES
from dlrm_examples.plan.command import as_json, ask
from dlrm_examples.plan.costs import Job, Machine, Table
from dlrm_examples.plan.placement import make_plan
from intune_callbacks import cli
from intune_callbacks.errors import ConfigError
from tests.dlrm_rows import ROOT

GIB = 1 << 30
PAPER = "criteo-1tb-40m"


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "plan.json"
    assert (
        cli.main(["plan", "--tables", PAPER, "--gpus", "8", "--hbm", "40GiB", "--host", "1TiB", "--json", f"{file}"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "26.14 billion fp32 weights" in printed
    found = json.loads(file.read_text())
    job = Job(tuple(Table(f"C{index}", rows) for index, rows in enumerate(TABLES[PAPER], 1)))
    assert found == as_json(make_plan(job, Machine(8, 40 * GIB, 1024 * GIB)))
    assert len(found["gpus"]) == 8
    for table in found["tables"]:
        assert re.search(rf"^{table['name']} .*{table['placement']}", printed, re.MULTILINE)
        assert sum(shard["end_row"] - shard["first_row"] for shard in table["shards"]) == table["rows"]


def test_the_command_fails_readably(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", "--tables", PAPER, "--gpus", "1", "--hbm", "16GiB", "--host", "48GB", "--json", str(file)]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "49.8 GiB too much" in error
    assert "--gpus 7" in error
    found = json.loads(file.read_text())
    assert found["fits"] is False
    assert found["needed_bytes"] > found["usable_bytes"]
    assert "--gpus 7" in found["cures"]


def test_tables_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    for text in ("[30, 20, 10]", "30, 20\n10\n"):
        file.write_text(text)
        job, machine = ask(str(file), 2, "1.5GB", bags="1,2,3", max_rows=25)
        assert [(table.rows, table.bag) for table in job.tables] == [(25, 1), (20, 2), (10, 3)]
        assert machine == Machine(2, 1_500_000_000, 0)
    file.write_text('{"user": 7, "item": 8}')
    assert ask(str(file), 1, "64GiB")[0].tables == (Table("user", 7), Table("item", 8))
    assert [table.bag for table in ask(PAPER, 1, "64GiB", bags="mlperf")[0].tables] == list(MLPERF_BAGS)


@pytest.mark.parametrize("given", [b"\xff\xfe", b"[" * 100_000], ids=["bytes", "deep"])
def test_a_file_that_holds_no_tables_is_told(given: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tables").write_bytes(given)
    assert cli.main(["plan", "--tables", str(tmp_path / "tables"), "--gpus", "8", "--hbm", "40GiB"]) == 2
    assert f"--tables {tmp_path / 'tables'}: " in capsys.readouterr().err


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ask("criteo-1tb-40", 0, "40Gi", "much", dtype="fp8", optimizer="adam", batch=0, max_rows=0, reserve=2.0)
    said = [problem.split()[0].partition("=")[0] for problem in caught.value.problems]
    assert sorted(said) == sorted(
        ["--tables", "--gpus", "--hbm", "--host", "--dtype", "--optimizer", "--batch", "--max-rows", "--reserve"]
    )
    assert "did you mean 'criteo-1tb-40m'" in str(caught.value)
    with pytest.raises(ConfigError, match="--hbm 40: expected a size such as 40GiB"):
        ask(PAPER, 1, "40")  # 40 bytes it would be
    for text in ("", "[]", "3", "[1, 0]", "5 five", '{"a": 1.5}'):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ConfigError, match="--tables"):
            ask(str(tmp_path / "bad"), 1, "1GiB")
    with pytest.raises(ConfigError, match=r"expected mlperf .26 tables., or 26 whole numbers"):
        ask(PAPER, 1, "1GiB", bags="1,2,0")


def test_the_documented_example_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\$ (intune plan .*)\n((?:.*\n)*?)```", text, re.MULTILINE)
    assert len(examples) == 2
    for command, expected in examples:
        code = cli.main(shlex.split(command)[1:])
        printed = capsys.readouterr()
        assert (printed.out if code == 0 else printed.err) == expected
