"""Meta's DLRM in Keras 3, on any of its backends.

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv 1906.00091;
layer by layer as in facebookresearch/dlrm, dlrm_s_pytorch.py (commit 090956ee). With cross layers in place of the dot
products it is MLPerf's DLRM-DCNv2; see `layers_torch.LowRankCross` and `multihot`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from dlrm_examples.models.layers_keras import lookup
from dlrm_examples.models.multihot import MASK, bags_of, spread
from dlrm_examples.models.sizes import DLRMConfig

__all__ = ["DLRM"]


@keras.saving.register_keras_serializable(package="dlrm_examples")
class DLRM(keras.Model):  # type: ignore[misc]
    """Embedding tables, a bottom MLP, the interaction, a top MLP; the output is the log-odds of a click.

    All tables lie one after the other in one weight, so one lookup serves the whole batch; `table` gives a copy of one
    of them. The first weights depend on the seed only, not on the backend.

    Args:
        config: the sizes. Gradients of the tables are always sparse on TensorFlow and always dense on JAX; on torch
            `sparse_gradients` decides, and of Keras's optimisers SGD without momentum takes sparse ones there.
        seed: decides the initial weights.
        options: as for `keras.Model`, such as ``name``.
    """

    def __init__(self, config: DLRMConfig, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.config, self.seed = config, seed
        self.bottom = _mlp(config.dense_features, config.bottom, last_relu=True)
        self.top = _mlp(config.interaction_width, config.top, last_relu=False)
        self.tables = self.add_weight(
            shape=(sum(config.table_rows), config.embedding_dim), initializer="zeros", name="tables"
        )
        first_rows = [0, *itertools.accumulate(config.table_rows)]
        self._first_rows = np.array(first_rows, np.int64)
        features = 1 + len(config.table_rows)
        row, column = np.tril_indices(features, 0 if config.interact_itself else -1)
        self._pairs = (row * features + column).astype(np.int32)
        self.cross = _cross(config) if config.interaction == "dcn" else []
        # Bags of one where there are none: never looked at.
        self._bags = bags_of(config.bag_sizes or (1,) * len(config.table_rows), config.table_rows)
        self.built = True
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int) -> None:
        """Draw all weights as Meta does (create_mlp and create_emb of dlrm_s_pytorch.py).

        Dense layers with m outputs and n inputs: weights N(0, 2 / (m + n)), biases N(0, 1 / m) (variances); tables of
        n rows: uniform in +-sqrt(1 / n). Cross layers: weights N(0, 2 / (m + n)), biases 0, as TorchRec does.
        """
        random = np.random.default_rng(seed)
        for layer in (*self.bottom, *self.top):
            inputs, outputs = layer.kernel.shape
            kernel = random.standard_normal((inputs, outputs), np.float32) * (2.0 / (outputs + inputs)) ** 0.5
            layer.set_weights([kernel, random.standard_normal(outputs, np.float32) * (1.0 / outputs) ** 0.5])
        for layer in self.cross:
            inputs, outputs = layer.kernel.shape
            kernel = random.standard_normal((inputs, outputs), np.float32) * (2.0 / (outputs + inputs)) ** 0.5
            layer.set_weights([kernel, np.zeros(outputs, np.float32)][: len(layer.weights)])
        weights = random.random(self.tables.shape, np.float32)
        for index, rows in enumerate(self.config.table_rows):
            part = weights[self.rows_of(index)]
            part *= 2.0 * (1.0 / rows) ** 0.5
            part -= (1.0 / rows) ** 0.5
        self.tables.assign(weights)

    def rows_of(self, index: int) -> slice:
        """Return where one table lies in the weight `tables`."""
        return slice(int(self._first_rows[index]), int(self._first_rows[index + 1]))

    def table(self, index: int) -> npt.NDArray[np.float32]:
        """Return a copy of one table: [rows, embedding_dim]."""
        return np.array(ops.convert_to_numpy(self.tables)[self.rows_of(index)])

    def embed(self, categories: Any, bag_starts: Any = None) -> Any:
        """Look up all tables and sum each bag.

        Args:
            categories: without `bag_starts` one id per sample and table, [B, T] int32 or int64;
                with it the ids of all bags, table by table, [T, ids].
            bag_starts: where each sample's bag begins within its table's ids, [T, B].

        Returns:
            [B, T, embedding_dim].
        """
        kind = "int32" if self._first_rows[-1] < 2**31 else "int64"
        first_rows = ops.convert_to_tensor(self._first_rows[:-1], kind)
        categories = ops.cast(categories, kind)
        if bag_starts is None:
            return self._rows(categories + first_rows)
        tables, ids = categories.shape
        starts = ops.cast(bag_starts, "int32") + ops.expand_dims(ops.arange(tables, dtype="int32") * ids, 1)
        # The last bag that begins at or before an id is the id's: of several that begin there, the others are empty.
        bags = ops.searchsorted(ops.reshape(starts, (-1,)), ops.arange(tables * ids, dtype="int32"), side="right") - 1
        vectors = self._rows(ops.reshape(categories + ops.expand_dims(first_rows, 1), (-1,)))
        sums = ops.segment_sum(vectors, bags, num_segments=tables * bag_starts.shape[1])
        return ops.transpose(ops.reshape(sums, (tables, -1, self.config.embedding_dim)), (1, 0, 2))

    def expand(self, categories: Any) -> Any:
        """Return the ids of all bags side by side, [B, sum of bag_sizes], from one id per table, [B, T]."""
        bags = self._bags
        # JAX has no 64-bit integers unless asked; its products of 32 bits are modulo 2^32 as they are.
        kind = "uint32" if keras.backend.backend() == "jax" else "int64"

        def number(value: Any) -> Any:
            return ops.convert_to_tensor(np.array(value).astype(kind))

        ids = ops.cast(ops.take(categories, bags.columns.astype(np.int32), axis=1), kind)
        mixed = (ids * number(bags.multipliers) + number(bags.addends)) & number(MASK)
        return ops.where(bags.first, ids, spread(mixed, ops.right_shift, number) % number(bags.rows))

    def embed_bags(self, ids: Any) -> Any:
        """Look up all tables and sum each bag: [B, T, embedding_dim].

        Args:
            ids: what `expand` returns.
        """
        kind = "int32" if self._first_rows[-1] < 2**31 else "int64"
        first_rows = ops.convert_to_tensor(self._first_rows[:-1][self._bags.columns], kind)
        vectors = self._rows(ops.cast(ids, kind) + first_rows)
        sums = [ops.sum(vectors[:, a:b], axis=1) for a, b in itertools.pairwise(self._bags.starts.tolist())]
        return ops.stack(sums, axis=1)

    def _rows(self, rows: Any) -> Any:
        return lookup(self.tables, rows, sparse_gradients=self.config.sparse_gradients)

    def interact(self, dense: Any, embedded: Any) -> Any:
        """Return the top MLP's input.

        ``dot``: `dense` followed by the dot product of each pair of features, strict lower triangle row by row;
        ``dcn``: all features side by side, through the cross layers.

        Args:
            dense: output of the bottom MLP, [B, embedding_dim]: feature 0.
            embedded: one vector per table, [B, T, embedding_dim]: features 1 to T.
        """
        features = ops.concatenate((ops.expand_dims(dense, 1), embedded), axis=1)
        if self.cross:
            first = last = ops.reshape(features, (-1, self.config.interaction_width))
            for down, up in zip(self.cross[::2], self.cross[1::2], strict=True):
                last = first * up(down(last)) + last
            return last
        products = ops.matmul(features, ops.transpose(features, (0, 2, 1)))
        flat = ops.reshape(products, (-1, features.shape[1] ** 2))
        return ops.concatenate((dense, ops.take(flat, self._pairs, axis=1)), axis=1)

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Return the log-odds of a click for each sample, [B, 1] (their sigmoid is Meta's output).

        Args:
            inputs: ``dense`` [B, dense_features] float32 and ``categories``; for bags also ``bag_starts``; see `embed`.
                Without it each id becomes a bag if the configuration has `bag_sizes`.
        """
        dense = inputs["dense"]
        for layer in self.bottom:
            dense = layer(dense)
        categories, bag_starts = inputs["categories"], inputs.get("bag_starts")
        if bag_starts is None and self.config.bag_sizes is not None:
            embedded = self.embed_bags(self.expand(categories))
        else:
            embedded = self.embed(categories, bag_starts)
        logits = self.interact(dense, embedded)
        for layer in self.top:
            logits = layer(logits)
        return logits

    def get_config(self) -> dict[str, Any]:
        return {"config": asdict(self.config), "seed": self.seed, "name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> DLRM:
        sizes: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in config["config"].items()
        }
        return cls(DLRMConfig(**sizes), seed=config["seed"], name=config["name"])


def _mlp(inputs: int, widths: Sequence[int], *, last_relu: bool) -> list[Any]:
    layers = []
    for index, (before, after) in enumerate(itertools.pairwise((inputs, *widths))):
        relu = last_relu or index < len(widths) - 1
        layers.append(keras.layers.Dense(after, activation="relu" if relu else None))
        layers[-1].build((None, before))
    return layers


def _cross(config: DLRMConfig) -> list[Any]:
    """Return the cross layers: each two layers, the first without a bias."""
    layers = []
    for index in range(2 * config.dcn_layers):
        widths = (config.interaction_width, config.dcn_low_rank)
        before, after = widths if index % 2 == 0 else widths[::-1]
        layers.append(keras.layers.Dense(after, use_bias=index % 2 == 1))
        layers[-1].build((None, before))
    return layers
