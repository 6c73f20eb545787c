"""Shapes that the tf.data pipelines of public training scripts have: trained as without us, and truly reported."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tf = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests are of the TensorFlow backend", allow_module_level=True)

from keras_runs import EAGER

from intune_callbacks.keras import InTuneCallback
from intune_callbacks.pipelines.tf import build as tf_build

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Dense(keras.Model):  # type: ignore[misc, name-defined]
    """Takes ragged batches, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        x = x.to_tensor(shape=[None, 4]) if isinstance(x, tf.RaggedTensor) else x
        return self.layer(tf.cast(x, tf.float32))


def fitted(dataset: Any, callback: Any, **options: Any) -> list[float]:
    """Return the loss after each batch."""
    keras.utils.set_random_seed(3)
    model, losses = Dense(), list[float]()
    model.compile(keras.optimizers.SGD(1e-4), "mse", jit_compile=False)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(dataset, verbose=0, callbacks=[callback, note], **{"epochs": 2} | options)
    return losses


def wide(numbers: Any) -> tuple[Any, Any]:
    column = tf.cast(numbers[:, None], tf.float32)
    return tf.tile(column, [1, 4]), column


def by_length() -> Any:
    rows = tf.data.Dataset.range(100).map(lambda n: tf.fill([n % 9 + 1], n), num_parallel_calls=2)
    batches = rows.bucket_by_sequence_length(lambda row: tf.shape(row)[0], [3, 6], [16, 8, 4])
    return batches.map(lambda row: wide(row[:, 0]), num_parallel_calls=2)


def by_key() -> Any:
    batches = tf.data.Dataset.range(100).group_by_window(
        lambda n: n % 3, lambda _, group: group.batch(8), window_size=8
    )
    return batches.map(wide, num_parallel_calls=2)


def uneven() -> Any:
    return tf.data.Dataset.range(100).batch(16).map(wide, num_parallel_calls=2)


def ragged() -> Any:
    rows = tf.data.Dataset.range(100).map(lambda n: (tf.range(n % 4 + 1), [1.0]), num_parallel_calls=2)
    return rows.ragged_batch(16)


@pytest.mark.parametrize("make", [by_length, by_key, uneven, ragged])
@pytest.mark.parametrize("together", [1, 3])
def test_each_sample_counts_once_however_long_its_batch_is(make: Callable[[], Any], together: int) -> None:
    callback = InTuneCallback(mode="observe", **EAGER)
    keras.utils.set_random_seed(3)
    model = Dense()
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=together)
    model.fit(make(), epochs=2, verbose=0, callbacks=[callback])
    assert callback.report["frozen"] is None
    assert callback.report["whole"]["samples"] == 200


class Slope(keras.Model):  # type: ignore[misc, name-defined]
    """Takes one number after the other, as a train step of one's own may."""

    def train_step(self, number: Any) -> Any:
        return {"loss": tf.cast(number, tf.float32) / 2}


def test_numbers_that_are_in_no_batch_are_tuned() -> None:
    callback, model = InTuneCallback(**EAGER), Slope()
    model.compile("sgd", jit_compile=False)
    model.fit(tf.data.Dataset.range(100).map(lambda n: 2 * n, num_parallel_calls=2), verbose=0, callbacks=[callback])
    assert callback.report["frozen"] is None
    assert callback.report["whole"]["samples"] == 100
    assert "map" in [stage["name"] for stage in callback.report["stages"]]


def test_of_a_loop_nobody_could_look_into_no_speed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    callback = InTuneCallback()
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        fitted(uneven(), callback, epochs=1)
    assert callback.report["whole"]["throughput_samples_per_s"] is None
    card = capsys.readouterr().out
    assert "samples/s" not in card and "TOO SHORT" not in card and "were measured" not in card
    head, why, *rest = card.splitlines()
    assert head.startswith("InTune  NOT MEASURED") and why.startswith("why     the distribution strategy has spread")
    assert "distribution strategy" not in rest[-1] and "one device per process" in " ".join(rest)
