"""Hybrid runs under Lightning and Keras: what one process learns, with validation, checkpoints, tuning and a report."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("pytorch_lightning")
if importlib.util.find_spec("torchrec") is None:  # imported by the ranks only
    pytest.skip("torchrec is not installed", allow_module_level=True)

from dlrm_examples import recipes  # noqa: E402
from dlrm_examples.convert import convert  # noqa: E402
from dlrm_examples.criteo import pipeline  # noqa: E402
from dlrm_examples.criteo.reading import Reading  # noqa: E402
from dlrm_examples.generate import generate  # noqa: E402
from dlrm_examples.models.dlrm_torch import DLRM, DLRMConfig  # noqa: E402
from dlrm_examples.models.lightning_module import DLRMModule  # noqa: E402
from dlrm_examples.models.metrics import evaluate  # noqa: E402
from dlrm_examples.recipes import runner  # noqa: E402
from dlrm_examples.recipes.config import Config, load  # noqa: E402
from dlrm_examples.recipes.data import files  # noqa: E402
from tests.hybrid_runs import ROUNDING, near_a_kink  # noqa: E402

ROOT = Path(__file__).parent.parent
# A sum in another order is another model as soon as a rounding error has flipped a ReLU: losses are compared while none
# comes near to it, which `hybrid_runs.near_a_kink` watches, and figures of whole runs with room for it.
COMPARED = 40
SMALL = (
    "rows=4000", "batch_size=64", "pipeline.block_bytes=8192", "model.max_table_rows=500", "model.embedding_dim=8",
    "model.bottom_mlp=[16]", "model.top_mlp=[16]", "trainer.learning_rate=0.01", "trainer.cpu_threads=1",
    "intune.decide_every_s=0.05", "intune.warmup_batches=5", "intune.decide_every_batches=5",
)  # fmt: skip

SCRIPT = """
import json, os, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from dlrm_examples.criteo import shards
from dlrm_examples.criteo.reading import Reading
from dlrm_examples.hybrid.lightning import HybridModule, HybridStrategy
from dlrm_examples.hybrid.weights import gathered
from dlrm_examples.models.metrics import evaluate  # noqa: E402
from dlrm_examples.models.dlrm_torch import DLRMConfig
from intune_callbacks.lightning import InTuneCallback

out, rank = Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", "0"))
torch.set_num_threads(1)
sizes = DLRMConfig(table_rows=(200,) * 26, embedding_dim=8, bottom=(16, 8), top=(16, 1))
files = sorted((out / "data").glob("*.tsv"))


class Seen(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def loader(split, late_ms=0):
    reading = Reading(files, 64, table_rows=200, split=split, block_bytes=8192, read_latency_ms=late_ms)
    return shards.build(reading, rank, 2)


def fit(callbacks, path=None, late_ms=0):
    seen = Seen()
    module = HybridModule(sizes, 32, optimizer="rowwise-adagrad", learning_rate=0.01, seed=3)
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy=HybridStrategy(), logger=False,
        callbacks=[seen, *callbacks],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=path is None,
    )
    trainer.fit(module, loader("train", late_ms), loader("test"), ckpt_path=path)
    return trainer, module, seen.losses


often = {"decide_every_s": 0.05, "warmup_batches": 5, "decide_every_batches": 5}
tuned = InTuneCallback("tune", run_dir=str(out / "run"), **often)
best = ModelCheckpoint(dirpath=out / "best", monitor="val_loss", save_top_k=1)
every = ModelCheckpoint(dirpath=out / "every", every_n_train_steps=20, save_top_k=-1)
trainer, module, losses = fit([tuned, best, every])
tables, rest = gathered(module.model)
validated = trainer.callback_metrics["val_loss"].item()
tested = trainer.test(module, loader("test"), verbose=False)[0]
again, _ = gathered(module.model)
watched = InTuneCallback("observe", show_card=False, **often)
_, resumed, later = fit([watched], sorted((out / "every").glob("epoch=0*"))[-1], late_ms=60 * rank)
result = {
    "losses": losses, "later": later, "val_loss": validated, "best": best.best_model_score.item(), "tested": tested,
    "kept": sorted(path.name for path in (out / "best").iterdir()), "ranks": tuned.report.get("ranks"),
    "late": watched.report.get("ranks"),
    "unchanged": all(torch.equal(a, b) for a, b in zip(tables, again)),
    "resumed": all(torch.equal(a, b) for a, b in zip(tables, gathered(resumed.model)[0])),
    "state": resumed.model.fused_optimizer.state_dict() != {},
}
(out / f"rank{rank}.json").write_text(json.dumps(result))
"""


def test_a_script_that_lightning_starts_again_for_every_rank(tmp_path: Path) -> None:
    generate(tmp_path / "data", rows=4000, shards=2, seed=1)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for result in (one, two):
        assert len(result["losses"]) == 110
        assert result["later"] == result["losses"][-len(result["later"]) :]
        assert len(result["later"]) == 70, "resumed after step 40"
        assert result["unchanged"] and result["resumed"] and result["state"]
    assert one["losses"] != two["losses"]
    assert one["tested"] == two["tested"]
    assert one["val_loss"] == pytest.approx(one["tested"]["test_loss"], abs=1e-6)
    assert one["val_loss"] == two["val_loss"]
    assert one["best"] <= one["val_loss"]
    assert len(one["kept"]) == 1
    assert len(one["ranks"]["wait_s"]) == 2
    assert two["ranks"] is two["late"] is None
    assert one["late"]["straggler"] == 1
    assert one["late"]["line"].startswith("rank 1 keeps the others waiting")
    assert run.stdout.count("ranks   ") == 1
    expected, nearest = alone(tmp_path / "data")
    means = [(a + b) / 2 for a, b in zip(one["losses"], two["losses"], strict=True)]
    agree(means, expected, nearest)


def agree(found: list[float], expected: list[float], nearest: list[float]) -> None:
    relus = len(nearest) // len(expected)
    assert min(nearest[: relus * COMPARED]) > ROUNDING, "a rounding error can flip a ReLU: take fewer steps"
    assert len(found) == len(expected) > COMPARED
    assert max(abs(a - b) for a, b in zip(found[:COMPARED], expected[:COMPARED], strict=True)) < 1e-6


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def alone(data: Path) -> tuple[list[float], list[float]]:
    """Return the losses of the script's run in one process, and how near its ReLUs came to their kinks."""
    sizes = DLRMConfig(table_rows=(200,) * 26, embedding_dim=8, bottom=(16, 8), top=(16, 1))
    module = DLRMModule(sizes, 0.01, 3, optimizer="rowwise-adagrad")
    seen, nearest = Losses(), near_a_kink(module.model)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, callbacks=[seen], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, pipeline.build(Reading(sorted(data.glob("*.tsv")), 64, table_rows=200, block_bytes=8192)))
    return seen.losses, nearest


def small(name: str, folder: Path, *overrides: str) -> Config:
    return load(recipes.source(name), [*SMALL, f"run_dir={folder / 'runs' / name}", *overrides]).config


def test_the_recipe_learns_from_parquet_what_one_process_learns(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for path in generate(tmp_path / "text", rows=4000, shards=2, seed=1):
        convert(path, tmp_path / "data", "parquet", group_rows=500)
    data = f"data={tmp_path / 'data'}"
    expected = runner.train(small("dlrm-lightning", tmp_path, data), "off", "test")
    words = [*SMALL, data, f"run_dir={tmp_path / 'runs' / 'hybrid'}", "trainer.devices=2", "trainer.accelerator=cpu"]
    run = subprocess.run(
        [sys.executable, "-m", "intune_callbacks.cli", "run", "dlrm-lightning-hybrid", *words],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "InTune  " in run.stdout
    assert "ranks   " in run.stdout
    assert "Warning" not in run.stderr
    report = json.loads((tmp_path / "runs" / "hybrid" / "report.json").read_text())
    assert report["auc"] == pytest.approx(expected.report["auc"], abs=2e-3)
    for rank in range(2):
        own = json.loads((tmp_path / "runs" / "hybrid" / f"rank{rank}" / "report.json").read_text())
        assert len(expected.losses) - 1 <= own["steps"] <= len(expected.losses)
        assert {stage["name"] for stage in own["stages"]} >= {"read", "parse", "collate", "prefetch"}


def by_hand(config: Config) -> tuple[list[float], list[float], float]:
    """Return losses, how near the ReLUs came to their kinks, and AUC: one process, one epoch, Keras's order."""
    model = DLRM(config.model.sizes, torch.Generator().manual_seed(config.seed))
    optimizer = torch.optim.SGD(model.parameters(), config.trainer.learning_rate)
    options = {"table_rows": config.model.table_rows, "test_fraction": config.test_frac, "seed": config.seed}
    options["block_bytes"] = config.pipeline.block_bytes
    losses, nearest = [], near_a_kink(model)
    for batch in pipeline.build(Reading(files(config), config.batch_size, **options)):
        optimizer.zero_grad()
        logits = model(batch["dense"], batch["categories"])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    trained = len(nearest)
    held_out = list(pipeline.build(Reading(files(config), config.batch_size, split="test", **options)))
    with torch.no_grad():
        logits = torch.cat([model(batch["dense"], batch["categories"]) for batch in held_out])
    return losses, nearest[:trained], evaluate(torch.cat([batch["labels"] for batch in held_out]), logits)["auc"]


def test_the_keras_recipe_learns_it_too(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    config = small("dlrm-keras-hybrid", tmp_path)
    outcome, (expected, nearest, auc) = runner.train(config, "tune", "test"), by_hand(config)
    assert len(outcome.losses) == len(expected)
    assert 0 < outcome.report["steps"] <= len(expected)
    agree(outcome.losses, expected, nearest)
    assert outcome.report["auc"] == pytest.approx(auc, abs=2e-3)
    assert len(outcome.report["ranks"]["wait_s"]) == 2
