"""Kinds of cheap input, which have nothing to gain from a tuner, in four ways to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

__all__ = ["COLUMNS", "KINDS", "Kind", "kind_named"]

COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of input.

    Args:
        name: in the rows.
        framework: ``lightning``, ``keras``, ``plain`` (a loop of one's own) or ``transformers``.
        data: makes the input for so many batches, anew for each fit.
        batch: samples per batch.
        model_s: seconds a step of the model sleeps, or takes about (Keras).
    """

    name: str
    framework: str
    data: Callable[[int, int], Any]
    batch: int
    model_s: float


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


TORCH_KINDS = (
    Kind("tensors 32, 0 workers, .2 ms", "lightning", _tensors, 32, 0.0002),
    Kind("tensors 256, 0 workers, .2 ms", "lightning", _tensors, 256, 0.0002),
    Kind("tensors 32, 2 workers, .2 ms", "lightning", partial(_tensors, workers=2), 32, 0.0002),
    Kind("tensors 128, 0 workers, 2 ms", "lightning", _tensors, 128, 0.002),
    Kind("tensors 256, 2 workers, 20 ms", "lightning", partial(_tensors, workers=2), 256, 0.02),
    Kind("presliced, 0 workers, .2 ms", "lightning", _presliced, 32, 0.0002),
    Kind("presliced, 2 workers, 2 ms", "lightning", partial(_presliced, workers=2), 32, 0.002),
)
KINDS = (
    *TORCH_KINDS,
    Kind("tf.data cached, 32", "keras", partial(_slices, cached=True), 32, 0.0002),
    Kind("tf.data slices, 32", "keras", _slices, 32, 0.0002),
    Kind("tf.data slices, 256, 2 ms", "keras", _slices, 256, 0.002),
    Kind("numpy arrays, 32", "keras", _arrays, 32, 0.0002),
    Kind("torch loader 64, 0 workers", "keras", _tensors, 64, 0.0002),
    *(
        replace(kind, name=f"{framework}: {kind.name}", framework=framework)
        for framework in ("plain", "transformers")
        for kind in TORCH_KINDS
    ),
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
