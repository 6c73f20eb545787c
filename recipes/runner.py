"""Run one configuration under the framework it names."""

from __future__ import annotations

from intune_callbacks.record.report import Report, write_report
from intune_callbacks.show.card import show
from intune_callbacks.show.page.commands import at_the_end
from recipes.config import Config, Resolved
from recipes.outcome import Outcome, files, result_table
from recipes.ready import check_ready

__all__ = ["Outcome", "files", "run", "train"]


def run(resolved: Resolved) -> Outcome:
    """Train, write `report.json` and `history.jsonl` into the configuration's `run_dir`, print end card and result."""
    mode, source = resolved.mode
    outcome = train(resolved.config, mode, source)
    outcome.report["settings"] = resolved.settings
    report = Report.from_json(outcome.report)
    write_report(resolved.config.run_dir, report)
    at_the_end(resolved.config.run_dir)
    show(report, resolved.config.run_dir)
    print(f"\n{result_table(outcome)}")
    return outcome


def train(config: Config, mode: str, mode_source: str) -> Outcome:
    """Train one model and measure its AUC on the held-out rows.

    Args:
        config: what to train; the mode it names is not looked at.
        mode: the mode in force; with ``off`` the callback is not there at all.
        mode_source: where the mode came from.

    Raises:
        ConfigError: there is no usable file, the data is too small, or the run's folder cannot be written.
        BadData: a row or a file turns out to be damaged while it is read.
        MissingPackage: the framework is not installed.
    """
    check_ready(config)
    # Imported here: whoever trains with one framework need not have the other.
    if config.trainer.strategy == "hybrid":
        from recipes import hybrid_runner

        return hybrid_runner.train(config, mode, mode_source)
    if config.framework == "keras":
        from recipes import keras_runner

        return keras_runner.train(config, mode, mode_source)
    from recipes import lightning_runner

    return lightning_runner.train(config, mode, mode_source)
