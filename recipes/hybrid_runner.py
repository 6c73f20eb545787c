"""Train one configuration on several ranks, tables divided among them: data, model, training, report."""

from __future__ import annotations

import os

from dlrm_examples.hybrid import install
from dlrm_examples.hybrid.ranks import run_ranks
from recipes.config import Config
from recipes.outcome import Outcome, files

__all__ = ["train"]


def train(config: Config, mode: str, mode_source: str) -> Outcome:
    """Train one model, every rank in a process of its own; see `runner.train`.

    Raises:
        MissingTorchRec: TorchRec is not installed.
        RankFailed: a rank failed; all are ended.
    """
    install.require()
    for history in config.run_dir.glob("rank*/history.jsonl"):
        history.unlink()
    files(config)  # generated here, once, if need be
    rank = _keras if config.framework == "keras" else _lightning
    outcome: Outcome = run_ranks(rank, config.trainer.devices, config, mode, mode_source)
    return outcome


def _lightning(rank: int, config: Config, mode: str, mode_source: str) -> Outcome:
    _cpu_threads(config)
    from recipes import hybrid_lightning_runner

    return hybrid_lightning_runner.train(rank, config, mode, mode_source)


def _keras(rank: int, config: Config, mode: str, mode_source: str) -> Outcome:
    _cpu_threads(config)
    os.environ["KERAS_BACKEND"] = "torch"
    from recipes import hybrid_keras_runner

    return hybrid_keras_runner.train(rank, config, mode, mode_source)


def _cpu_threads(config: Config) -> None:
    """Before torch is imported, which is when it looks; Lightning leaves the number alone where this is set."""
    if config.trainer.cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.trainer.cpu_threads)
