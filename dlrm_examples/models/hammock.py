"""Hammock, whatever framework it is written in: two fully connected layers over quantised, one-hot encoded inputs.

Saberian, Delgado, Raimond: Gradient Boosted Decision Tree Neural Network, arXiv 1910.09340. After its abstract: numbers
are cut at quantiles of the training rows, each input is one-hot encoded, two fully connected layers follow. Criteo's
categories are one-hot as they are, by their rows in the tables. What the abstract does not say is chosen here: how many
buckets, how wide the hidden layer is, its ReLU, the first weights, the loss (of a click, as for the DLRM).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.tsv import DENSE, KAGGLE_TABLE_ROWS
from intune_callbacks.config import number_problem
from intune_callbacks.errors import ConfigError

__all__ = ["FIRST_WEIGHTS", "HammockConfig", "quantiles"]

FIRST_WEIGHTS = 0.01
"""Standard deviation of the first layer's weights at the start; .001 gave the same AUC."""


@dataclass(frozen=True, slots=True)
class HammockConfig:
    """The sizes of a Hammock.

    Args:
        table_rows: distinct values of each category, after the modulus.
        buckets: values each number is cut into.
        hidden: width of the layer between the two.
        dense_features: how many numbers there are.
        sparse_gradients: give the first layer sparse gradients (needs an optimiser that takes them).

    Raises:
        ConfigError: with all problems at once.
    """

    table_rows: tuple[int, ...] = KAGGLE_TABLE_ROWS
    buckets: int = 32
    hidden: int = 32
    dense_features: int = DENSE
    sparse_gradients: bool = True

    def __post_init__(self) -> None:
        problems = [
            *number_problem("buckets", self.buckets, 2, 1 << 16),
            *number_problem("hidden", self.hidden, 1, 1 << 16),
        ]
        problems += number_problem("dense_features", self.dense_features, 1, 1 << 16)
        for rows in self.table_rows:
            problems += number_problem("table_rows", rows, 1, (1 << 31) - 1)
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))

    @property
    def first_inputs(self) -> tuple[int, ...]:
        """Where each feature's one-hot inputs begin, the numbers' first; behind them, how many inputs there are."""
        sizes = (*(self.buckets,) * self.dense_features, *self.table_rows)
        return (0, *itertools.accumulate(sizes))


def quantiles(dense: npt.NDArray[np.float32], buckets: int) -> npt.NDArray[np.float32]:
    """Return the edges that cut each feature into buckets of equally many rows, [features, buckets - 1], ascending.

    A value belongs to the bucket behind all edges that are not larger. Where one value is frequent edges are equal, and
    the buckets between them stay empty.

    Args:
        dense: a sample of the training rows, [n, features].
        buckets: how many.
    """
    edges = np.quantile(dense, np.arange(1, buckets) / buckets, axis=0)
    return np.ascontiguousarray(edges.T, np.float32)
