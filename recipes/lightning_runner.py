"""Train one configuration under Lightning: data, model, Trainer, report."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from intune_callbacks.errors import MissingPackage
from recipes import outcome
from recipes.config import Config
from recipes.outcome import Outcome
from recipes.room import check_room

try:
    import pytorch_lightning as pl
    import torch
except ImportError:
    raise MissingPackage("pytorch-lightning", "lightning") from None

from dlrm_examples.criteo.pipeline import STAGES, CriteoLoader, build
from dlrm_examples.models.lightning_module import DLRMModule
from intune_callbacks.lightning import InTuneCallback
from recipes.probe import Curve, FetchClock

__all__ = ["train"]


def train(config: Config, mode: str, mode_source: str) -> Outcome:
    """Train one model; see `runner.train`."""
    check_room(config)
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
        callback = InTuneCallback(**outcome.callback_options(config, mode))
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
    model = DLRMModule(
        outcome.sizes(config),
        learning_rate=config.trainer.learning_rate,
        seed=config.seed,
        optimizer=config.trainer.optimizer,
        eps=config.trainer.eps,
        schedule=outcome.schedule(config),
    )
    with _cpu_threads(config.trainer.cpu_threads), warnings.catch_warnings():
        # Lightning 2.6 calls a function torch 2.13 deprecates.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
        trainer.fit(model, loader)
        skipped_rows = loader.all_skipped_rows
        found = trainer.test(model, held_out, verbose=False)[0]
    threads = outcome.workers(config, STAGES)
    steady = outcome.observed(curve, threads)
    report = outcome.untuned(config, curve, threads, steady) if callback is None else callback.report
    report |= {
        "mode_source": mode_source,
        **outcome.tested({k.removeprefix("test_"): float(v) for k, v in found.items()}),
    }
    return Outcome(report | {"skipped_rows": skipped_rows}, curve.losses, steady)


def _loader(config: Config, split: str) -> CriteoLoader:
    return build(
        outcome.files(config),
        config.batch_size,
        workers=outcome.workers(config, STAGES),
        on_bad_row=config.pipeline.on_bad_row,
        **outcome.reading(config, split),
    )


@contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
