"""Train one configuration: data, model, Trainer, report."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from intune_callbacks.errors import ConfigError, MissingPackage
from intune_callbacks.history import describe
from intune_callbacks.monitor.resources import MachineProbe
from intune_callbacks.report import build_report, end_card, write_report
from intune_callbacks.types import Observation, Stage
from recipes.config import Config, Resolved

try:
    import pytorch_lightning as pl
    import torch
except ImportError:
    raise MissingPackage("pytorch-lightning", "lightning") from None

from dlrm_examples.generate import generate
from dlrm_examples.lightning_module import DLRMModule
from dlrm_examples.model_torch import DLRMConfig
from dlrm_examples.pipeline import STAGES, CriteoLoader, build
from dlrm_examples.tsv import hashed_table_rows
from intune_callbacks.lightning import InTuneCallback
from recipes.probe import Curve, FetchClock

__all__ = ["Outcome", "files", "run", "train"]

SHARDS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training run gave.

    Args:
        report: as in report.json.
        losses: training loss of each step.
        steady: the second half of the steps as the probe saw it, in the form of the report's ``after``.
    """

    report: dict[str, Any]
    losses: list[float]
    steady: dict[str, Any]


def run(resolved: Resolved) -> Outcome:
    """Train, write `report.json` and `history.jsonl` into the configuration's `run_dir`, and print the end card."""
    mode, source = resolved.mode
    outcome = train(resolved.config, mode, source)
    path = write_report(resolved.config.run_dir, outcome.report)
    print(end_card(outcome.report))
    print(f"AUC {outcome.report['auc']:.4f} on held-out rows; the report is in {path}")
    return outcome


def train(config: Config, mode: str, mode_source: str) -> Outcome:
    """Train one model and measure its AUC on the held-out rows.

    Args:
        config: what to train; the mode it names is not looked at.
        mode: the mode in force; with ``off`` the callback is not there at all.
        mode_source: where the mode came from.

    Raises:
        ConfigError: there is no usable file, or the data is too small.
    """
    history = config.run_dir / "history.jsonl"
    history.unlink(missing_ok=True)
    # Two instances never share state: each split's loader counts its own epochs.
    loader, held_out = (_loader(config, split) for split in ("train", "test"))
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    clock = FetchClock()
    curve = Curve(clock)
    callback: InTuneCallback | None = None
    if mode != "off":
        options = {field.name: getattr(config.intune, field.name) for field in fields(config.intune)}
        callback = InTuneCallback(**{**options, "mode": mode}, run_dir=str(config.run_dir), show_card=False)
    callbacks: list[Any] = [curve] if callback is None else [curve, callback]
    trainer = pl.Trainer(
        max_epochs=config.trainer.max_epochs,
        max_steps=config.trainer.max_steps,
        accelerator=config.trainer.accelerator,
        devices=1,
        profiler=clock,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )
    model = DLRMModule(_sizes(config), learning_rate=config.trainer.learning_rate, seed=config.seed)
    with _cpu_threads(config.trainer.cpu_threads), warnings.catch_warnings():
        # Lightning 2.6 calls a function torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
        trainer.fit(model, loader)
        auc = float(trainer.test(model, held_out, verbose=False)[0]["test_auc"])
    steady = describe([_observation(config, curve)])
    report = _untuned(config, curve, steady) if callback is None else callback.report
    report |= {"mode_source": mode_source, "auc": auc}
    return Outcome(report, curve.losses, steady)


def files(config: Config) -> list[Path]:
    """Return the Criteo TSV files to read; without `data`, generate them beside the run directory.

    Raises:
        ConfigError: the directory holds no file.
    """
    if config.data is None:
        folder = config.run_dir.parent / "data" / f"{config.rows}-rows-seed-{config.seed}"
        return generate(folder, rows=config.rows, shards=SHARDS, seed=config.seed)
    if config.data.is_file():
        return [config.data]
    found = sorted(f for f in config.data.iterdir() if f.is_file() and f.suffix != ".json" and f.name[0] != ".")
    if not found:
        raise ConfigError([f"data={config.data}: the directory holds no file; give a directory of Criteo TSV files"])
    return found


def _loader(config: Config, split: str) -> CriteoLoader:
    return build(
        files(config),
        config.batch_size,
        table_rows=hashed_table_rows(config.model.max_table_rows),
        split=split,
        test_fraction=config.test_frac,
        seed=config.seed,
        workers=_workers(config),
        prefetch=config.pipeline.prefetch,
        read_latency_ms=config.read_latency_ms if split == "train" else 0.0,
        block_bytes=config.pipeline.block_bytes,
    )


@contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _workers(config: Config) -> dict[str, int]:
    return {stage: getattr(config.pipeline, f"{stage}_workers") for stage in STAGES}


def _sizes(config: Config) -> DLRMConfig:
    model = config.model
    return DLRMConfig(
        table_rows=hashed_table_rows(model.max_table_rows),
        embedding_dim=model.embedding_dim,
        bottom=(*model.bottom_mlp, model.embedding_dim),
        top=(*model.top_mlp, 1),
    )


def _observation(config: Config, curve: Curve) -> Observation:
    """Return the steady part of a run as one window, so that it is judged by the same rule as the tuner's own."""
    steps, samples, wall_s, wait_s = curve.steady()
    stages = tuple(Stage(name, "cpu", "workers", n, n, n) for name, n in _workers(config).items())
    rate = 1.0 / wall_s if wall_s else 0.0
    return Observation(
        step=curve.steps,
        at_s=0.0,
        elapsed_s=wall_s,
        batches=steps,
        samples=samples,
        batches_per_s=steps * rate,
        samples_per_s=samples * rate,
        wait_frac=wait_s * rate,
        model_s=(wall_s - wait_s) / max(1, steps),
        stages=stages,
        rates={},
        resources=MachineProbe().read(),
        latency_s=wait_s / max(1, steps),
    )


def _untuned(config: Config, curve: Curve, steady: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run without the callback; its numbers are the probe's."""
    stages = _observation(config, curve).stages
    summary = {
        "mode": "off",
        "policy": None,
        "frozen": None,
        "changes": 0,
        "settled_after_s": None,
        "wall_s": curve.wall_s,
        "steps": curve.steps,
        "samples": curve.samples,
        "stages": [asdict(stage) | {"first": stage.current} for stage in stages],
        "memory_soft_limit": config.intune.memory_soft_limit,
        "before": steady,
        "after": steady,
        "decisions": [],
    }
    return build_report(summary)
