"""Fit and test as one of several ranks under Keras on torch, the tables divided among them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from intune_callbacks.errors import MissingPackage

try:
    import tensorflow as tf

    from dlrm_examples.hybrid.keras import HybridModel, share
except ImportError as error:
    raise MissingPackage(error.name or "keras", "dlrm-keras") from None

from dlrm_examples.criteo.pipeline_tf import STAGES, build
from dlrm_examples.models.metrics import evaluate
from intune_callbacks.keras import InTuneCallback

from .data import reading
from .keras_runner import fit_model, predicted
from .results import Fitted
from .schema import Config

__all__ = ["InTuneCallback", "fit"]

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


def fit(config: Config, rank: int, callback: InTuneCallback | None) -> Fitted:
    """Train together with the other ranks and test on the held-out rows; the arguments are those of `keras_runner`."""
    # The GPUs are torch's; TensorFlow only reads.
    tf.config.set_visible_devices([], "GPU")
    on_gpu = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        return _fit(config, rank, device, callback)
    finally:
        distributed.destroy_process_group()


def _fit(config: Config, rank: int, device: torch.device, callback: InTuneCallback | None) -> Fitted:
    given, style = config.trainer, config.pipeline.style
    train, test = (reading(config, split, STAGES[style]) for split in ("train", "test"))
    rows, held_out = (
        share(build(asked, style=style, sized=asked is train), rank, given.devices, config.batch_size)
        for asked in (train, test)
    )
    model = Recorded(
        config.model.sizes,
        config.batch_size // given.devices,
        given.learning_rate,
        given.schedule,
        device,
        optimizer=given.optimizer,
        eps=given.eps,
        seed=config.seed,
    )
    model.compile()
    curve = fit_model(model, rows, config, rank, callback)
    losses = torch.tensor(curve.losses, device=device)
    distributed.all_reduce(losses)

    def predict(features: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        inputs = {name: torch.from_numpy(value.copy()).to(device) for name, value in features.items()}
        logits: npt.NDArray[Any] = model(inputs, training=False).squeeze(1).cpu().numpy()
        return logits

    with torch.no_grad():
        own = predicted(held_out, predict)
    all_ranks: list[Any] = [None] * given.devices
    distributed.all_gather_object(all_ranks, own)
    figures = evaluate(*(np.concatenate(parts) for parts in zip(*all_ranks, strict=True)))
    return Fitted(curve.marks, (losses / given.devices).tolist(), figures, train.workers)
