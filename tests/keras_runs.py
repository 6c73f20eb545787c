"""What the Keras tests share: models that remember their batches, data of every kind, a restless tuner."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

from intune_callbacks.session.tuner import Tuner

ROWS, BATCH = 96, 4
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2, "show_card": False}
KEYS = {"intune/throughput_samples_per_s", "intune/wait_frac", "intune/rss_frac", "intune/reward"}


class Remembering(keras.Model):  # type: ignore[misc, name-defined]
    """A linear model; `seen` holds the first column of every training batch, `tested` of every validation batch."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1, kernel_initializer="ones")
        self.step_s = step_s
        self.seen: list[list[float]] = []
        self.tested: list[list[float]] = []

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, *given: Any) -> Any:
        time.sleep(self.step_s)
        self.seen.append(first_column(given[-1]))
        return super().train_step(*given)

    def test_step(self, *given: Any) -> Any:
        self.tested.append(first_column(given[-1]))
        return super().test_step(*given)


def first_column(batch: Any) -> list[float]:
    return [round(float(value), 4) for value in np.asarray(keras.ops.convert_to_numpy(batch[0]))[:, 0]]


def make_model(step_s: float = 0.0, **options: Any) -> Any:
    """A compiled model whose steps are plain Python, so that it sees each batch."""
    model = Remembering(step_s)
    model.compile(keras.optimizers.SGD(1e-5), "mse", **{"run_eagerly": True, "jit_compile": False} | options)
    return model


def compiled(**options: Any) -> Any:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **{"jit_compile": False} | options)
    return model


def fit(*callbacks: Any, data: Any = None, **options: Any) -> Any:
    return compiled().fit(rows() if data is None else data, callbacks=list(callbacks), **{"verbose": 0} | options)


def rows(rows: int = ROWS, item_s: float = 0.0, *, workers: int | None = 2, unknown: bool = False) -> Any:
    """A shuffled dataset whose row i is the number i, twice, or as far from 0 to 96; `item_s` seconds a row."""
    import tensorflow as tf

    def load(index: Any) -> Any:
        time.sleep(item_s)
        return index

    def as_row(index: Any) -> Any:
        if item_s:
            index = tf.ensure_shape(tf.numpy_function(load, [index], tf.int64), [])
        value = tf.cast(index, tf.float32) * (ROWS / rows)
        return tf.fill([2], value), tf.fill([1], value)

    dataset = tf.data.Dataset.range(rows).shuffle(16, seed=3).map(as_row, num_parallel_calls=workers)
    dataset = dataset.filter(lambda x, y: True) if unknown else dataset
    return dataset.batch(BATCH, num_parallel_calls=workers).prefetch(2)


def loader(rows: int = ROWS, **options: Any) -> Any:
    """A shuffled torch DataLoader over the same rows."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(5)  # Keras seeds torch on the torch backend only
    index = torch.arange(rows, dtype=torch.float32)[:, None]
    return DataLoader(TensorDataset(index.repeat(1, 2), index), batch_size=BATCH, shuffle=True, **options)


class Pages(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, page: int) -> Any:
        time.sleep(0.01)
        return np.full((BATCH, 2), float(page)), np.zeros((BATCH, 1))


class Numbered(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    """Batch i is full of the number i, and behind the point, unless it is not `dated`, of the epochs that have ended.

    Args:
        batches: of an epoch, None for no end.
        item_s: seconds a batch takes; every third one takes four times as long.
        breaks_at: a number whose batch cannot be made.
    """

    last: ClassVar[Any] = None

    def __init__(
        self, batches: int | None = 24, item_s: float = 0.0, breaks_at: int = -1, dated: bool = True, **given: Any
    ) -> None:
        super().__init__(**given)
        self.batches, self.item_s, self.breaks_at, self.dated, self.ended = batches, item_s, breaks_at, dated, 0
        self.asked: list[int] = []
        Numbered.last = self

    @property
    def num_batches(self) -> int | None:
        return self.batches

    def __getitem__(self, number: int) -> Any:
        self.asked.append(number)
        time.sleep(self.item_s * (4 if number % 3 == 0 else 1))
        if number == self.breaks_at:
            raise KeyError(f"no batch {number}")
        value = number % 90 + self.dated * self.ended / 100
        return np.full((BATCH, 2), value, "float32"), np.full((BATCH, 1), value // 30, "float32")

    def on_epoch_end(self) -> None:
        self.ended += 1


class Settles(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Waits at each step until Keras's enqueuer has sent its workers as much as fits: that many come first after an
    epoch that ends early."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        frame: Any = sys._getframe(1)
        while "epoch_iterator" not in frame.f_locals:
            frame = frame.f_back
        enqueuer = getattr(frame.f_locals["epoch_iterator"].data_adapter, "enqueuer", None)
        if isinstance(enqueuer, OrderedEnqueuer):
            settled(enqueuer)


def settled(enqueuer: Any) -> None:
    """Wait until a running enqueuer of Keras's has sent all there is, or waits for a place in its queue."""
    deadline_s, places = time.monotonic() + 30.0, enqueuer.future_queue
    while enqueuer.run_thread.is_alive() and not (places.full() and places.not_full._waiters):
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


def generator(batches: int = ROWS // BATCH) -> Any:
    for page in range(batches):
        time.sleep(0.01)
        yield np.full((BATCH, 2), float(page)), np.zeros((BATCH, 1))


class RestlessTuner(Tuner):
    """Sets every stage to a random value before every batch."""

    made: ClassVar[list[RestlessTuner]] = []

    def __init__(self, pipeline: Any, config: Any, **given: Any) -> None:
        super().__init__(pipeline, config, **given)
        self.pipeline, self.random = pipeline, random.Random(0)
        self.resizes, self.samples = 0, 0
        RestlessTuner.made.append(self)

    def batch(self, totals: Any, samples: int, exposed_wait_s: float | None = None) -> None:
        self.samples += samples
        stages = self.pipeline.stages()
        self.pipeline.resize({s.name: self.random.randint(s.low, max(s.low, min(s.high, 6))) for s in stages})
        self.resizes += len(stages)


def trained(make_data: Callable[[], Any], callbacks: list[Any], step_s: float = 0.0, **options: Any) -> dict[str, Any]:
    """Return what one fit saw and made of it, from the same seed each time; at last, which number `random` gives."""
    # A stock worker that is forked now would free the iterators that earlier fits have left to the garbage collector:
    # they wait for threads of TensorFlow's, which it does not have, and it hangs.
    gc.collect()
    keras.utils.set_random_seed(7)
    model = make_model(step_s)
    data = make_data()
    options = {"epochs": 2, "verbose": 0} | options
    if options.pop("validate", False):
        options["validation_data"] = data
    history = model.fit(data, callbacks=callbacks, **options).history
    return {
        "seen": model.seen,
        "tested": model.tested,
        "history": {key: values for key, values in history.items() if not key.startswith("intune/")},
        "logged": {key: values for key, values in history.items() if key.startswith("intune/")},
        "weights": [np.asarray(keras.ops.convert_to_numpy(w)).tolist() for w in model.weights],
        "random": random.random(),
    }
