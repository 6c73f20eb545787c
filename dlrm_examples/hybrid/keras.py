"""Hybrid parallelism under Keras 3 on its torch backend: `Model.fit` around the same divided model.

Every rank is a process with a process group, as `ranks.run_ranks` or torchrun starts them:

    model = HybridModel(DLRMConfig(), batch_size=64)
    model.compile()
    model.fit(share(dataset, rank, world, batch_size=128))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_examples.hybrid.checkpoint import load, save
from dlrm_examples.hybrid.model import build, set_rate
from dlrm_examples.models.dlrm_torch import DLRMConfig
from dlrm_examples.models.schedule import Schedule
from intune_callbacks.errors import ConfigError

__all__ = ["HybridModel", "share"]


class HybridModel(keras.Model):  # type: ignore[misc]
    """A divided DLRM with its own optimiser, trained on the binary cross-entropy.

    Keras sees no variables in it: `compile` gets no optimiser and no loss, and `save` and `save_weights` keep nothing;
    `save_shards` does.

    Args:
        config: the sizes.
        batch_size: samples of one rank's batch.
        learning_rate: of tables and MLPs.
        schedule: of the learning rate; constant by default.
        device: of this rank; the CPU by default.
        options: ``optimizer``, ``eps``, ``seed`` and ``sharding``, as for `model.build`.

    Raises:
        ConfigError: Keras runs on another backend than torch, or there is no process group.
    """

    def __init__(
        self,
        config: DLRMConfig,
        batch_size: int,
        learning_rate: float = 0.1,
        schedule: Schedule | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        if keras.backend.backend() != "torch":
            raise ConfigError(
                [f"KERAS_BACKEND={keras.backend.backend()}: expected torch, which TorchRec is written in"]
            )
        super().__init__()
        parallel, optimizer = build(
            config, batch_size=batch_size, learning_rate=learning_rate, device=device, **options
        )
        # Past Keras's own attributes, which would wrap the model in a layer and move it.
        object.__setattr__(self, "_divided", (parallel, optimizer))
        self.learning_rate, self.schedule = learning_rate, schedule or Schedule()
        self.steps = 0
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def parallel(self) -> Any:
        """The divided model."""
        return self._divided[0]

    @property
    def metrics(self) -> list[Any]:
        return [self.mean_loss]

    def call(self, inputs: Mapping[str, Tensor], training: bool | None = None) -> Tensor:
        """Return the log-odds of a click for each sample, [B, 1].

        Args:
            inputs: ``dense`` [B, dense_features] float32 and ``categories`` [B, T] int32.
            training: not looked at.
        """
        logits: Tensor = self.parallel(inputs["dense"], inputs["categories"]).unsqueeze(1)
        return logits

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, labels = data
        parallel, optimizer = self._divided
        set_rate(parallel, optimizer, self.schedule.rate(self.steps, self.learning_rate))
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(self(inputs, training=True).squeeze(1), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        self.steps += 1
        self.trained(loss.detach())
        self.mean_loss.update_state(loss.detach())
        return {"loss": self.mean_loss.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        inputs, labels = data
        logits = self(inputs, training=False).squeeze(1)
        if len(labels):
            loss = functional.binary_cross_entropy_with_logits(logits, labels)
            self.mean_loss.update_state(loss, sample_weight=len(labels))
        return {"loss": self.mean_loss.result()}

    def trained(self, loss: Tensor) -> None:
        """Called with the loss of each step on this rank's samples; does nothing.

        Args:
            loss: a scalar, on the device.
        """

    def save_shards(self, path: str | os.PathLike[str]) -> None:
        """Write weights, optimiser and number of steps; every rank must call this. See `checkpoint.save`."""
        save(path, self._state(), {"steps": self.steps})

    def load_shards(self, path: str | os.PathLike[str]) -> None:
        """Read what `save_shards` wrote, by as many ranks or another number; every rank must call this."""
        state = self._state()
        rest = load(path, state)
        parallel, optimizer = self._divided
        parallel.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.steps = rest["steps"]

    def _state(self) -> dict[str, Any]:
        parallel, optimizer = self._divided
        return {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}


def share(dataset: Any, rank: int, world: int, batch_size: int) -> Any:
    """Return a rank's rows of every batch of a `tf.data.Dataset` that gives the batches of all ranks.

    Of a smaller last batch a rank may get no row, but every rank gets equally many batches.

    Args:
        dataset: of ({name: [B, ...]}, labels [B]), the same on all ranks.
        rank: from 0.
        world: how many ranks there are.
        batch_size: B.

    Raises:
        ConfigError: a batch cannot be shared equally.
    """
    if batch_size % world:
        raise ConfigError(
            [f"batch_size={batch_size}: expected a multiple of world={world}; all ranks get equally many rows"]
        )
    rows = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
    return dataset.map(lambda features, labels: ({name: value[rows] for name, value in features.items()}, labels[rows]))
