"""Run one configuration under the framework it names, on one rank or on several."""

from __future__ import annotations

import os
from dataclasses import fields
from types import ModuleType
from typing import Any

from dlrm_examples.hybrid import install
from dlrm_examples.hybrid.ranks import run_ranks
from intune_callbacks.record.report import Report, write_report
from intune_callbacks.show.card import show
from intune_callbacks.show.page.commands import at_the_end

from .config import Config, Resolved
from .memory_check import check_memory
from .ready import check_ready
from .results import Fitted, Outcome, observed, result_table, tested, untuned

__all__ = ["Outcome", "callback_options", "run", "train"]


def run(resolved: Resolved) -> Outcome:
    """Train, write `report.json` and `history.jsonl` into the configuration's `run_dir`, print end card and result."""
    mode, source = resolved.mode
    if resolved.config.gbdt:
        from . import trees  # what is missing is said before the training
    outcome = train(resolved.config, mode, source)
    outcome.report["settings"] = resolved.settings
    report = Report.from_json(outcome.report)
    write_report(resolved.config.run_dir, report)
    at_the_end(resolved.config.run_dir)
    show(report, resolved.config.run_dir)
    print(f"\n{result_table(outcome, trees.fitted(resolved.config) if resolved.config.gbdt else None)}")
    return outcome


def train(config: Config, mode: str, mode_source: str) -> Outcome:
    """Train one model and measure its AUC on the held-out rows.

    Args:
        config: what to train; the mode it names is not looked at.
        mode: the mode in force; with ``off`` the callback is not there at all.
        mode_source: where the mode came from.

    Returns:
        Of several ranks report and speed are rank 0's, the losses of the batches of all.

    Raises:
        ConfigError: there is no usable file, the data is too small, the model too large, or the run's folder cannot be
            written.
        BadData: a row or a file turns out to be damaged while it is read.
        MissingPackage: the framework is not installed, or TorchRec.
        RankFailed: one of several ranks failed; all are ended.
    """
    check_ready(config)
    check_memory(config)
    if config.trainer.strategy != "hybrid":
        _forget(config, "history.jsonl")
        return _train(0, config, mode, mode_source)
    install.require()
    _forget(config, "rank*/history.jsonl")
    outcome: Outcome = run_ranks(_train, config.trainer.devices, config, mode, mode_source)
    return outcome


def callback_options(config: Config, mode: str) -> dict[str, Any]:
    """Return the arguments of `InTuneCallback`; the card is the runner's to print."""
    given = {field.name: getattr(config.intune, field.name) for field in fields(config.intune)}
    return given | {"mode": mode, "run_dir": str(config.run_dir), "show_card": False}


def _forget(config: Config, histories: str) -> None:
    for history in config.run_dir.glob(histories):
        history.unlink()


def _train(rank: int, config: Config, mode: str, mode_source: str) -> Outcome:
    framework = _framework(config)
    callback = None if mode == "off" else framework.InTuneCallback(**callback_options(config, mode))
    fitted: Fitted = framework.fit(config, rank, callback)
    marks, threads = fitted.marks, fitted.workers
    steady = observed(marks, threads)
    report = untuned(config, marks, threads, steady) if callback is None else callback.report
    report |= {"mode_source": mode_source, **tested(fitted.figures)}
    return Outcome(report | {"skipped_rows": fitted.skipped_rows}, fitted.losses, steady)


def _framework(config: Config) -> ModuleType:
    """Return the module that brings `InTuneCallback` and `fit`; whoever uses one framework need not have the other."""
    hybrid, threads = config.trainer.strategy == "hybrid", config.trainer.cpu_threads
    if hybrid and threads is not None:
        # Before torch is imported, which is when it looks; Lightning leaves the number alone where this is set.
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if config.framework == "lightning":
        from . import lightning_runner

        return lightning_runner
    # TensorFlow announces on stderr, at import, for which CPU it was built.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if hybrid:
        os.environ["KERAS_BACKEND"] = "torch"
        from . import hybrid_keras_runner

        return hybrid_keras_runner
    from . import keras_runner

    return keras_runner
