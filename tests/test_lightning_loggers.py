"""Every logger of a Lightning Trainer gets every key, with the same numbers, and keeps them where its users look."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_runs as runs
import pytest
from lightning.pytorch import loggers

from intune_callbacks.lightning import InTuneCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
LIGHTNING = runs.NAMESPACES["lightning.pytorch"]
Logged = dict[str, dict[int, float]]


class Memory(loggers.Logger):
    """Keeps what it is given, and wants another sign between the parts of a key."""

    name, version = "memory", "0"

    def __init__(self, separator: str = "/") -> None:
        super().__init__()
        self.logged: Logged = {}
        self._separator = separator

    @property
    def group_separator(self) -> str:
        return self._separator

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for key, value in metrics.items():
            self.logged.setdefault(key, {})[step or 0] = value


def csv_logger(folder: Path) -> tuple[Any, Callable[[], Logged]]:
    def read() -> Logged:
        found: Logged = {}
        (file,) = folder.rglob("metrics.csv")
        with file.open() as lines:
            for line in csv.DictReader(lines):
                for key, value in line.items():
                    if value and key not in ("step", "epoch"):
                        found.setdefault(key, {})[int(line["step"])] = float(value)
        return found

    return loggers.CSVLogger(folder), read


def tensorboard(folder: Path) -> tuple[Any, Callable[[], Logged]]:
    pytest.importorskip("tensorboard")

    def read() -> Logged:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (file,) = folder.rglob("events.*")
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        return {key: {e.step: e.value for e in events.Scalars(key)} for key in events.Tags()["scalars"]}

    return loggers.TensorBoardLogger(folder), read


def mlflow(folder: Path) -> tuple[Any, Callable[[], Logged]]:
    pytest.importorskip("mlflow")
    logger = loggers.MLFlowLogger(tracking_uri=f"file:{folder}")

    def read() -> Logged:
        client, run = logger.experiment, str(logger.run_id)
        keys = client.get_run(run).data.metrics
        return {key: {m.step: m.value for m in client.get_metric_history(run, key)} for key in keys}

    return logger, read


def wandb(folder: Path) -> tuple[Any, Callable[[], Logged]]:
    pytest.importorskip("wandb")
    logger = loggers.WandbLogger(save_dir=folder, offline=True)

    def read() -> Logged:
        # Without its server it keeps the last value of each key, and how many there were.
        summary = dict(logger.experiment.summary)
        logger.experiment.finish()
        return {key: {summary["trainer/global_step"]: summary[key]} for key in summary if key.startswith("intune/")}

    return logger, read


def fit(*given: Any, **options: Any) -> tuple[Any, InTuneCallback]:
    often = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}
    callback = InTuneCallback("observe", show_card=False, **often)  # type: ignore[arg-type]
    trainer = runs.make_trainer(LIGHTNING, callback, logger=list(given), **options)
    trainer.fit(runs.make_model(LIGHTNING), runs.graph())
    return trainer, callback


@pytest.mark.parametrize("make", [csv_logger, tensorboard, mlflow, wandb])
def test_a_logger_keeps_what_it_is_given(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger, read = make(tmp_path)
    beside = Memory()
    fit(logger, beside)
    given = {key: values for key, values in beside.logged.items() if key.startswith("intune/")}
    assert {"intune/wait_frac", "intune/throughput_samples_per_s", "intune/rss_frac"} < set(given)
    assert all(len(values) > 3 for values in given.values())
    kept = read()
    if make is wandb:
        last = max(given["intune/wait_frac"])
        given = {key: {last: values[last]} for key, values in given.items()}
    assert {key for key in kept if key.startswith("intune/")} == set(given)
    for key, values in given.items():
        assert kept[key] == pytest.approx(values, rel=1e-5), key


def test_the_sign_between_the_parts_of_a_key_is_the_loggers() -> None:
    slash, dash = Memory(), Memory("-")
    fit(slash, dash)
    assert {key.replace("/", "-"): values for key, values in slash.logged.items()} == dash.logged
    assert "intune-wait_frac" in dash.logged


def test_a_logger_is_not_asked_at_each_step() -> None:
    memory = Memory()
    _, callback = fit(memory, max_epochs=4)
    times = len(memory.logged["intune/wait_frac"])
    assert 2 < times < callback.report["steps"] / 1.5
