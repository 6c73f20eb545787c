"""Hybrid parallelism under Lightning, for pytorch_lightning and for lightning.pytorch.

trainer = Trainer(strategy=HybridStrategy(), devices=2)
trainer.fit(HybridModule(DLRMConfig(), batch_size=64), loader)
"""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from dlrm_examples.criteo.stages import Batch
from dlrm_examples.hybrid.checkpoint import load, save
from dlrm_examples.hybrid.model import build, set_rate
from dlrm_examples.models.dlrm_torch import DLRMConfig
from dlrm_examples.models.lightning_module import DLRMModule, lightning_package
from dlrm_examples.models.schedule import Schedule

__all__ = ["HybridModule", "HybridStrategy"]

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = importlib.import_module(f"{lightning_package()}.strategies").DDPStrategy

TIMEOUT = datetime.timedelta(minutes=10)


class HybridModule(DLRMModule):
    """As `DLRMModule`, with tables divided among the ranks; until they have met, every table has one row.

    Logs also:

    |          | |
    |----------|---|
    | val_loss | mean over all validation rows |

    Args:
        config: the sizes.
        batch_size: samples of one rank's batch.
        optimizer, learning_rate, eps, seed, sharding: as for `model.build`.
        schedule: of the learning rate; constant by default.
    """

    def __init__(
        self,
        config: DLRMConfig,
        batch_size: int,
        optimizer: str = "sgd",
        learning_rate: float = 0.1,
        eps: float = 1e-8,
        seed: int = 0,
        sharding: str = "auto",
        schedule: Schedule | None = None,
    ) -> None:
        small = replace(config, table_rows=(1,) * len(config.table_rows))
        super().__init__(small, learning_rate, seed, optimizer=optimizer, eps=eps, schedule=schedule)
        self._arguments: dict[str, Any] = {
            "config": config, "batch_size": batch_size, "optimizer": optimizer, "learning_rate": learning_rate,
            "eps": eps, "seed": seed, "sharding": sharding,
        }  # fmt: skip
        self._optimizer: torch.optim.Optimizer | None = None
        self._validated: list[Tensor] = []

    def configure_model(self) -> None:
        if self._optimizer is None:
            device = self.trainer.strategy.root_device
            self.model, self._optimizer = build(**self._arguments, device=device)

    def configure_optimizers(self) -> Any:
        return self._optimizer

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        assert self._optimizer is not None
        set_rate(self.model, self._optimizer, self.schedule.rate(self.trainer.global_step, self.learning_rate))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.model(batch["dense"], batch["categories"])
        # A sum, as ranks may have different numbers of rows in the last batch.
        total = functional.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="sum")
        self._validated.append(torch.stack((total, torch.tensor(float(len(logits)), device=total.device))))

    def on_validation_epoch_end(self) -> None:
        total, rows = self.trainer.strategy.reduce(torch.stack(self._validated).sum(0), reduce_op="sum")
        self._validated.clear()
        # The same on all ranks: nothing is left to average.
        self.log("val_loss", total / rows, sync_dist=False, rank_zero_only=False)


class HybridStrategy(DDPStrategy):
    """Lightning's DDP strategy for a module that divides itself among the ranks in `configure_model`.

    Processes, collectives and samplers are DDP's. The module is neither wrapped again nor are the weights of rank 0
    sent to the other ranks, which would overwrite their rows by those of rank 0. A checkpoint is a folder; see
    `checkpoint`.

    Args:
        timeout: after which a collective that some rank does not join ends the run; a rank that dies ends it at once
            under gloo.
        options: as for Lightning's `DDPStrategy`.
    """

    strategy_name = "hybrid"

    def __init__(self, timeout: datetime.timedelta = TIMEOUT, **options: Any) -> None:
        super().__init__(timeout=timeout, **options)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: there are no tables to load into before."""
        return True

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def configure_ddp(self) -> None:
        """Do nothing: the MLPs are in DDP already."""

    def model_to_device(self) -> None:
        """Tell the module its device; the model is there already."""
        self._module._device = self.root_device

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            super().setup(trainer)
            return
        assert self.accelerator is not None
        # Without what DDPStrategy does here for a module that is not being fitted: to send the weights of rank 0.
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        self.setup_precision_plugin()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        rest = dict(checkpoint)
        state = {"model": rest.pop("state_dict"), "optimizers": _numbered(rest.pop("optimizer_states", []))}
        save(self.broadcast(filepath), state, rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._module.state_dict()}
        if self._module.trainer.state.fn == "fit":
            state["optimizers"] = _numbered([optimizer.state_dict() for optimizer in self.optimizers])
        checkpoint = load(checkpoint_path, state)
        states = state.get("optimizers", {})
        return checkpoint | {"state_dict": state["model"], "optimizer_states": [*states.values()]}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Child by child: torch's recursion from the module would not use the divided model's own way to load.
        for name, child in self._module.named_children():
            own = {
                key.removeprefix(f"{name}."): value
                for key, value in checkpoint["state_dict"].items()
                if key.startswith(f"{name}.")
            }
            child.load_state_dict(own, strict=strict)


def _numbered(states: list[Any]) -> dict[str, Any]:
    return {str(index): state for index, state in enumerate(states)}
