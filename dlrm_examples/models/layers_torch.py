"""What DLRM-DCNv2 has besides the parts of a DLRM, in torch: low-rank cross layers, and bags of ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm_examples.models.multihot import MASK, bags_of, spread

__all__ = ["BagsOfIds", "LowRankCross"]


class LowRankCross(nn.Module):
    """x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l, with * element by element.

    Wang et al.: DCN V2, arXiv 2008.13535, equations 1 and 2; as LowRankCrossNet of torchrec/modules/crossnet.py.

    Args:
        width: of x.
        layers: how many there are.
        rank: rows of each V.
    """

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw each V and W as TorchRec does: from N(0, 2 / (inputs + outputs)) (variance); biases are 0."""
        for layer in itertools.chain.from_iterable(zip(self.down, self.up, strict=True)):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_normal_(layer.weight, generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()

    def forward(self, first: Tensor) -> Tensor:
        """Return the last x, [B, width], from the first one, [B, width]."""
        last = first
        for down, up in zip(self.down, self.up, strict=True):
            last = first * up(down(last)) + last
        return last


class BagsOfIds(nn.Module):
    """Makes one id per table several; see `multihot`. It has no weights.

    Args:
        bag_sizes: ids per table.
        table_rows: rows of each table.
    """

    starts: Tensor
    columns: Tensor
    first: Tensor
    multipliers: Tensor
    addends: Tensor
    rows: Tensor

    def __init__(self, bag_sizes: Sequence[int], table_rows: Sequence[int]) -> None:
        super().__init__()
        bags = bags_of(bag_sizes, table_rows)
        for name in ("starts", "columns", "first", "multipliers", "addends", "rows"):
            self.register_buffer(name, torch.from_numpy(getattr(bags, name)), persistent=False)

    def forward(self, categories: Tensor) -> Tensor:
        """Return the ids of all bags side by side, [B, sum of bag_sizes] int64.

        Args:
            categories: one id per sample and table, [B, T] int32 or int64.
        """
        ids = categories.long().index_select(1, self.columns)
        further = spread((ids * self.multipliers + self.addends) & MASK) % self.rows
        return torch.where(self.first, ids, further)
