"""Every recipe there is trains twenty steps, with the same changes to all so that any machine can."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from dlrm_examples import recipes
from intune_callbacks import cli
from intune_callbacks.errors import ConfigError

pytest.importorskip("yaml")

from dlrm_examples.recipes import runner
from dlrm_examples.recipes.config import Config, Model, Resolved, Trainer, load
from dlrm_examples.recipes.memory_check import check_memory, tables_bytes

FILES = Path(recipes.__file__).parent.rglob("*.yaml")
NAMES = sorted(file.relative_to(recipes.CONFIGS).with_suffix("").as_posix() for file in FILES)
SMALL = (
    "rows=2000",
    "batch_size=32",
    "trainer.max_steps=20",
    "model.max_table_rows=1000",
    "model.dcn_low_rank=32",
    "intune.warmup_batches=2",
    "intune.decide_every_batches=2",
)
PACKAGES = {"lightning": ("torch", "torchdata", "pytorch_lightning"), "keras": ("tensorflow", "keras")}


def resolved(name: str, *overrides: str) -> Resolved:
    return load(recipes.source(name), overrides)


def need(config: Config) -> None:
    wanted = (*PACKAGES[config.framework], *(("torch", "torchrec") if config.trainer.strategy == "hybrid" else ()))
    wanted += ("sklearn",) if config.gbdt else ()
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_every_recipe_is_here() -> None:
    assert tuple(NAMES) == recipes.names()
    assert len(NAMES) == 10


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command; return the report."""
    trained: list[runner.Outcome] = []
    original = runner.run

    def noted(resolved: Resolved) -> runner.Outcome:
        trained.append(original(resolved))
        return trained[-1]

    def command(name: str, *overrides: str) -> dict:
        folder = tmp_path / "runs" / "small"
        assert cli.main(["run", name, *SMALL, *overrides, f"run_dir={folder}"]) == 0
        assert len(trained[-1].losses) == 20
        assert all(0 < loss < math.inf for loss in trained[-1].losses)
        report = json.loads((folder / "report.json").read_text())
        title, figures = capsys.readouterr().out.partition("\nAUC")[2].splitlines()[:2]
        quality = ["AUC", "accuracy", "log", "loss"] if "test" in report else ["AUC"]
        assert ["AUC", *title.split()] == [*quality, "samples/s", "data", "wait"]
        assert figures.split()[0] == f"{report['auc']:.4f}"
        return report

    monkeypatch.setenv("INTUNE_MODE", "observe")
    monkeypatch.setattr(runner, "run", noted)
    return command


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs(name: str, run) -> None:
    need(resolved(name).config)
    report = run(name)
    assert 0 < report["auc"] < 1
    if resolved(name).config.trainer.strategy == "hybrid":
        return
    test = report["test"]
    assert test["auc"] == report["auc"]
    assert test["rows"] == pytest.approx(200, abs=60)
    assert 0.4 < test["accuracy"] <= 1
    assert 0 < test["log_loss"] < 5


@pytest.mark.timeout(300)
def test_the_largest_runs_in_keras(run) -> None:
    need(Config(framework="keras"))
    mlps = ("model.bottom_mlp=[16]", "model.top_mlp=[16]", "model.embedding_dim=8")
    run("mlperf-dcnv2", "framework=keras", "trainer.warmup_steps=5", *mlps)


def test_names_of_tables() -> None:
    tables = Model(tables="criteo-1tb-40m", max_table_rows=2**31 - 1).table_rows
    assert sum(tables) == 204_184_588
    assert max(Model(tables="criteo-1tb-40m", max_table_rows=70).table_rows) == 70
    assert Model().table_rows[:2] == (14_600, 5_830)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("dlrm-kaggle", 2.0), ("dlrm-terabyte", 11.7), ("mlperf-dlrm", 89.5), ("mlperf-dcnv2", 194.7)],
)
def test_the_header_tells_the_memory(name: str, gib: float) -> None:
    config = resolved(name).config
    assert f"memory      {gib} GiB" in recipes.source(name).read_text()
    assert tables_bytes(config) / 2**30 == pytest.approx(gib, abs=0.05)
    with pytest.raises(ConfigError, match=rf"take {gib} GiB, and this machine has 1\.0 GiB") as caught:
        check_memory(config, 1 << 30)
    cap = str(caught.value).partition("give ")[2].partition(" ")[0]
    check_memory(resolved(name, cap).config, 1 << 30)
    check_memory(config, int(gib * 1.3 * 2**30))
    check_memory(Config(trainer=Trainer(strategy="hybrid"), model=config.model), 1 << 30)


def test_a_model_too_large_is_refused_before_it_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(Config())
    words = ["model.tables=criteo-1tb-full", "model.max_table_rows=2000000000", "model.embedding_dim=4096"]
    assert cli.main(["run", "dlrm-lightning", "rows=1000", *words, f"run_dir={tmp_path}"]) == 2
    assert "give model.max_table_rows=" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("hybrid")])
def test_the_schedule_reaches_the_optimizer(name: str) -> None:
    config = resolved(name, "trainer.warmup_steps=4", "trainer.decay_start_step=6", "trainer.decay_steps=2").config
    assert [round(config.trainer.schedule.rate(step, 1.0), 3) for step in range(8)] == [
        *(0.25, 0.5, 0.75, 0.75, 0.75),
        *(1.0, 0.25, 0.25),
    ]


def test_warm_up_and_decay_under_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(Config())
    import torch

    rates: list[float] = []
    step = torch.optim.SGD.step

    def noted(self, *arguments, **options):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.SGD, "step", noted)
    words = ("trainer.warmup_steps=4", "trainer.decay_start_step=6", "trainer.decay_steps=10")
    config = resolved("dlrm-lightning", *SMALL, *words, f"run_dir={tmp_path}/runs/small").config
    report = runner.train(config, "off", "test").report
    assert rates == pytest.approx([config.trainer.schedule.rate(k, 0.3) for k in range(20)])
    assert math.isfinite(report["test"]["log_loss"])
