"""Hammock in Keras 3, on any of its backends; see hammock.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from dlrm_examples.models.hammock import FIRST_WEIGHTS, HammockConfig
from dlrm_examples.models.layers_keras import lookup

__all__ = ["Hammock"]


@keras.saving.register_keras_serializable(package="dlrm_examples")
class Hammock(keras.Model):  # type: ignore[misc]
    """Quantise, encode, two fully connected layers; the output is the log-odds of a click.

    The sum of the first layer's rows at the inputs that are 1 is the product of the one-hot vector with its weights.
    The first weights depend on the seed only, not on the backend.

    Args:
        config: the sizes.
        edges: what `hammock.quantiles` gave, [dense_features, buckets - 1]; saved with the model.
        seed: decides the initial weights.
        options: as for `keras.Model`, such as ``name``.
    """

    def __init__(self, config: HammockConfig, edges: npt.ArrayLike, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.config, self.seed, self.edges = config, seed, np.array(edges, np.float32)
        self._first_inputs = np.array(config.first_inputs, np.int64)
        random = np.random.default_rng(seed)
        shape = (config.first_inputs[-1], config.hidden)
        self.tables = self.add_weight(shape=shape, initializer="zeros", name="tables")
        self.tables.assign(random.standard_normal(shape, np.float32) * np.float32(FIRST_WEIGHTS))
        self.bias = self.add_weight(shape=shape[1:], initializer="zeros", name="bias")
        self.out = keras.layers.Dense(1)
        self.out.build((None, config.hidden))
        kernel = random.standard_normal((config.hidden, 1), np.float32) * (1.0 / config.hidden) ** 0.5
        self.out.set_weights([kernel, np.zeros(1, np.float32)])
        self.built = True

    def inputs_at_one(self, dense: Any, categories: Any) -> Any:
        """Return which of the one-hot inputs are 1, [B, dense_features + T]: one of each feature.

        Args:
            dense: [B, dense_features] float32.
            categories: [B, T] int32 or int64.
        """
        kind = "int32" if self._first_inputs[-1] < 2**31 else "int64"
        above = ops.expand_dims(dense, 2) >= ops.convert_to_tensor(self.edges)
        buckets = ops.sum(ops.cast(above, kind), axis=2)
        first = ops.convert_to_tensor(self._first_inputs[:-1], kind)
        return ops.concatenate((buckets, ops.cast(categories, kind)), axis=1) + first

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Return the log-odds of a click for each sample, [B, 1].

        Args:
            inputs: ``dense`` and ``categories``, as for `inputs_at_one`.
        """
        at_one = self.inputs_at_one(inputs["dense"], inputs["categories"])
        rows = lookup(self.tables, at_one, sparse_gradients=self.config.sparse_gradients)
        return self.out(ops.relu(ops.sum(rows, axis=1) + self.bias))

    def get_config(self) -> dict[str, Any]:
        return {"config": asdict(self.config), "edges": self.edges.tolist(), "seed": self.seed, "name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Hammock:
        sizes = {**config["config"], "table_rows": tuple(config["config"]["table_rows"])}
        return cls(HammockConfig(**sizes), config["edges"], seed=config["seed"], name=config["name"])
