"""The divided model's side of `check_oracle`: each rank takes its samples of the batch, and the results are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn.functional import binary_cross_entropy

from dlrm_examples.hybrid import install
from dlrm_examples.hybrid.ranks import run_ranks
from dlrm_examples.oracle.file import Array, Oracle
from intune_callbacks.errors import ConfigError

__all__ = ["of_ranks", "run"]

LIMIT_S = 120.0
# The tables' gradients are never there as such: they are read off a step so long that the weights' own digits are lost.
LONG_RATE = 2.0**24


def run(oracle: Oracle, ranks: int, sharding: str = "auto") -> dict[str, Array]:
    """Push the batch through `model.HybridDLRM` on gloo ranks; return everything named by `Oracle.expected`.

    Args:
        oracle: the batch and the weights.
        ranks: how many processes.
        sharding: one of `model.SHARDINGS`.

    Raises:
        ConfigError: there are more ranks than samples.
        MissingTorchRec: TorchRec is not installed.
    """
    batch = len(oracle.arrays["dense"])
    if not 1 <= ranks <= batch:
        raise ConfigError([f"--ranks {ranks}: expected 1 to {batch}, the samples of the batch"])
    install.require()
    got: dict[str, Array] = run_ranks(_rank, ranks, oracle, sharding, limit_s=LIMIT_S)
    return got


def _rank(rank: int, oracle: Oracle, sharding: str) -> dict[str, Array]:
    distributed.init_process_group("gloo")
    try:
        return of_ranks(oracle, sharding)
    finally:
        distributed.destroy_process_group()


def of_ranks(oracle: Oracle, sharding: str = "auto") -> dict[str, Array]:
    """Do what `run` does, on the ranks of a process group that is there; every rank must call this.

    Args:
        oracle, sharding: as for `run`.
    """
    share = -(-len(oracle.arrays["dense"]) // distributed.get_world_size())
    own = torch.arange(share) + share * distributed.get_rank()
    got = _step(oracle, own, sharding, oracle.learning_rate)
    long = _step(oracle, own, sharding, LONG_RATE)
    for table in range(len(oracle.table_rows)):
        before = oracle.arrays[f"emb.{table}"].astype(np.float64)
        got[f"grad.emb.{table}"] = ((before - long[f"sgd.emb.{table}"]) / LONG_RATE).astype(np.float32)
    return got


def _step(oracle: Oracle, own: Tensor, sharding: str, rate: float) -> dict[str, Array]:
    """Make one step from the given weights, this rank on its samples; return all of it but the tables' gradients.

    All ranks' shares must have one size: beyond the end of the batch stands its last sample, with the weight 0.
    """
    from dlrm_examples.hybrid.model import build
    from dlrm_examples.hybrid.weights import gathered, set_tables

    arrays = {name: torch.from_numpy(np.array(oracle.arrays[name])) for name in oracle.arrays if name != "cfg"}
    parallel, optimizer = build(oracle.sizes, batch_size=len(own), learning_rate=rate, sharding=sharding)
    model = parallel.module
    set_tables(parallel, [arrays[f"emb.{table}"] for table in range(len(oracle.table_rows))])
    layers = {
        f"{part}.{index}": layer
        for part, mlp in (("bot", model.bottom), ("top", model.top))
        for index, layer in enumerate(module for module in mlp if isinstance(module, torch.nn.Linear))
    }
    parameters = {f"{name}.w": layer.weight for name, layer in layers.items()}
    parameters |= {f"{name}.b": layer.bias for name, layer in layers.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(arrays[name])

    batch, world = len(arrays["dense"]), distributed.get_world_size()
    weights, own = (own < batch).float().unsqueeze(1), own.clamp(max=batch - 1)
    dense, labels = arrays["dense"][own], arrays["labels"][own]
    lookup = _lookup(arrays["idx"], arrays["off"], own)
    with torch.no_grad():
        bottom, embedded = model.bottom(dense), model.embed(*lookup)
        interacted = model.interact(bottom, embedded)
    # Meta's loss is taken from the rounded probability; from the log-odds it would be closer to the truth than to them.
    probability = parallel(dense, *lookup).sigmoid().unsqueeze(1)
    # A sum, weighed so that the mean over the ranks, which is what they take, is the mean over the batch.
    loss = binary_cross_entropy(probability, labels, weights, reduction="sum") * world / batch
    torch.autograd.backward(loss)
    got = {f"grad.{name}": _required(parameter.grad) for name, parameter in parameters.items()}
    optimizer.step()
    outputs = {"bot": bottom, "interact": interacted, "prob": probability, "emb": embedded, "loss": loss[None]}
    joined = {name: _joined(value)[:batch] for name, value in outputs.items()}
    tables, _ = gathered(parallel)
    got |= {f"sgd.{name}": parameter for name, parameter in parameters.items()}
    got |= {f"sgd.emb.{index}": table for index, table in enumerate(tables)}
    got |= {f"out.{name}": joined[name] for name in ("bot", "interact", "prob")}
    got |= {"out.emb": joined["emb"].transpose(0, 1), "out.loss": joined["loss"][:world].mean()}
    return {name: value.detach().numpy().copy() for name, value in got.items()}


def _lookup(ids: Tensor, starts: Tensor, own: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return this rank's ids, and the lengths of their bags if there is not one id in each."""
    if ids.shape == starts.shape and bool((starts == torch.arange(ids.shape[1])).all()):
        # The way that training goes.
        return ids[:, own].T.to(torch.int32), None
    bounds = torch.cat((starts, torch.full_like(starts[:, :1], ids.shape[1])), dim=1)
    rows = zip(ids, bounds.tolist(), strict=True)
    values = [row[bound[sample] : bound[sample + 1]] for row, bound in rows for sample in own.tolist()]
    return torch.cat(values), bounds.diff(dim=1)[:, own].to(torch.int32)


def _joined(value: Tensor) -> Tensor:
    """Return the values of all ranks' samples, in order."""
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, value.detach())
    return torch.cat(parts)


def _required(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise RuntimeError("a parameter got no gradient")
    return gradient.clone()
