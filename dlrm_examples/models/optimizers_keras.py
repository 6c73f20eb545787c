"""The optimisers of Meta's trainer, in Keras 3."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from dlrm_examples.models.schedule import LOWEST_RATE, Schedule

__all__ = ["Adagrad", "Rate", "optimizer_for"]


@keras.saving.register_keras_serializable(package="dlrm_examples")
class Rate(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """`schedule.Schedule` as a Keras schedule.

    Args:
        full: the learning rate that is asked for.
        warmup_steps, decay_start_step, decay_steps: as for `Schedule`.
    """

    def __init__(self, full: float, warmup_steps: int = 0, decay_start_step: int = 0, decay_steps: int = 0) -> None:
        super().__init__()
        self.full, self.schedule = full, Schedule(warmup_steps, decay_start_step, decay_steps)

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step, counted from 0."""
        schedule, count = self.schedule, ops.cast(step, "float32") + 1.0
        rate = ops.full_like(count, self.full * schedule.plateau)
        if schedule.decay_steps:
            decayed = ops.minimum(count - schedule.decay_start_step, schedule.decay_steps - 1.0)
            lower = ops.square((schedule.decay_steps - decayed) / schedule.decay_steps)
            rate = ops.where(count >= schedule.decay_start_step, ops.maximum(LOWEST_RATE, self.full * lower), rate)
        if schedule.warmup_steps:
            rate = ops.where(count < schedule.warmup_steps, self.full * count / schedule.warmup_steps, rate)
        return rate

    def get_config(self) -> dict[str, Any]:
        steps = ("warmup_steps", "decay_start_step", "decay_steps")
        return {"full": self.full, **{name: getattr(self.schedule, name) for name in steps}}


@keras.saving.register_keras_serializable(package="dlrm_examples")
class Adagrad(keras.optimizers.Adagrad):  # type: ignore[misc]
    """Adagrad as torch has it: epsilon is added to the root, and the sums of squares begin at 0.

    Keras's own takes each of several gradients of a row that TensorFlow reports for itself, and squares them before it
    adds them; here they are added first, and only the rows that were looked up are read and written.

    Args:
        learning_rate: a number or a schedule.
        epsilon: added to the root.
        options: as for `keras.optimizers.Adagrad`.
    """

    def __init__(self, learning_rate: Any = 0.01, epsilon: float = 1e-8, **options: Any) -> None:
        super().__init__(learning_rate, **{"initial_accumulator_value": 0.0, **options}, epsilon=epsilon)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        sums = self._accumulators[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        if hasattr(gradient, "indices") and keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            rows, group = tf.unique(gradient.indices)
            gradient = tf.math.unsorted_segment_sum(gradient.values, group, tf.size(rows))
            # Keras hands over its own variables, or TensorFlow's within them.
            weights, state = (v.value if isinstance(v, keras.Variable) else v for v in (variable, sums))
            state.scatter_add(tf.IndexedSlices(tf.square(gradient), rows))
            step = rate * gradient / (tf.sqrt(tf.gather(state, rows)) + self.epsilon)
            weights.scatter_sub(tf.IndexedSlices(step, rows))
            return
        self.assign_add(sums, ops.square(gradient))
        self.assign_sub(variable, rate * gradient / (ops.sqrt(sums) + self.epsilon))


def optimizer_for(name: str, learning_rate: float, eps: float, schedule: Schedule) -> Any:
    """Return the optimiser of that name.

    Args:
        name: ``sgd`` or ``adagrad``.
        learning_rate: the full one.
        eps: of Adagrad.
        schedule: of the learning rate.
    """
    rate: Any = learning_rate
    if not schedule.is_constant:
        rate = Rate(learning_rate, schedule.warmup_steps, schedule.decay_start_step, schedule.decay_steps)
    if name == "adagrad":
        return Adagrad(rate, eps)
    return keras.optimizers.SGD(rate)
