"""What the Keras pipelines share: models that keep every loss without making Keras wait for it."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

__all__ = ["calls", "click_model", "compiled", "convolutional"]

MOST_STEPS = 100_000


class Recorded(keras.Model):  # type: ignore[misc]
    """Writes the loss of each step into a variable, inside the train function."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        if not hasattr(self, "seen"):
            with tf.init_scope():
                self.seen = tf.Variable(tf.zeros([MOST_STEPS]), trainable=False)
                self.at = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.seen.scatter_nd_update([[self.at % MOST_STEPS]], [logs["loss"]])
        self.at.assign_add(1)
        return logs

    def recorded(self) -> list[float]:
        """Return the mean loss of the epoch after each step."""
        return [float(loss) for loss in self.seen.numpy()[: min(int(self.at), MOST_STEPS)]]


def compiled(inputs: Any, outputs: Any, loss: Any) -> Any:
    """Return the model, ready to train."""
    model = Recorded(inputs, outputs)
    model.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=False)
    return model


def calls(number: int) -> int | None:
    """Return `number` as ``num_parallel_calls`` has it: none for 0, AUTOTUNE for -1."""
    return number or None


def click_model(inputs: Any, dense: Any, ids: list[Any], words: int, width: int = 16, units: int = 64) -> Any:
    """Return a click model: an embedding per category, then two layers.

    Args:
        inputs: of the model.
        dense: the numbers, [batch, columns].
        ids: per category, [batch] from 0 to `words`.
        words: rows of each embedding.
        width: of the embeddings.
        units: of the layers.
    """
    hidden = keras.ops.concatenate([dense, *(keras.layers.Embedding(words, width)(column) for column in ids)], -1)
    hidden = keras.layers.Dense(units, "relu")(keras.layers.Dense(units, "relu")(hidden))
    return compiled(inputs, keras.layers.Dense(1, "sigmoid")(hidden), "binary_crossentropy")


def convolutional(size: int, classes: int, width: int = 8, one_hot: bool = False) -> Any:
    """Return three convolutions with large strides.

    Args:
        size: height and width of the images.
        classes: of the labels.
        width: channels of the first convolution.
        one_hot: how the labels come.
    """
    images = keras.Input([size, size, 3])
    hidden = images
    for times, kernel, stride in ((1, 7, 4), (2, 3, 2), (4, 3, 2)):
        hidden = keras.layers.Conv2D(times * width, kernel, stride, activation="relu")(hidden)
    scores = keras.layers.Dense(classes, "softmax")(keras.layers.GlobalAveragePooling2D()(hidden))
    return compiled(images, scores, f"{'' if one_hot else 'sparse_'}categorical_crossentropy")
