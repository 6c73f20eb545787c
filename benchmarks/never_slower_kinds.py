"""Twelve kinds of cheap input, each a whole fit of Lightning or Keras that has nothing to gain from a tuner."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["KINDS", "Fitted", "fit", "kind_named"]

COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of input.

    Args:
        name: in the rows.
        framework: ``lightning`` or ``keras``.
        data: makes the input for so many batches, anew for each fit.
        batch: samples per batch.
        model_s: seconds a step of the model sleeps (Lightning), or takes about (Keras).
    """

    name: str
    framework: str
    data: Callable[[int, int], Any]
    batch: int
    model_s: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """One fit.

    Args:
        wall_s: of the whole `fit`.
        steps: batches trained on.
        samples_per_s: by a clock of our own, from the first step's fetch to the end of the training.
        report: the callback's, empty without one.
    """

    wall_s: float
    steps: int
    samples_per_s: float
    report: dict[str, Any]


def _tensors(batches: int, batch: int, workers: int = 0) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.ones(batches * batch, COLUMNS), torch.zeros(batches * batch, 1))
    return DataLoader(rows, batch_size=batch, shuffle=True, num_workers=workers)


def _presliced(batches: int, batch: int, workers: int = 0) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    slices = TensorDataset(torch.ones(batches, batch, COLUMNS), torch.zeros(batches, batch, 1))
    return DataLoader(slices, batch_size=None, shuffle=True, num_workers=workers)


def _arrays(batches: int, batch: int) -> Any:
    import numpy as np

    return np.ones((batches * batch, COLUMNS), np.float32), np.zeros((batches * batch, 1), np.float32)


def _slices(batches: int, batch: int, cached: bool = False) -> Any:
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(_arrays(batches, batch))
    if cached:
        return rows.map(lambda x, y: (x * 2.0, y), num_parallel_calls=2).batch(batch).cache().prefetch(2)
    return rows.shuffle(1024).batch(batch).prefetch(2)


KINDS = (
    Kind("tensors 32, 0 workers, .2 ms", "lightning", _tensors, 32, 0.0002),
    Kind("tensors 256, 0 workers, .2 ms", "lightning", _tensors, 256, 0.0002),
    Kind("tensors 32, 2 workers, .2 ms", "lightning", partial(_tensors, workers=2), 32, 0.0002),
    Kind("tensors 128, 0 workers, 2 ms", "lightning", _tensors, 128, 0.002),
    Kind("tensors 256, 2 workers, 20 ms", "lightning", partial(_tensors, workers=2), 256, 0.02),
    Kind("presliced, 0 workers, .2 ms", "lightning", _presliced, 32, 0.0002),
    Kind("presliced, 2 workers, 2 ms", "lightning", partial(_presliced, workers=2), 32, 0.002),
    Kind("tf.data cached, 32", "keras", partial(_slices, cached=True), 32, 0.0002),
    Kind("tf.data slices, 32", "keras", _slices, 32, 0.0002),
    Kind("tf.data slices, 256, 2 ms", "keras", _slices, 256, 0.002),
    Kind("numpy arrays, 32", "keras", _arrays, 32, 0.0002),
    Kind("torch loader 64, 0 workers", "keras", _tensors, 64, 0.0002),
)


def kind_named(text: str) -> Kind:
    """Return the kind whose name begins with `text`.

    Raises:
        ValueError: there is none.
    """
    for kind in KINDS:
        if kind.name.startswith(text):
            return kind
    raise ValueError(f"{text!r}: expected the beginning of one of {', '.join(kind.name for kind in KINDS)}")


def fit(kind: Kind, mode: str, batches: int, epochs: int) -> Fitted:
    """Train once.

    Args:
        kind: what on.
        mode: of the callback; ``none`` trains without any.
        batches: per epoch.
        epochs: so many.
    """
    data = kind.data(batches, kind.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"lightning": _lightning, "keras": _keras}[kind.framework](kind, data, mode, epochs)


class _Stopwatch:
    """Counts steps and takes the time from the begin of the training to its end."""

    def __init__(self) -> None:
        self.steps, self.begin_s, self.end_s = 0, 0.0, 0.0

    def fitted(self, kind: Kind, begin_s: float, report: dict[str, Any]) -> Fitted:
        rate = self.steps * kind.batch / max(1e-9, self.end_s - self.begin_s)
        return Fitted(time.perf_counter() - begin_s, self.steps, rate, report)


def _lightning(kind: Kind, data: Any, mode: str, epochs: int) -> Fitted:
    import lightning.pytorch as lightning
    import torch

    from intune_callbacks.lightning import InTuneCallback

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    watch = _Stopwatch()

    class Clock(lightning.Callback):
        def on_train_start(self, *_: Any) -> None:
            watch.begin_s = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            watch.steps += 1

        def on_train_end(self, *_: Any) -> None:
            watch.end_s = time.perf_counter()

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(COLUMNS, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            time.sleep(kind.model_s)
            return (self.layer(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    ours = [] if mode == "none" else [InTuneCallback(mode, show_card=False)]
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[*ours, Clock()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin_s = time.perf_counter()
    trainer.fit(Model(), data)
    return watch.fitted(kind, begin_s, ours[0].report if ours else {})


def _keras(kind: Kind, data: Any, mode: str, epochs: int) -> Fitted:
    import keras

    from intune_callbacks.keras import InTuneCallback

    watch = _Stopwatch()

    class Clock(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, logs: Any = None) -> None:
            watch.begin_s = time.perf_counter()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            watch.steps += 1

        def on_train_end(self, logs: Any = None) -> None:
            watch.end_s = time.perf_counter()

    keras.utils.set_random_seed(0)
    ours = [] if mode == "none" else [InTuneCallback(mode, show_card=False)]
    model = keras.Sequential(list(_layers(kind.model_s)))
    model.compile("sgd", "mse", jit_compile=False)
    given = dict(zip(("x", "y"), data, strict=True)) if isinstance(data, tuple) else {"x": data}
    batch = {"batch_size": kind.batch} if isinstance(data, tuple) else {}
    begin_s = time.perf_counter()
    model.fit(**given, **batch, epochs=epochs, verbose=0, callbacks=[*ours, Clock()])
    return watch.fitted(kind, begin_s, ours[0].report if ours else {})


def _layers(model_s: float) -> Iterator[Any]:
    import keras

    if model_s >= 0.001:
        yield from (keras.layers.Dense(512) for _ in range(4))
    yield keras.layers.Dense(1)
