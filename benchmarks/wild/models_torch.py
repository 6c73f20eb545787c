"""Small torch models of the wild pipelines, and the LightningModule that keeps every loss."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from benchmarks.wild.entry import Numbers

__all__ = ["Convolutional", "Recorded", "Tokens", "options"]


def options(numbers: Numbers) -> dict[str, Any]:
    """Return the arguments of a DataLoader that are numbers, where there are workers the others, too."""
    workers = {"num_workers": numbers["num_workers"]}
    if not numbers["num_workers"]:
        return workers
    kept = {"persistent_workers": bool(numbers.get("persistent_workers", 0))}
    return workers | kept | {name: numbers[name] for name in ("prefetch_factor",) if name in numbers}


class Recorded(pl.LightningModule):
    """Trains a network whose ``forward(batch)`` is the loss.

    Args:
        net: the network.

    Attributes:
        losses: one per step.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Convolutional(nn.Module):
    """Three convolutions with large strides on ``(images, labels)``.

    Args:
        classes: of the labels.
        width: channels of the first convolution.
        stride: of the first convolution.
    """

    def __init__(self, classes: int, width: int = 8, stride: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 7, stride), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4 * width, classes),
        )  # fmt: skip

    def forward(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        loss: torch.Tensor = nn.functional.cross_entropy(self.body(images), labels)
        return loss


class Tokens(nn.Module):
    """A small transformer layer that predicts tokens: ``(inputs, targets)``, or a mapping with these names.

    Args:
        words: of the vocabulary.
        width: of the embedding.
        names: keys of inputs and targets where the batch is a mapping.
    """

    def __init__(self, words: int, width: int = 64, names: tuple[str, str] = ("input_ids", "labels")) -> None:
        super().__init__()
        self.names = names
        self.embedding = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, batch: Any) -> torch.Tensor:
        inputs, targets = (batch[name] for name in self.names) if isinstance(batch, dict) else batch
        logits = self.head(self.layer(self.embedding(inputs)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
