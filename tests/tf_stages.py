"""Small datasets with our operations in them, for the tests of those operations."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf
from busy_machine import slept
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.util import structure

from intune_callbacks.pipelines.tf import native as tf_native

CALL_S = 0.01


class Calls:
    """A map function that sleeps, how many of it run at once, and how long they slept (`spent_s2`: the squares)."""

    def __init__(self, seconds: float = CALL_S) -> None:
        self.seconds, self.now, self.most, self.lock = seconds, 0, 0, threading.Lock()
        self.spent_s = self.spent_s2 = 0.0

    def __call__(self, number: Any) -> Any:
        result = tf.numpy_function(self.body, [number], tf.int64)
        result.set_shape(number.shape)
        return result

    def body(self, number: Any) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        spent_s = slept(self.seconds)
        with self.lock:
            self.now -= 1
            self.spent_s += spent_s
            self.spent_s2 += spent_s**2
        return number

    def most_during(self, work: Callable[[], object]) -> int:
        """The most calls at once while `work` runs."""
        with self.lock:
            self.most = self.now
        work()
        return self.most


def flat(dataset: Any) -> tuple[Any, Any]:
    spec = dataset.element_spec
    return structure.get_flat_tensor_types(spec), structure.get_flat_tensor_shapes(spec)


def staged(native: tf_native.Native, dataset: Any, key: str, name: str, **more: Any) -> Any:
    types, shapes = flat(dataset)
    given = {"pipeline": key, "stage": name, "output_types": types, "output_shapes": shapes} | more
    variant = native.ops.intune_stage(dataset._variant_tensor, **given)
    return dataset_ops._VariantDataset(variant, dataset.element_spec)


def ended(native: tf_native.Native, dataset: Any, key: str) -> Any:
    """The dataset with a sink, and nothing that tf.data would put outside of it."""
    types, shapes = flat(dataset)
    given = {"pipeline": key, "output_types": types, "output_shapes": shapes}
    variant = native.ops.intune_sink(dataset._variant_tensor, **given)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset_ops._VariantDataset(variant, dataset.element_spec).with_options(options)


def numbers(dataset: Any) -> list[Any]:
    return [element.numpy().tolist() for element in dataset]


def take(iterator: Any, count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]
