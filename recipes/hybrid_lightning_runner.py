"""One rank of a hybrid run under Lightning: data, model, Trainer, report."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import pytorch_lightning as pl
import torch

from dlrm_examples.criteo.pipeline import CriteoLoader
from dlrm_examples.criteo.shards import STAGES, build
from dlrm_examples.hybrid.lightning import HybridModule, HybridStrategy
from intune_callbacks.errors import ConfigError
from intune_callbacks.lightning import InTuneCallback
from recipes import outcome
from recipes.config import Config
from recipes.outcome import Outcome
from recipes.probe import Curve, FetchClock

__all__ = ["train"]


def train(rank: int, config: Config, mode: str, mode_source: str) -> Outcome:
    """Train together with the other ranks; see `runner.train`.

    Returns:
        The losses are of the batches of all ranks; report and speed are this rank's.
    """
    loader, held_out = (_loader(rank, config, split) for split in ("train", "test"))
    if not len(loader):
        raise ConfigError([f"batch_size={config.batch_size}: the training rows do not fill one batch"])
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    clock = FetchClock()
    curve = Curve(clock)
    callback: InTuneCallback | None = None
    if mode != "off":
        callback = InTuneCallback(**outcome.callback_options(config, mode))
    callbacks: list[Any] = [curve] if callback is None else [curve, callback]
    given = config.trainer
    trainer = pl.Trainer(
        max_epochs=given.max_epochs,
        max_steps=given.max_steps,
        accelerator=given.accelerator,
        devices=given.devices,
        strategy=HybridStrategy(),
        profiler=clock,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )
    model = HybridModule(
        outcome.sizes(config),
        config.batch_size // given.devices,
        optimizer=given.optimizer,
        learning_rate=given.learning_rate,
        eps=given.eps,
        seed=config.seed,
        schedule=outcome.schedule(config),
    )
    with warnings.catch_warnings():
        # Lightning 2.6 calls a function torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
        # It cannot know that the test's figures are the same on all ranks, nor that there is no validation here.
        warnings.filterwarnings("ignore", ".*sync_dist=True")
        warnings.filterwarnings("ignore", ".*You defined a `validation_step`")
        trainer.fit(model, loader)
        losses = trainer.strategy.reduce(torch.tensor(curve.losses, device=trainer.strategy.root_device))
        found = trainer.test(model, held_out, verbose=False)[0]
    threads = outcome.workers(config, STAGES)
    steady = outcome.observed(curve, threads)
    report = outcome.untuned(config, curve, threads, steady) if callback is None else callback.report
    report |= {
        "mode_source": mode_source,
        **outcome.tested({k.removeprefix("test_"): float(v) for k, v in found.items()}),
    }
    return Outcome(report, losses.tolist(), steady)


def _loader(rank: int, config: Config, split: str) -> CriteoLoader:
    return build(
        outcome.files(config),
        config.batch_size,
        rank,
        config.trainer.devices,
        workers=outcome.workers(config, STAGES),
        **outcome.reading(config, split),
    )
