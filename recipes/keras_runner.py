"""Train one configuration under Keras: data, model, `fit`, report."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import replace

import numpy as np

from intune_callbacks.errors import ConfigError, MissingPackage
from recipes import outcome
from recipes.config import Config
from recipes.outcome import Outcome
from recipes.room import check_room

# TensorFlow announces on stderr, at import, for which CPU it was built.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
try:
    import keras
    import tensorflow as tf
except ImportError as error:
    raise MissingPackage(error.name or "keras", "dlrm-keras") from None

from dlrm_examples.criteo.pipeline_tf import STAGES, build
from dlrm_examples.criteo.stages_tf import Skipped
from dlrm_examples.models.metrics import evaluate
from dlrm_examples.models.optimizers_keras import optimizer_for
from intune_callbacks.keras import InTuneCallback
from recipes.keras_probe import Curve, Recorded, timed

__all__ = ["train"]

log = logging.getLogger(__name__)


def train(config: Config, mode: str, mode_source: str) -> Outcome:
    """Train one model; see `runner.train`."""
    check_room(config)
    history = config.run_dir / "history.jsonl"
    history.unlink(missing_ok=True)
    _cpu_threads(config.trainer.cpu_threads)
    skipped = Skipped()
    dataset, waited_s = timed(_dataset(config, "train", skipped if config.pipeline.style == "blocks" else None))
    if dataset.cardinality() == 0:
        raise ConfigError([f"batch_size={config.batch_size}: the training rows do not fill one batch"])
    curve = Curve(waited_s, config.batch_size, config.trainer.max_steps)
    callback: InTuneCallback | None = None
    if mode != "off":
        callback = InTuneCallback(**outcome.callback_options(config, mode))
    trainer = config.trainer
    # On torch, of Keras's optimisers SGD alone takes sparse gradients.
    model = Recorded(replace(outcome.sizes(config), sparse_gradients=trainer.optimizer == "sgd"), seed=config.seed)
    optimizer = optimizer_for(trainer.optimizer, trainer.learning_rate, trainer.eps, outcome.schedule(config))
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    with warnings.catch_warnings():
        # Where rows may be left out nobody knows the length of an epoch; Keras warns at its end.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model.fit(
            dataset,
            epochs=config.trainer.max_epochs,
            callbacks=[curve] if callback is None else [curve, callback],
            shuffle=False,
            verbose="auto" if sys.stderr.isatty() else 0,
        )
    skipped_rows = skipped.rows
    threads = outcome.workers(config, STAGES[config.pipeline.style])
    steady = outcome.observed(curve.marks, threads)
    report = outcome.untuned(config, curve.marks, threads, steady) if callback is None else callback.report
    report |= {"mode_source": mode_source, **outcome.tested(_evaluate(model, _dataset(config, "test")))}
    return Outcome(report | {"skipped_rows": skipped_rows}, curve.losses, steady)


def _dataset(config: Config, split: str, skipped: Skipped | None = None) -> tf.data.Dataset:
    style = config.pipeline.style
    return build(
        outcome.files(config),
        config.batch_size,
        style=style,
        workers=outcome.workers(config, STAGES[style]),
        on_bad_row=config.pipeline.on_bad_row,
        sized=split == "train",
        skipped=skipped,
        **outcome.reading(config, split),
    )


def _evaluate(model: Recorded, held_out: tf.data.Dataset) -> dict[str, float]:
    """Return what `metrics.evaluate` gives over all held-out rows."""
    logits, labels = [], []
    for features, truth in held_out.as_numpy_iterator():
        logits.append(model.predict_on_batch(features)[:, 0])
        labels.append(truth)
    return evaluate(np.concatenate(labels), np.concatenate(logits))


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
