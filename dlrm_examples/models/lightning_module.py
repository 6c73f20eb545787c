"""The models as LightningModules, for pytorch_lightning and for lightning.pytorch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_examples.criteo.stages import Batch
from dlrm_examples.models.dlrm_torch import DLRM, DLRMConfig
from dlrm_examples.models.hammock import HammockConfig
from dlrm_examples.models.hammock_torch import Hammock
from dlrm_examples.models.metrics import evaluate
from dlrm_examples.models.optimizers_torch import optimizer_for
from dlrm_examples.models.schedule import Schedule
from intune_callbacks.errors import MissingPackage

__all__ = ["ClickModule", "DLRMModule", "HammockModule", "lightning_package"]


def lightning_package() -> str:
    """Return the Lightning in use: the one already imported, else the first that is installed.

    The two do not accept each other's modules, so the choice must follow the Trainer's.

    Raises:
        MissingPackage: neither is installed.
    """
    candidates = ("pytorch_lightning", "lightning.pytorch")
    for name in candidates:
        if name in sys.modules:
            return name
    for name in candidates:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return name
    raise MissingPackage("pytorch-lightning", "lightning")


if TYPE_CHECKING:
    from pytorch_lightning import LightningModule
else:
    LightningModule = importlib.import_module(lightning_package()).LightningModule


class ClickModule(LightningModule):
    """Train a network on the binary cross-entropy of a click; test it by loss, accuracy and exact AUC.

    Logs:

    |               | |
    |---------------|---|
    | train_loss    | mean over the batch, each step |
    | test_loss     | mean over all test rows |
    | test_accuracy | share of test rows on the right side of one half |
    | test_auc      | area under the ROC curve over all test rows, exact |
    | test_rows     | how many they are |

    Args:
        model: (dense, categories) -> log-odds; the tables it looks rows up in are its `embeddings`.
        learning_rate: of the optimiser.
        optimizer: ``sgd``, ``adagrad`` or ``rowwise-adagrad``; see `optimizers`.
        eps: of both kinds of Adagrad.
        schedule: of the learning rate; constant by default.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        learning_rate: float,
        *,
        optimizer: str = "sgd",
        eps: float = 1e-8,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.learning_rate, self.optimizer, self.eps = learning_rate, optimizer, eps
        self.schedule = schedule or Schedule()
        self._test: list[tuple[Tensor, Tensor]] = []

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return the log-odds of a click, [B]."""
        logits: Tensor = self.model(dense, categories)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch["dense"], batch["categories"])
        loss = functional.binary_cross_entropy_with_logits(logits, batch["labels"])
        self.log("train_loss", loss, batch_size=len(batch["labels"]))
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._test.append((self.model(batch["dense"], batch["categories"]).cpu(), batch["labels"].cpu()))

    def on_test_epoch_end(self) -> None:
        logits, labels = (torch.cat(parts) for parts in zip(*self._test, strict=True))
        self._test.clear()
        if self.trainer.world_size > 1:
            # AUC is no mean over ranks: every rank needs all rows. gather_object takes ranks of different sizes.
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, (logits, labels))
            logits, labels = (torch.cat(parts) for parts in zip(*gathered, strict=True))
        found = evaluate(labels.numpy(), logits.double().numpy())
        self.log_dict({f"test_{name}": value for name, value in found.items()})

    def configure_optimizers(self) -> Any:
        tables = self.model.embeddings.weight
        rest = [weights for weights in self.model.parameters() if weights is not tables]
        optimizer = optimizer_for(self.optimizer, [tables], rest, self.learning_rate, self.eps)
        if self.schedule.is_constant or not self.learning_rate:
            return optimizer
        full, rate = self.learning_rate, self.schedule.rate
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, full) / full)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DLRMModule(ClickModule):
    """Train and test a DLRM.

    Args:
        config: the sizes.
        learning_rate: 0.1 for batches of 128 in Meta's Kaggle setting (bench/dlrm_s_criteo_kaggle.sh).
        seed: decides the initial weights.
        options: the other arguments of `ClickModule`.
    """

    def __init__(self, config: DLRMConfig, learning_rate: float = 0.1, seed: int = 0, **options: Any) -> None:
        super().__init__(DLRM(config, torch.Generator().manual_seed(seed)), learning_rate, **options)


class HammockModule(ClickModule):
    """Train and test a Hammock.

    Args:
        config: the sizes.
        edges: what `hammock.quantiles` gave, [dense_features, buckets - 1].
        learning_rate: 0.05 for Adagrad and batches of 128.
        seed: decides the initial weights.
        options: the other arguments of `ClickModule`.
    """

    def __init__(
        self,
        config: HammockConfig,
        edges: npt.NDArray[np.float32],
        learning_rate: float = 0.05,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(Hammock(config, edges, torch.Generator().manual_seed(seed)), learning_rate, **options)
