"""The optimisers of Meta's trainer, in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adagrad", "optimizer_for"]


class Adagrad(torch.optim.Optimizer):
    """Adagrad for tables with sparse gradients, and row-wise Adagrad.

    s += g ** 2, w -= rate * g / (sqrt(s) + eps), element by element, as `torch.optim.Adagrad`. A row-wise group keeps
    one number per row instead, s += mean(g ** 2) (RWSAdagrad of facebookresearch/dlrm, optim/rwsadagrad.py). Of a
    sparse gradient only the rows in it are read and written, and no sparse tensor is made: torch warns of those.

    Args:
        groups: as for every torch optimiser; a group may say ``rowwise`` for itself.
        lr: learning rate.
        eps: added to the root.
        rowwise: of the groups that do not say it themselves.
    """

    def __init__(self, groups: Iterable[Any], lr: float = 0.01, eps: float = 1e-8, rowwise: bool = False) -> None:
        super().__init__(groups, {"lr": lr, "eps": eps, "rowwise": rowwise})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have a gradient; return what `closure`, called before, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._update(weights, weights.grad, group)
        return loss

    def _update(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if "sum" not in state:
            shape = weights.shape[:1] if group["rowwise"] else weights.shape
            state["sum"] = torch.zeros(shape, dtype=torch.float32, device=weights.device)
        if not group["rowwise"] and not gradient.is_sparse:
            state["sum"].addcmul_(gradient, gradient)
            weights.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])
            return
        rows: Any = slice(None)
        if gradient.is_sparse:
            # A row that was looked up twice is one row: the update is not linear.
            gradient = gradient.coalesce()
            rows, gradient = gradient.indices()[0], gradient.values()
        squares = gradient.square()
        added = squares.flatten(1).mean(dim=1) if group["rowwise"] else squares
        sums = state["sum"][rows] + added
        state["sum"][rows] = sums
        root = sums.sqrt().add_(group["eps"])
        if group["rowwise"]:
            root = root.view(-1, *(1,) * (gradient.dim() - 1))
        weights[rows] -= group["lr"] * gradient / root


def optimizer_for(
    name: str, tables: Iterable[Tensor], rest: Iterable[Tensor], learning_rate: float, eps: float
) -> torch.optim.Optimizer:
    """Return the optimiser of that name.

    Args:
        name: ``sgd``, ``adagrad`` or ``rowwise-adagrad``, which updates `rest` as ``adagrad`` does.
        tables: the embedding tables.
        rest: all other weights.
        learning_rate: of both.
        eps: of both kinds of Adagrad.
    """
    if name == "sgd":
        return torch.optim.SGD([*tables, *rest], learning_rate)
    groups: list[dict[str, Any]] = [
        {"params": list(tables), "rowwise": name == "rowwise-adagrad"},
        {"params": list(rest)},
    ]
    return Adagrad(groups, learning_rate, eps)
