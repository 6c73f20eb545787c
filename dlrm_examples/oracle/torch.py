"""The torch model's side of `check_oracle`: outputs, gradients and one SGD step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dlrm_examples.models.dlrm_torch import DLRM
from dlrm_examples.oracle.file import Array, Oracle

__all__ = ["run"]


def run(oracle: Oracle) -> dict[str, Array]:
    """Push the batch through `dlrm_torch.DLRM`; return everything named by `Oracle.expected`."""
    model = DLRM(oracle.sizes)
    layers = {
        f"{part}.{index}": layer
        for part, mlp in (("bot", model.bottom), ("top", model.top))
        for index, layer in enumerate(module for module in mlp if isinstance(module, torch.nn.Linear))
    }
    parameters = {f"{name}.w": layer.weight for name, layer in layers.items()}
    parameters |= {f"{name}.b": layer.bias for name, layer in layers.items()}
    tables = {f"emb.{table}": table for table in range(len(oracle.table_rows))}
    given = {name: torch.from_numpy(np.array(oracle.arrays[name])) for name in oracle.arrays if name != "cfg"}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(given[name])
        for name, table in tables.items():
            model.table(table).copy_(given[name])
    dense, ids, starts = given["dense"], given["idx"].long(), given["off"].long()
    # One id per bag goes the way that training goes.
    single = ids.shape == starts.shape and bool((starts == torch.arange(ids.shape[1])).all())
    lookup = (ids.T, None) if single else (ids, starts)
    bottom, embedded = model.bottom(dense), model.embed(*lookup)
    logits = model(dense, *lookup)
    # Meta's loss is taken from the rounded probability; from the log-odds it would be closer to the truth than to them.
    probability = logits.sigmoid().unsqueeze(1)
    loss = torch.nn.functional.binary_cross_entropy(probability, given["labels"])
    torch.autograd.backward(loss)
    got = {
        "out.bot": bottom,
        "out.emb": embedded.transpose(0, 1),
        "out.interact": model.interact(bottom, embedded),
        "out.prob": probability,
        "out.loss": loss,
    }
    got |= {f"grad.{name}": model.table_gradient(table) for name, table in tables.items()}
    got |= {f"grad.{name}": _required(parameter.grad) for name, parameter in parameters.items()}
    torch.optim.SGD(model.parameters(), oracle.learning_rate).step()
    got |= {f"sgd.{name}": model.table(table) for name, table in tables.items()}
    got |= {f"sgd.{name}": parameter for name, parameter in parameters.items()}
    return {name: value.detach().numpy() for name, value in got.items()}


def _required(gradient: Any) -> Any:
    if gradient is None:
        raise RuntimeError("a parameter got no gradient")
    return gradient
