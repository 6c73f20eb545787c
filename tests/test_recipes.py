"""A recipe run and the demo's comparison, small: what is trained, what is measured, what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_examples import recipes
from intune_callbacks import cli
from intune_callbacks.errors import ConfigError

pytest.importorskip("yaml")

from dlrm_examples.recipes import data, demo, runner
from dlrm_examples.recipes.config import Config, Resolved, load
from tests.dlrm_rows import ROOT

PACKAGES = {"lightning": ("pytorch_lightning", "torchdata"), "keras": ("keras", "tensorflow")}
STARVED = {"lightning": ("read_latency_ms=20",), "keras": ("read_latency_ms=30", "intune.cpus=8")}
SPEEDUP = 1.2
"""On a machine with other work; how much faster a run becomes is a matter of the tier ``timing``."""

SMALL = (
    "rows=16000",
    "batch_size=32",
    "pipeline.block_bytes=8192",
    "model.max_table_rows=1000",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "intune.decide_every_s=0.05",
    "intune.warmup_batches=5",
    "intune.decide_every_batches=5",
)
REPORT = {"verdict", "before", "after", "decisions", "mode", "mode_source", "stages", "versions", "auc", "changes"}


def small(framework: str, folder: Path, *overrides: str) -> Resolved:
    return load(recipes.source(f"dlrm-{framework}"), [*SMALL, f"run_dir={folder / 'runs' / 'small'}", *overrides])


@pytest.fixture(scope="module", params=PACKAGES)
def framework(request: pytest.FixtureRequest) -> str:
    for package in PACKAGES[request.param]:
        pytest.importorskip(package)
    return request.param


@pytest.fixture(scope="module")
def starved(
    framework: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[runner.Outcome, runner.Outcome, dict[str, Any]]:
    config = small(framework, tmp_path_factory.mktemp("demo"), *STARVED[framework]).config
    untuned, tuned = (runner.train(config, mode, "test") for mode in ("off", "tune"))
    return untuned, tuned, demo.compare(untuned, tuned)


def test_tuned_and_untuned_runs_see_the_same_samples(starved: Any) -> None:
    untuned, tuned, report = starved
    assert len(untuned.losses) > 400
    assert untuned.losses == tuned.losses
    assert len(set(untuned.losses)) > 300, "they are losses of steps"
    assert report["loss_identical"] is True
    assert report["auc"] == report["auc_untuned"] > 0.6


def test_the_starved_run_is_fed(starved: Any) -> None:
    _, tuned, report = starved
    assert report["before"]["verdict"] == "input-bound"
    assert tuned.report["changes"] >= 1
    assert report["after"]["allocation"]["read"] > report["before"]["allocation"]["read"] == 1
    assert report["speedup"] > SPEEDUP
    assert report["after"]["wait_frac"] < report["before"]["wait_frac"]


def test_before_and_after_come_from_the_same_probe(starved: Any) -> None:
    untuned, tuned, report = starved
    for key, outcome in (("before", untuned), ("after", tuned)):
        for figure in ("throughput_samples_per_s", "wait_frac"):
            assert report[key][figure] == getattr(outcome.steady, figure)
        assert report["tuner"][key] == tuned.report[key]


def test_where_the_tuner_saw_too_little_the_untuned_run_says_why(starved: Any) -> None:
    untuned, tuned, _ = starved
    short = replace(tuned, report=tuned.report | {"before": tuned.report["before"] | {"verdict": "too short"}})
    assert demo.compare(untuned, short)["why"].startswith("untuned, the trainer waited ")


def test_the_report_holds_what_it_must(framework: str, starved: Any) -> None:
    for report in (starved[0].report, starved[1].report, starved[2]):
        assert report.keys() >= REPORT
        assert json.loads(json.dumps(report)) == report
        for side in ("before", "after"):
            assert report[side].keys() >= {"throughput_samples_per_s", "wait_frac", "allocation"}
    assert starved[0].report["mode"] == "off"
    assert starved[0].report["decisions"] == []
    names = [stage["name"] for stage in starved[1].report["stages"] if stage["window_of"] is None]
    collate = ["collate"] if framework == "lightning" else []
    assert names == ["read", "parse", "shuffle", *collate, "prefetch"], "the probe's own clock is no stage"


def test_off_never_builds_the_callback(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("mode off must leave no trace")

    monkeypatch.setattr(f"dlrm_examples.recipes.{framework}_runner.InTuneCallback", forbidden)
    config = small(framework, tmp_path, "trainer.max_steps=8").config
    assert len(runner.train(config, "off", "test").losses) == 8
    assert not (config.run_dir / "history.jsonl").exists()


def test_run_writes_report_and_history_and_prints_the_card(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latency_ms = {"lightning": 10, "keras": 20}[framework]
    resolved = small(framework, tmp_path, "intune.mode=observe", f"read_latency_ms={latency_ms}")
    folder = resolved.config.run_dir
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("from an earlier run\n")
    outcome = runner.run(resolved)
    printed = capsys.readouterr().out
    assert "InTune  " in printed
    assert "log loss" in printed
    report = json.loads((folder / "report.json").read_text())
    assert (report["mode"], report["mode_source"]) == ("observe", "command line")
    assert report["changes"] == 0
    assert report["settings"]["mode"] == {"value": "observe", "source": "command line"}
    assert report["settings"]["policy"] == {"value": "dqn", "source": "default"}
    assert report["settings"]["decide_every_s"] == {"value": 0.05, "source": "command line"}
    assert f"report.json, history.jsonl in {folder}" in " ".join(printed.split())
    assert "mode    observe, from the command line" in printed
    assert outcome.steady.wait_frac == pytest.approx(report["after"]["wait_frac"], abs=0.15), "probe and tuner agree"
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert lines
    assert not any(line["applied"] for line in lines)


def test_the_environment_switches_a_run_off(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTUNE_MODE", "off")
    runner.run(small(framework, tmp_path, "intune.mode=tune", "trainer.max_steps=8"))
    report = json.loads((tmp_path / "runs/small/report.json").read_text())
    assert (report["mode"], report["mode_source"]) == ("off", "INTUNE_MODE")


@pytest.mark.parametrize("words", [(), ("dlrm-keras",), ("dlrm-keras", "pipeline.style=plain")], ids=" ".join)
def test_the_demo_is_the_command(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in PACKAGES["keras" if words else "lightning"]:
        pytest.importorskip(package)
    folder = tmp_path / "runs" / "small"
    limits = ("rows=4000", "read_latency_ms=2", "trainer.max_steps=60", f"run_dir={folder}")
    assert cli.main(["demo", *words, *SMALL, *limits]) == 0
    assert "60 steps are bit-identical" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text())["loss_identical"] is True


def test_generated_rows_are_kept_and_given_rows_are_found(tmp_path: Path) -> None:
    config = small("lightning", tmp_path).config
    first = data.files(config)
    assert first == data.files(config)
    assert first[0].is_relative_to(tmp_path / "runs" / "data")
    assert data.files(Config(data=first[0])) == [first[0]]
    assert data.files(Config(data=first[0].parent)) == first
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no file"):
        data.files(Config(data=tmp_path / "empty"))


def test_the_seed_decides_the_run(framework: str, tmp_path: Path) -> None:
    limits = ("rows=2000", "trainer.max_steps=5")
    one, same, other = (
        runner.train(small(framework, tmp_path, *limits, f"seed={seed}").config, "off", "test").losses
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_losses_of_several_epochs(framework: str, tmp_path: Path) -> None:
    once, twice = (small(framework, tmp_path, "rows=1500", f"trainer.max_epochs={epochs}").config for epochs in (1, 2))
    losses = [runner.train(config, "off", "test").losses for config in (once, twice)]
    assert len(losses[1]) == 2 * len(losses[0])
    assert losses[1][: len(losses[0])] == losses[0]


def test_too_few_rows_for_one_batch(framework: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not fill one batch"):
        runner.train(small(framework, tmp_path, "rows=1000", "batch_size=2000").config, "off", "test")


@pytest.mark.parametrize(
    ("override", "word"), [("framework=kears", "did you mean 'keras'"), ("pipeline.style=block", "'blocks'")]
)
def test_a_wrong_word_is_named(override: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load(recipes.source("dlrm-keras"), [override])


@pytest.mark.timeout(240)
def test_keras_does_not_need_torch(tmp_path: Path) -> None:
    for package in PACKAGES["keras"]:
        pytest.importorskip(package)
    code = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchdata", "pytorch_lightning", "lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from intune_callbacks import cli
sys.exit(cli.main(["run", "dlrm-keras", *sys.argv[1:]]))
"""
    words = [*SMALL, "rows=4000", "read_latency_ms=10", f"run_dir={tmp_path / 'runs' / 'small'}", "intune.mode=tune"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "log loss" in done.stdout
    assert json.loads((tmp_path / "runs/small/report.json").read_text())["frozen"] is None
