"""A sampler that asks the Lightning trainer how far it is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("lightning.pytorch")

from restless import Restless  # noqa: E402
from training_samplers import EAGER, ROWS, Batches, Rows  # noqa: E402

from intune_callbacks.lightning import InTuneCallback  # noqa: E402


class Curriculum(Batches):
    """Harder rows with each step; nothing of it is in the sampler itself."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def four(self) -> Any:
        return [(self.trainer.global_step + place) % ROWS for place in range(4)]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def seen(*callbacks: Any) -> list[Any]:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **dict.fromkeys(off, False))
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_sampler=Curriculum(trainer), num_workers=2))
    return model.seen


def test_its_batches_are_those_of_the_stock_loader(restless: type[Restless]) -> None:
    callback = InTuneCallback(**EAGER)
    assert seen(callback) == seen()
    assert restless.resizes > 1
