"""Hammock in torch; see hammock.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_examples.models.hammock import FIRST_WEIGHTS, HammockConfig

__all__ = ["Hammock"]


class Hammock(nn.Module):
    """Quantise, encode, two fully connected layers; the output is the log-odds of a click.

    The sum of the first layer's rows at the inputs that are 1 is the product of the one-hot vector with its weights.

    Args:
        config: the sizes.
        edges: what `hammock.quantiles` gave, [dense_features, buckets - 1]; saved with the weights.
        generator: source of the initial weights; torch's global one by default.
    """

    edges: Tensor
    first_inputs: Tensor

    def __init__(
        self, config: HammockConfig, edges: npt.NDArray[np.float32], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.config = config
        first = config.first_inputs
        self.embeddings = nn.EmbeddingBag(
            first[-1],
            config.hidden,
            mode="sum",
            sparse=config.sparse_gradients,
            _weight=torch.empty(first[-1], config.hidden).normal_(0.0, FIRST_WEIGHTS, generator=generator),
        )
        self.bias = nn.Parameter(torch.zeros(config.hidden))
        self.out = nn.Linear(config.hidden, 1)
        with torch.no_grad():
            self.out.weight.normal_(0.0, (1.0 / config.hidden) ** 0.5, generator=generator)
            self.out.bias.zero_()
        self.register_buffer("edges", torch.from_numpy(np.array(edges, np.float32)))
        self.register_buffer("first_inputs", torch.tensor(first[:-1]), persistent=False)

    def inputs(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return which of the one-hot inputs are 1, [B, dense_features + T] int64: one of each feature.

        Args:
            dense: [B, dense_features] float32.
            categories: [B, T] int32 or int64.
        """
        buckets = torch.searchsorted(self.edges, dense.T.contiguous(), right=True)
        return torch.cat((buckets.T, categories.long()), dim=1) + self.first_inputs

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return the log-odds of a click for each sample, [B].

        Args:
            dense: [B, dense_features] float32.
            categories: [B, T] int32 or int64.
        """
        hidden = functional.relu(self.embeddings(self.inputs(dense, categories)) + self.bias)
        logits: Tensor = self.out(hidden)
        return logits.squeeze(1)
