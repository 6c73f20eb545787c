"""One rank of a hybrid run under Keras on torch: data, model, `fit`, report."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import torch
from torch import distributed

from intune_callbacks.errors import ConfigError, MissingPackage
from recipes import outcome
from recipes.config import Config
from recipes.outcome import Outcome

# TensorFlow announces on stderr, at import, for which CPU it was built.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
try:
    import tensorflow as tf

    from dlrm_examples.hybrid.keras import HybridModel, share
except ImportError as error:
    raise MissingPackage(error.name or "keras", "dlrm-keras") from None

from dlrm_examples.criteo.pipeline_tf import STAGES, build
from dlrm_examples.models.metrics import evaluate
from intune_callbacks.keras import InTuneCallback
from recipes.keras_probe import Curve, timed

__all__ = ["train"]

TIMEOUT = datetime.timedelta(minutes=10)


class Recorded(HybridModel):
    """A `HybridModel` that remembers the losses of its steps, without the CPU having to wait for them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.__dict__["losses_seen"] = []

    def trained(self, loss: torch.Tensor) -> None:
        self.losses_seen.append(loss)

    def losses_after(self, step: int) -> list[float]:
        """Return the losses of the steps from `step` on."""
        return [float(loss) for loss in self.losses_seen[step:]]


def train(rank: int, config: Config, mode: str, mode_source: str) -> Outcome:
    """Train together with the other ranks; see `runner.train`.

    Returns:
        The losses are of the batches of all ranks; report and speed are this rank's.
    """
    # The GPUs are torch's; TensorFlow only reads.
    tf.config.set_visible_devices([], "GPU")
    on_gpu = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        return _train(rank, device, config, mode, mode_source)
    finally:
        distributed.destroy_process_group()


def _train(rank: int, device: torch.device, config: Config, mode: str, mode_source: str) -> Outcome:
    given, samples = config.trainer, config.batch_size // config.trainer.devices
    dataset, waited_s = timed(_dataset(rank, config, "train"))
    if dataset.cardinality() == 0:
        raise ConfigError([f"batch_size={config.batch_size}: the training rows do not fill one batch"])
    curve = Curve(waited_s, samples, given.max_steps)
    callback: InTuneCallback | None = None
    if mode != "off":
        callback = InTuneCallback(**outcome.callback_options(config, mode))
    model = Recorded(
        outcome.sizes(config),
        samples,
        given.learning_rate,
        outcome.schedule(config),
        device,
        optimizer=given.optimizer,
        eps=given.eps,
        seed=config.seed,
    )
    model.compile()
    model.fit(
        dataset,
        epochs=given.max_epochs,
        callbacks=[curve] if callback is None else [curve, callback],
        shuffle=False,
        verbose="auto" if sys.stderr.isatty() and rank == 0 else 0,
    )
    losses = torch.tensor(curve.losses, device=device)
    distributed.all_reduce(losses)
    threads = outcome.workers(config, STAGES[config.pipeline.style])
    steady = outcome.observed(curve.marks, threads)
    report = outcome.untuned(config, curve.marks, threads, steady) if callback is None else callback.report
    report |= {"mode_source": mode_source, **outcome.tested(_evaluate(model, device, _dataset(rank, config, "test")))}
    return Outcome(report, (losses / given.devices).tolist(), steady)


def _dataset(rank: int, config: Config, split: str) -> tf.data.Dataset:
    style = config.pipeline.style
    dataset = build(
        outcome.files(config),
        config.batch_size,
        style=style,
        workers=outcome.workers(config, STAGES[style]),
        sized=split == "train",
        **outcome.reading(config, split),
    )
    return share(dataset, rank, config.trainer.devices, config.batch_size)


@torch.no_grad()
def _evaluate(model: Recorded, device: torch.device, held_out: tf.data.Dataset) -> dict[str, float]:
    """Return what `metrics.evaluate` gives over the held-out rows of all ranks."""
    logits, labels = [], []
    for features, truth in held_out.as_numpy_iterator():
        inputs = {name: torch.from_numpy(value.copy()).to(device) for name, value in features.items()}
        logits.append(model(inputs, training=False).squeeze(1).cpu())
        labels.append(torch.from_numpy(truth.copy()))
    all_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_ranks, (torch.cat(logits), torch.cat(labels)))
    scores, truths = (torch.cat(parts) for parts in zip(*all_ranks, strict=True))
    return evaluate(truths.numpy(), scores.double().numpy())
