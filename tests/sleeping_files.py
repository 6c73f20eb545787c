"""A tf.data pipeline whose reads sleep, in C++."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

MANY = 10**6


def sleeping_files(files: int, cycle: int, workers: int) -> Any:
    """Files of a long interleave whose reads sleep in C++; with 16 of them all are open after a moment."""

    def read(number):
        return tf.data.Dataset.range(MANY // files).apply(testing.sleep(5000))

    return tf.data.Dataset.range(files).interleave(read, cycle_length=cycle, num_parallel_calls=workers)
