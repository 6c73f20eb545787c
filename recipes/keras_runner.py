"""Fit and test under Keras, on any backend."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from intune_callbacks.errors import BuildFailed, MissingPackage

from .data import SAMPLE_ROWS, reading
from .results import Fitted
from .schema import Config

try:
    import keras
    import tensorflow as tf
except ImportError as error:
    raise MissingPackage(error.name or "keras", "dlrm-keras") from None

from dlrm_examples.criteo.pipeline_tf import STAGES, Skipped, build
from dlrm_examples.models.hammock import quantiles
from dlrm_examples.models.metrics import evaluate
from dlrm_examples.models.optimizers_keras import optimizer_for
from intune_callbacks.keras import InTuneCallback
from intune_callbacks.pipelines.tf import build as tf_build

from .stopwatch_keras import Curve, RecordedDLRM, RecordedHammock, timed

__all__ = ["InTuneCallback", "fit", "fit_model", "predicted"]

log = logging.getLogger(__name__)


def fit(config: Config, rank: int, callback: InTuneCallback | None) -> Fitted:
    """Train one model and test it on the held-out rows.

    Args:
        config: what to train.
        rank: this process among those that train together; there is one only.
        callback: the tuner, if there is one.
    """
    _cpu_threads(config.trainer.cpu_threads)
    given, style, skipped = config.trainer, config.pipeline.style, Skipped()
    train, test = (reading(config, split, STAGES[style]) for split in ("train", "test"))
    rows = build(train, style=style, skipped=skipped if style == "blocks" else None, sized=True)
    # On torch, of Keras's optimisers SGD alone takes sparse gradients.
    sparse = given.optimizer == "sgd"
    if config.model.network == "hammock":
        edges = quantiles(train.sample(SAMPLE_ROWS).dense, config.model.buckets)
        model: Any = RecordedHammock(replace(config.model.hammock, sparse_gradients=sparse), edges, seed=config.seed)
    else:
        model = RecordedDLRM(replace(config.model.sizes, sparse_gradients=sparse), seed=config.seed)
    optimizer = optimizer_for(given.optimizer, given.learning_rate, given.eps, given.schedule)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    curve = fit_model(model, rows, config, rank, callback)
    skipped_rows = skipped.rows
    held_out = build(test, style=style)
    figures = evaluate(*predicted(held_out, lambda features: model.predict_on_batch(features)[:, 0]))
    return Fitted(curve.marks, curve.losses, figures, train.workers, skipped_rows)


def fit_model(model: Any, rows: tf.data.Dataset, config: Config, rank: int, callback: InTuneCallback | None) -> Curve:
    """Train a compiled model, by the clock, and return its curve.

    Args:
        model: it has `losses_after`.
        rows: this rank's batches.
        config, rank, callback: as for `fit`.
    """
    if callback is not None:
        with suppress(BuildFailed):  # the report says what is missing
            tf_build.build()  # ahead: a recipe is to show what tuning brings, also in its first epoch
    clocked, waited_s = timed(rows)
    curve = Curve(waited_s, config.batch_size // config.trainer.devices, config.trainer.max_steps)
    with warnings.catch_warnings():
        # Where rows may be left out nobody knows the length of an epoch; Keras warns at its end.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model.fit(
            clocked,
            epochs=config.trainer.max_epochs,
            callbacks=[curve] if callback is None else [curve, callback],
            shuffle=False,
            verbose="auto" if sys.stderr.isatty() and rank == 0 else 0,
        )
    return curve


def predicted(
    held_out: tf.data.Dataset, predict: Callable[[Mapping[str, npt.NDArray[Any]]], npt.NDArray[Any]]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the labels [n] and the log-odds [n] of all held-out rows.

    Args:
        held_out: batches of (features, labels).
        predict: features -> log-odds [B].
    """
    labels, logits = [], []
    for features, truth in held_out.as_numpy_iterator():
        logits.append(predict(features))
        labels.append(truth)
    return np.concatenate(labels), np.concatenate(logits)


def _cpu_threads(number: int | None) -> None:
    if number is None:
        return
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(number)
    elif keras.backend.backend() == "tensorflow" and tf.config.threading.get_intra_op_parallelism_threads() != number:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(number)
        except RuntimeError:
            log.warning("trainer.cpu_threads=%d: TensorFlow is in use already, and keeps its number", number)
