"""Oracle files made by an independent DLRM: plain loops over samples and features, float64, torch only for autograd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

LEARNING_RATE = 0.1


def make_oracle(
    path: Path,
    *,
    tables: tuple[int, ...] = (5, 4, 3),
    dim: int = 3,
    bottom: tuple[int, ...] = (4, 6, 3),
    top: tuple[int, ...] = (5, 1),
    batch: int = 6,
    ids_per_bag: int = 1,
    itself: bool = False,
    ragged: bool = False,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a file as described in `check_oracle`; `changes` replace arrays in it (None removes one)."""
    random = np.random.default_rng(seed)
    features = 1 + len(tables)
    inputs = dim + features * (features - 1) // 2 + itself * features
    arrays: dict[str, Any] = {
        "dense": random.random((batch, bottom[0])),
        "labels": random.integers(0, 2, (batch, 1)).astype(np.float64),
        "idx": np.stack([random.integers(0, rows, batch * ids_per_bag) for rows in tables]),
        "off": np.tile(np.arange(batch) * ids_per_bag, (len(tables), 1)),
    }
    if ragged:
        ends = batch * ids_per_bag
        arrays["off"] = np.stack([np.sort([0, *random.integers(0, ends + 1, batch - 1)]) for _ in tables])
    shapes = {f"emb.{t}": (rows, dim) for t, rows in enumerate(tables)}
    for part, widths in (("bot", bottom), ("top", (inputs, *top))):
        for layer in range(len(widths) - 1):
            shapes[f"{part}.{layer}.w"] = (widths[layer + 1], widths[layer])
            shapes[f"{part}.{layer}.b"] = (widths[layer + 1],)
    arrays |= {name: 0.3 * random.standard_normal(shape) for name, shape in shapes.items()}
    weights = {name: torch.tensor(np.float32(arrays[name]), dtype=torch.float64) for name in shapes}
    out = forward(arrays, {name: w.requires_grad_() for name, w in weights.items()}, tables, itself)
    out["loss"].backward()
    arrays |= {f"out.{name}": value.detach().numpy() for name, value in out.items()}
    arrays |= {f"grad.{name}": w.grad.numpy() for name, w in weights.items()}
    arrays |= {f"sgd.{name}": (w - LEARNING_RATE * w.grad).detach().numpy() for name, w in weights.items()}
    cfg = {"d": dim, "tables": tables, "bot": bottom, "top": top, "itself": itself, "lr": LEARNING_RATE}
    cast = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    cast = {"cfg": np.array(json.dumps(cfg)), **cast, **changes}
    np.savez(path, **{name: value for name, value in cast.items() if value is not None})
    return path


def forward(
    arrays: dict[str, Any], weights: dict[str, torch.Tensor], tables: tuple[int, ...], itself: bool
) -> dict[str, torch.Tensor]:
    rows = []
    for sample in range(len(arrays["dense"])):
        x = torch.tensor(np.float32(arrays["dense"][sample]), dtype=torch.float64)
        layer = 0
        while f"bot.{layer}.w" in weights:
            x = (weights[f"bot.{layer}.w"] @ x + weights[f"bot.{layer}.b"]).clamp(min=0)
            layer += 1
        vectors = [x]
        for t in range(len(tables)):
            bounds = [*arrays["off"][t], arrays["idx"].shape[1]]
            ids = arrays["idx"][t][bounds[sample] : bounds[sample + 1]]
            vectors.append(sum((weights[f"emb.{t}"][i] for i in ids), torch.zeros(x.shape, dtype=torch.float64)))
        dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i + itself)]
        interaction = torch.cat((x, torch.stack(dots)))
        y, layer = interaction, 0
        while f"top.{layer}.w" in weights:
            y = y.clamp(min=0) if layer else y
            y = weights[f"top.{layer}.w"] @ y + weights[f"top.{layer}.b"]
            layer += 1
        rows.append((x, torch.stack(vectors[1:]), interaction, 1 / (1 + torch.exp(-y))))
    bot, emb, interact, prob = (torch.stack(part) for part in zip(*rows, strict=True))
    labels = torch.tensor(arrays["labels"])
    loss = -(labels * prob.log() + (1 - labels) * (1 - prob).log()).mean()
    return {"bot": bot, "emb": emb.transpose(0, 1), "interact": interact, "prob": prob, "loss": loss}
