"""Meta's DLRM in torch.

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv 1906.00091;
layer by layer as in facebookresearch/dlrm, dlrm_s_pytorch.py (commit 090956ee). With cross layers in place of the dot
products it is MLPerf's DLRM-DCNv2 (torchrec/models/dlrm.py, DLRM_DCN).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm_examples.models.layers_torch import BagsOfIds, LowRankCross
from dlrm_examples.models.sizes import DLRMConfig

__all__ = ["DLRM", "DLRMConfig"]


class DLRM(nn.Module):
    """Embedding tables, a bottom MLP, the interaction, a top MLP; the output is the log-odds of a click.

    All tables lie one after the other in one `nn.Embedding`, so one lookup serves the whole batch; `table` gives a
    view of one of them.

    Args:
        config: the sizes.
        generator: source of the initial weights; torch's global one by default.
    """

    row_offsets: Tensor
    pairs: Tensor

    def __init__(self, config: DLRMConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        dim = config.embedding_dim
        first_rows = [0, *itertools.accumulate(config.table_rows)]
        # Left uninitialised here: Meta's own initialisation follows, and a normal one would double the time.
        self.embeddings = nn.Embedding(
            first_rows[-1], dim, sparse=config.sparse_gradients, _weight=torch.empty(first_rows[-1], dim)
        )
        self.bottom = _mlp(config.dense_features, config.bottom, last_relu=True)
        self.top = _mlp(config.interaction_width, config.top, last_relu=False)
        features = 1 + len(config.table_rows)
        row, column = torch.tril_indices(features, features, 0 if config.interact_itself else -1)
        self.register_buffer("row_offsets", torch.tensor(first_rows[:-1]), persistent=False)
        self.register_buffer("pairs", row * features + column, persistent=False)
        if config.interaction == "dcn":
            self.cross = LowRankCross(config.interaction_width, config.dcn_layers, config.dcn_low_rank)
        if config.bag_sizes is not None:
            self.bags = BagsOfIds(config.bag_sizes, config.table_rows)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights as Meta does (create_mlp and create_emb of dlrm_s_pytorch.py).

        Linear layers with m outputs and n inputs: weights N(0, 2 / (m + n)), biases N(0, 1 / m) (variances); tables
        of n rows: uniform in +-sqrt(1 / n). Cross layers: as TorchRec does.
        """
        for layer in (*self.bottom, *self.top):
            if isinstance(layer, nn.Linear):
                outputs, inputs = layer.weight.shape
                layer.weight.normal_(0.0, (2.0 / (outputs + inputs)) ** 0.5, generator=generator)
                layer.bias.normal_(0.0, (1.0 / outputs) ** 0.5, generator=generator)
        if self.config.interaction == "dcn":
            self.cross.reset_parameters(generator)
        for index, rows in enumerate(self.config.table_rows):
            bound = (1.0 / rows) ** 0.5
            self.table(index).uniform_(-bound, bound, generator=generator)

    def table(self, index: int) -> Tensor:
        """Return a view of one table: [rows, embedding_dim]."""
        return self.embeddings.weight.detach()[self._rows_of(index)]

    def table_gradient(self, index: int) -> Tensor:
        """Return the gradient of one table, dense: [rows, embedding_dim]; zeros before the first backward pass."""
        gradient = self.embeddings.weight.grad
        if gradient is None:
            return torch.zeros_like(self.table(index))
        return (gradient.to_dense() if gradient.is_sparse else gradient)[self._rows_of(index)]

    def _rows_of(self, index: int) -> slice:
        first = int(self.row_offsets[index])
        return slice(first, first + self.config.table_rows[index])

    def embed(self, categories: Tensor, bag_starts: Tensor | None = None) -> Tensor:
        """Look up all tables and sum each bag.

        Args:
            categories: without `bag_starts` one id per sample and table, [B, T] int32 or int64;
                with it the ids of all bags, table by table, [T, ids] int64.
            bag_starts: where each sample's bag begins within its table's ids, [T, B] int64.

        Returns:
            [B, T, embedding_dim].
        """
        if bag_starts is None:
            vectors: Tensor = self.embeddings(categories + self.row_offsets)
            return vectors
        tables, ids = categories.shape
        table_starts = torch.arange(tables, device=bag_starts.device).unsqueeze(1) * ids
        sums = functional.embedding_bag(
            (categories + self.row_offsets.unsqueeze(1)).flatten(),
            self.embeddings.weight,
            (bag_starts + table_starts).flatten(),
            mode="sum",
            sparse=self.config.sparse_gradients,
        )
        return sums.view(tables, -1, self.config.embedding_dim).transpose(0, 1)

    def embed_bags(self, ids: Tensor) -> Tensor:
        """Look up all tables and sum each bag.

        Args:
            ids: what `BagsOfIds` gives, [B, sum of bag_sizes].

        Returns:
            [B, T, embedding_dim].
        """
        samples, width = ids.shape
        starts = torch.arange(samples, device=ids.device).unsqueeze(1) * width + self.bags.starts[:-1]
        sums = functional.embedding_bag(
            (ids + self.row_offsets.index_select(0, self.bags.columns)).flatten(),
            self.embeddings.weight,
            starts.flatten(),
            mode="sum",
            sparse=self.config.sparse_gradients,
        )
        return sums.view(samples, -1, self.config.embedding_dim)

    def interact(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Return the top MLP's input.

        ``dot``: `dense` followed by the dot product of each pair of features, strict lower triangle row by row;
        ``dcn``: all features side by side, through the cross layers.

        Args:
            dense: output of the bottom MLP, [B, embedding_dim]: feature 0.
            embedded: one vector per table, [B, T, embedding_dim]: features 1 to T.
        """
        features = torch.cat((dense.unsqueeze(1), embedded), dim=1)
        if self.config.interaction == "dcn":
            crossed: Tensor = self.cross(features.flatten(1))
            return crossed
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return torch.cat((dense, products.index_select(1, self.pairs)), dim=1)

    def forward(self, dense: Tensor, categories: Tensor, bag_starts: Tensor | None = None) -> Tensor:
        """Return the log-odds of a click for each sample, [B] (their sigmoid is Meta's output).

        Args:
            dense: [B, dense_features] float32.
            categories: see `embed`; without `bag_starts` each id becomes a bag if the configuration has `bag_sizes`.
            bag_starts: see `embed`.
        """
        if bag_starts is None and self.config.bag_sizes is not None:
            embedded = self.embed_bags(self.bags(categories))
        else:
            embedded = self.embed(categories, bag_starts)
        logits: Tensor = self.top(self.interact(self.bottom(dense), embedded))
        return logits.squeeze(1)


def _mlp(inputs: int, widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(itertools.pairwise((inputs, *widths))):
        layers.append(nn.Linear(before, after))
        if last_relu or index < len(widths) - 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
