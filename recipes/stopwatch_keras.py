"""The clock and the loss curve of a Keras run; the same for a tuned and an untuned one, no part of the tuner."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from dlrm_examples.models.dlrm_keras import DLRM
from dlrm_examples.models.hammock_keras import Hammock

from .stopwatch import Marks

__all__ = ["Curve", "RecordedDLRM", "RecordedHammock", "timed"]

KEPT = 1024
CYCLE = 4 * KEPT


def timed(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, tf.Variable]:
    """Return the same dataset with a clock at its end, and the clock: seconds its consumer has waited so far.

    On TensorFlow the training step fetches its own data, so the waiting can be measured in the graph only.
    """
    with tf.device("CPU:0"):
        waited_s = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def ask(state: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return state, tf.timestamp()

    def answer(state: tf.Tensor, asked: tuple[tf.Tensor, Any]) -> tuple[tf.Tensor, Any]:
        asked_s, batch = asked
        waited_s.assign_add(tf.timestamp() - asked_s)
        return state, batch

    # `scan`, as it is never done in parallel; `zip` asks its inputs one after the other.
    requests = tf.data.Dataset.range(np.iinfo(np.int64).max).scan(np.int64(0), ask)
    clocked = tf.data.Dataset.zip((requests, dataset)).scan(np.int64(0), answer)
    # tf.data would put a buffer behind the clock, which would then see that buffer's waiting.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return clocked.with_options(options), waited_s


class Recorded:
    """A model that remembers the training losses of its last `KEPT` steps, without the CPU having to wait for them."""

    add_weight: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept = self.add_weight(shape=(KEPT + 1,), initializer="zeros", trainable=False, name="kept")

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)  # type: ignore[misc]
        kept, steps = self._kept[:-1], self._kept[-1]
        kept = ops.where(ops.equal(ops.arange(KEPT, dtype="float32"), steps % KEPT), ops.cast(loss, "float32"), kept)
        # One variable with the losses: a counter of its own TensorFlow would count up for the batch that is not there,
        # at the end of the data.
        self._kept.assign(ops.concatenate((kept, ops.reshape((steps + 1) % CYCLE, (1,)))))
        return loss

    def losses_after(self, step: int) -> list[float]:
        """Return the losses of the steps from `step` on; there must not be more than `KEPT`."""
        if keras.backend.backend() == "jax":
            # During an epoch the state is in the training loop, and the model's own is out of date.
            self.jax_state_sync()  # type: ignore[attr-defined]
        kept = ops.convert_to_numpy(self._kept)
        steps = (int(kept[-1]) - step) % CYCLE
        return [float(kept[index % KEPT]) for index in range(step, step + steps)]


class RecordedDLRM(Recorded, DLRM):
    """A DLRM that remembers its losses."""


class RecordedHammock(Recorded, Hammock):
    """A Hammock that remembers its losses."""


class Curve(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes each step's end, data wait and loss, and ends the training after so many steps.

    Args:
        waited_s: the clock `timed` gave.
        batch_size: samples of a step.
        max_steps: steps after which training ends; -1 for no limit.

    Attributes:
        marks: the steps' ends and waits.
        losses: training loss of each step.
    """

    def __init__(self, waited_s: tf.Variable, batch_size: int, max_steps: int = -1) -> None:
        super().__init__()
        self.marks, self.losses = Marks(), list[float]()
        self._waited_s, self._batch_size, self._max_steps = waited_s, batch_size, max_steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch:
            self._mark()
        if self._max_steps == self.marks.steps + 1:
            self.model.stop_training = True
        if self.marks.steps % KEPT == 0:
            self._collect()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._collect()
        # Keras announces a batch before it knows whether there is one.
        if self.marks.steps < len(self.losses):
            self._mark()

    def _mark(self) -> None:
        self.marks.mark(time.perf_counter(), float(self._waited_s.numpy()), self._batch_size)

    def _collect(self) -> None:
        self.losses += self.model.losses_after(len(self.losses))
