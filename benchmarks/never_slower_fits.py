"""One whole fit on a kind of cheap input: in Lightning, in Keras, in a loop of one's own or with a `Trainer`."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.never_slower_kinds import COLUMNS, Kind

__all__ = ["Fitted", "fit"]


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
        ways = {"lightning": _lightning, "keras": _keras, "plain": _plain, "transformers": _transformers}
        return ways[kind.framework](kind, data, mode, epochs)


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
            self.model = _torch_model(kind.model_s)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(*batch)["loss"]

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


def _torch_model(model_s: float) -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(COLUMNS, 1)

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            time.sleep(model_s)
            return {"loss": (self.layer(x) - y).square().mean()}

    return Model()


def _plain(kind: Kind, data: Any, mode: str, epochs: int) -> Fitted:
    import torch

    from intune_callbacks import live

    watch, model = _Stopwatch(), _torch_model(kind.model_s)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    begin_s = watch.begin_s = time.perf_counter()
    loader = data if mode == "none" else live(data, mode=mode, show_card=False)
    for _ in range(epochs):
        for batch in loader:
            loss = model(*batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.steps += 1
    watch.end_s = time.perf_counter()
    return watch.fitted(kind, begin_s, {} if mode == "none" else loader.close())


def _transformers(kind: Kind, data: Any, mode: str, epochs: int) -> Fitted:
    import torch
    import transformers

    from intune_callbacks.transformers import InTuneCallback

    transformers.utils.logging.set_verbosity_error()
    watch = _Stopwatch()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, *_: Any, **more: Any) -> None:
            watch.begin_s = time.perf_counter()

        def on_step_end(self, *_: Any, **more: Any) -> None:
            watch.steps += 1

        def on_train_end(self, *_: Any, **more: Any) -> None:
            watch.end_s = time.perf_counter()

    def collate(rows: list[Any]) -> dict[str, Any]:
        columns = rows[0] if data.batch_size is None else torch.utils.data.default_collate(rows)
        return {"x": columns[0], "y": columns[1]}

    ours = [] if mode == "none" else [InTuneCallback(mode=mode, show_card=False)]
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, per_device_train_batch_size=data.batch_size or 1, num_train_epochs=epochs,
            dataloader_num_workers=data.num_workers, remove_unused_columns=False, optim="sgd", use_cpu=True,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            _torch_model(kind.model_s), options, collate, data.dataset, callbacks=[*ours, Clock()]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        begin_s = time.perf_counter()
        trainer.train()
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
