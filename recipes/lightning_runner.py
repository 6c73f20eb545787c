"""Fit and test under Lightning, on one rank or as one of several."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from intune_callbacks.errors import MissingPackage

from .data import SAMPLE_ROWS, reading
from .results import Fitted
from .schema import Config

try:
    import pytorch_lightning as pl
    import torch
except ImportError:
    raise MissingPackage("pytorch-lightning", "lightning") from None

from dlrm_examples.criteo import pipeline, shards
from dlrm_examples.criteo.reading import Reading
from dlrm_examples.models.hammock import quantiles
from dlrm_examples.models.lightning_module import ClickModule, DLRMModule, HammockModule
from intune_callbacks.lightning import InTuneCallback

from .stopwatch_lightning import Curve, FetchClock

__all__ = ["InTuneCallback", "fit"]


def fit(config: Config, rank: int, callback: InTuneCallback | None) -> Fitted:
    """Train one model and test it on the held-out rows.

    Args:
        config: what to train.
        rank: this process among those that train together.
        callback: the tuner, if there is one.
    """
    given, hybrid = config.trainer, config.trainer.strategy == "hybrid"
    train, test = (reading(config, split, (shards if hybrid else pipeline).STAGES) for split in ("train", "test"))
    # Two instances never share state: each split's loader counts its own epochs.
    loader, held_out = (
        shards.build(asked, rank, given.devices) if hybrid else pipeline.build(asked) for asked in (train, test)
    )
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    clock = FetchClock()
    curve = Curve(clock)
    callbacks: list[Any] = [curve] if callback is None else [curve, callback]
    model, strategy = _model(config, train)
    trainer = pl.Trainer(
        max_epochs=given.max_epochs,
        max_steps=given.max_steps,
        accelerator=given.accelerator,
        devices=given.devices,
        strategy=strategy,
        profiler=clock,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )
    with _cpu_threads(given.cpu_threads), warnings.catch_warnings():
        # Lightning 2.6 calls a function torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
        # It cannot know that the test's figures are the same on all ranks, nor that there is no validation here.
        warnings.filterwarnings("ignore", ".*sync_dist=True")
        warnings.filterwarnings("ignore", ".*You defined a `validation_step`")
        trainer.fit(model, loader)
        skipped_rows = loader.all_skipped_rows
        losses = trainer.strategy.reduce(torch.tensor(curve.losses, device=trainer.strategy.root_device))
        found = trainer.test(model, held_out, verbose=False)[0]
    figures = {key.removeprefix("test_"): float(value) for key, value in found.items()}
    return Fitted(curve, losses.tolist(), figures, train.workers, skipped_rows)


def _model(config: Config, train: Reading) -> tuple[ClickModule, Any]:
    """Return the model, and Lightning's strategy for it."""
    given = config.trainer
    options: dict[str, Any] = {
        "optimizer": given.optimizer,
        "learning_rate": given.learning_rate,
        "eps": given.eps,
        "seed": config.seed,
        "schedule": given.schedule,
    }
    if config.model.network == "hammock":
        edges = quantiles(train.sample(SAMPLE_ROWS).dense, config.model.buckets)
        return HammockModule(config.model.hammock, edges, **options), "auto"
    if given.strategy == "auto":
        return DLRMModule(config.model.sizes, **options), "auto"
    from dlrm_examples.hybrid.lightning import HybridModule, HybridStrategy

    return HybridModule(config.model.sizes, config.batch_size // given.devices, **options), HybridStrategy()


@contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
