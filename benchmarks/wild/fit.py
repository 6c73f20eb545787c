"""One fit with a clock of its own, under Keras or Lightning: seconds, samples, all losses, and InTune's report."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.wild.entry import Entry, Fit, Numbers

__all__ = ["MODES", "train"]

MODES = ("off", "observe", "advise", "tune")
DROPPED = ("decisions", "settings", "versions", "memory")
"""Of the report: long, and no result."""


def train(entry: Entry, mode: str, folder: Path, numbers: Numbers, fit: Fit, seed: int, **given: Any) -> dict[str, Any]:
    """Train once and return what was measured.

    Args:
        entry: what.
        mode: ``off`` is without the callback, not even imported.
        folder: of the data.
        numbers: of the loader.
        fit: how long.
        seed: of model, shuffles and draws.
        given: arguments of the callback; none in the benchmark.
    """
    run = _keras if entry.framework == "keras" else _lightning
    clock: dict[str, Any] = {}
    callbacks = _callbacks(entry.framework, mode, given)
    losses, call_s = run(entry, folder, numbers, fit, seed, callbacks, clock)
    report = callbacks[0].report if callbacks else {}
    wall_s, samples = clock["end"] - clock["start"], clock["batches"] * entry.batch
    return {
        "wall_s": round(wall_s, 4),
        "call_s": round(call_s, 4),
        "batches": clock["batches"],
        "samples": samples,
        "samples_per_s": round(samples / wall_s, 3),
        "first_batch_s": round(clock["first"] - clock["start"], 4),
        "cpu_s": round(sum(os.times()[:4]), 2),
        "losses": hashlib.sha256(np.asarray(losses, np.float64).tobytes()).hexdigest()[:16],
        "last_loss": float(losses[-1]) if len(losses) else None,
        "report": {key: value for key, value in report.items() if key not in DROPPED},
        "changes": _changes(report),
    }


def _changes(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"step": decision["step"], "to": decision["after"], "reason": decision["reason"]}
        for decision in report.get("decisions", ())
        if decision["applied"]
    ]


def _clocks(base: type, clock: dict[str, Any]) -> tuple[Any, Any]:
    """Return two callbacks: the first one starts the clock, the last one stops it, so that others are between them."""

    class First(base):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            clock.update(start=time.perf_counter(), batches=0)

        def on_train_batch_begin(self, batch: Any, logs: Any = None) -> None:
            clock["batches"] += 1
            clock.setdefault("first", time.perf_counter())

        def on_train_start(self, *_: Any) -> None:
            self.on_train_begin()

        def on_train_batch_start(self, *_: Any) -> None:
            self.on_train_batch_begin(0)

    class Last(base):  # type: ignore[misc]
        def on_train_end(self, *_: Any) -> None:
            clock["end"] = time.perf_counter()

    return First(), Last()


def _keras(
    entry: Entry, folder: Path, numbers: Numbers, fit: Fit, seed: int, callbacks: Sequence[Any], clock: dict[str, Any]
) -> tuple[list[float], float]:
    import keras

    keras.utils.set_random_seed(seed)
    first, last = _clocks(keras.callbacks.Callback, clock)
    data, model = entry.load(folder, numbers), entry.model()
    begin = time.perf_counter()
    model.fit(
        data, epochs=fit.epochs, steps_per_epoch=fit.steps, verbose=0, callbacks=[first, *callbacks, last]
    )  # fmt: skip
    call_s = time.perf_counter() - begin
    return model.recorded(), call_s


def _lightning(
    entry: Entry, folder: Path, numbers: Numbers, fit: Fit, seed: int, callbacks: Sequence[Any], clock: dict[str, Any]
) -> tuple[list[float], float]:
    import pytorch_lightning as pl

    from benchmarks.wild.models_torch import Recorded

    warnings.simplefilter("ignore")
    pl.seed_everything(seed, verbose=False)
    first, last = _clocks(pl.Callback, clock)
    data, model = entry.load(folder, numbers), Recorded(entry.model())
    trainer = pl.Trainer(
        max_epochs=fit.epochs,
        limit_train_batches=fit.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[first, *callbacks, last],
    )
    begin = time.perf_counter()
    trainer.fit(model, train_dataloaders=data)
    call_s = time.perf_counter() - begin
    return model.losses, call_s


def _callbacks(framework: str, mode: str, given: Mapping[str, Any]) -> Sequence[Any]:
    if mode == "off":
        return []
    made = import_module(f"intune_callbacks.{framework}").InTuneCallback
    # Tuning is what a user gets who gives no argument at all.
    return [made(**given) if mode == "tune" else made(mode=mode, **given)]
