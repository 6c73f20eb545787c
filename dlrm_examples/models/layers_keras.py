"""What the models in Keras share."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

__all__ = ["lookup"]


def lookup(tables: Any, rows: Any, *, sparse_gradients: bool) -> Any:
    """Return rows of a weight, [..., width].

    Args:
        tables: the weight, [n, width].
        rows: which, [...] of whole numbers.
        sparse_gradients: whether its gradient is sparse on torch; on TensorFlow it always is, on JAX never.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # `ops.take` reads the whole variable first, and copies it, for the sparse update wants it for itself.
        return tf.gather(tables.value, rows)
    if keras.backend.backend() == "torch" and sparse_gradients:
        import torch

        return torch.nn.functional.embedding(rows, tables.value, sparse=True)
    return ops.take(tables, rows, axis=0)
