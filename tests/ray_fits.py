"""One training in a process of its own, with or without workers on a cluster: ``python ray_fits.py KIND ADDRESS``."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

ROWS, BATCH, EPOCHS = 4000, 8, int(os.environ.get("EPOCHS", "2"))


class Rows(Dataset[Any]):
    """Of the user's script: no other process has it by its name."""

    def __init__(self) -> None:
        self.x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return {"x": self.x[index], "y": self.x[index].sum()}


class Augmented(Rows):
    """Draws from all three generators that are seeded for each batch."""

    def __getitem__(self, index: int) -> Any:
        made = super().__getitem__(index)
        noise = random.random() + np.random.rand() + torch.rand(16)
        return {"x": made["x"] + noise, "y": made["y"]}


def seeded(worker: int) -> None:
    """Of users who seed what torch does not."""
    np.random.seed(worker + 123)


def loader_of(workers: int, dataset: Any = None) -> DataLoader[Any]:
    return DataLoader(Rows() if dataset is None else dataset, batch_size=BATCH, shuffle=True, num_workers=workers)


def arguments(address: str) -> dict[str, Any]:
    given = {"workers_kind": "ray", "ray_address": address} if address else {"workers_kind": "process"}
    # On a busy machine the agent may find otherwise; this one asks for as many workers as there are CPUs anywhere.
    few = {"cpus": 1.0, "decide_every_s": 0.3, "warmup_batches": 5}
    return {**few, "policy": "even", "show_card": False, **given}


def lightning(address: str) -> tuple[list[float], dict[str, Any]]:
    import pytorch_lightning as pl

    from intune_callbacks.lightning import InTuneCallback

    logging.getLogger("pytorch_lightning").setLevel("ERROR")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = torch.nn.Linear(16, 1), list[float]()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = ((self.layer(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    pl.seed_everything(7, verbose=False)
    module, callbacks = Module(), [InTuneCallback(**arguments(address))] if address else []
    trainer = pl.Trainer(
        max_epochs=EPOCHS, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")),
        use_distributed_sampler=True,
    )  # fmt: skip
    trainer.fit(module, loader_of(1 if address else 0))
    return module.losses, callbacks[0].report if callbacks else {}


def loop(address: str) -> tuple[list[float], dict[str, Any]]:
    from intune_callbacks.session.live import live

    torch.manual_seed(7)
    layer, losses = torch.nn.Linear(16, 1), list[float]()
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    loader = loader_of(1 if address else 0)
    watched = live(loader, **arguments(address)) if address else loader
    for _ in range(EPOCHS):
        for batch in watched:
            loss = ((layer(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, watched.close() if address else {}


def transformers(address: str) -> tuple[list[float], dict[str, Any]]:
    from transformers import Trainer, TrainingArguments

    from intune_callbacks.transformers import InTuneCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = torch.nn.Linear(16, 1), list[float]()

        def forward(self, x: Any, y: Any) -> Any:
            loss = ((self.layer(x).squeeze(1) - y) ** 2).mean()
            self.losses.append(loss.item())
            return {"loss": loss}

    torch.manual_seed(7)
    model, callbacks = Model(), [InTuneCallback(**arguments(address))] if address else []
    given = TrainingArguments(
        "unused", per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, report_to=[], save_strategy="no",
        dataloader_num_workers=1 if address else 0, use_cpu=True, disable_tqdm=True, seed=7, logging_strategy="no",
        remove_unused_columns=False, learning_rate=0.01,
    )  # fmt: skip
    Trainer(model, given, train_dataset=Rows(), callbacks=callbacks).train()
    return model.losses, callbacks[0].report if callbacks else {}


def augmented(address: str) -> tuple[list[float], dict[str, Any]]:
    """The sums of batches, from the first one on of workers of ours: here for all, or some on a cluster."""
    from intune_callbacks.pipelines.find import find

    torch.manual_seed(7)
    kind = {"workers_kind": "ray", "ray_address": address} if address else {"workers_kind": "process"}
    loader = DataLoader(Augmented(), batch_size=BATCH, shuffle=True, num_workers=2, worker_init_fn=seeded)
    pipeline: Any = find(loader, **kind).pipeline
    pipeline.prepare()
    until_s = time.monotonic() + 30.0
    while address and pipeline.beyond(1.0) < 1.0 and time.monotonic() < until_s:
        time.sleep(0.05)
    pipeline.resize({"load": 6 if address else 3, "load.window": 24})
    sums = [float(batch["x"].double().sum()) for _ in range(EPOCHS) for batch in loader]
    pipeline.close()
    return sums, {"frozen": None}


def epochs(address: str, persistent: bool, leave: bool) -> tuple[list[float], dict[str, Any]]:
    """The sums of batches of five epochs, some of which are left; without an address of the stock loader."""
    from intune_callbacks.session.live import live

    torch.manual_seed(7)
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)
    watched, sums = live(loader, **arguments(address)) if address else loader, list[float]()
    for epoch in range(5):
        for number, batch in enumerate(watched):
            sums.append(float(batch["x"].double().sum()))
            if leave and number >= 150 + epoch:
                break
    return sums, watched.close() if address else {}


def spawned(address: str) -> tuple[list[float], dict[str, Any]]:
    """Workers here take seconds to start, and those on the cluster may be there before them."""
    return whole(address, num_workers=1, multiprocessing_context="spawn")


def in_the_loop(address: str) -> tuple[list[float], dict[str, Any]]:
    return whole(address, num_workers=0)


def whole(address: str, **given: Any) -> tuple[list[float], dict[str, Any]]:
    from intune_callbacks.session.live import live

    torch.manual_seed(7)
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, **given)
    watched = live(loader, **arguments(address)) if address else loader
    sums = [float(batch["x"].double().sum()) for _ in range(3) for batch in watched]
    return sums, watched.close() if address else {}


class Shifted(Rows):
    """What it gives depends on what the training sets."""

    shift = 0.0

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)["x"] + self.shift}


def changed(address: str) -> tuple[list[float], dict[str, Any]]:
    """The training changes the dataset between two epochs."""
    from intune_callbacks.session.live import live

    torch.manual_seed(7)
    dataset, sums = Shifted(), list[float]()
    loader = loader_of(2, dataset)
    watched = live(loader, **arguments(address)) if address else loader
    for epoch in range(4):
        dataset.shift = float(epoch)
        sums += [float(batch["x"].double().sum()) for batch in watched]
    return sums, watched.close() if address else {}


def left(address: str) -> tuple[list[float], dict[str, Any]]:
    return epochs(address, persistent=False, leave=True)


def persistent(address: str) -> tuple[list[float], dict[str, Any]]:
    return epochs(address, persistent=True, leave=False)


def left_persistent(address: str) -> tuple[list[float], dict[str, Any]]:
    return epochs(address, persistent=True, leave=True)


def inside(address: str) -> tuple[list[float], dict[str, Any]]:
    """The loop in a worker of Ray's own, as under Ray Train."""
    import ray

    @ray.remote(num_cpus=0)
    def trained() -> tuple[list[float], dict[str, Any]]:
        import ray_fits

        from intune_callbacks.pipelines.ray import members

        members.LEAST_SHARE = 1.0
        losses, report = ray_fits.loop(address)
        return losses, {"frozen": report["frozen"], "stages": report["hints"]}

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    made: tuple[list[float], dict[str, Any]] = ray.get(trained.remote(), timeout=150)
    return made


def main(kind: str, address: str) -> None:
    from intune_callbacks.pipelines.ray import members

    members.LEAST_SHARE = 1.0  # what sleeps counts as a whole CPU
    elsewhere = 0
    if address:
        from intune_callbacks.pipelines.ray.mixed import MixedPool

        done = MixedPool._done_there

        def counted(*given: Any) -> Any:
            nonlocal elsewhere
            elsewhere += 1
            return done(*given)

        MixedPool._done_there = counted  # type: ignore[method-assign]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    losses, report = globals()[kind](address)
    begin_s = time.monotonic()
    print(json.dumps({
        "losses": losses, "frozen": report.get("frozen"), "elsewhere": elsewhere, "imported": "ray" in sys.modules,
        "stages": report.get("stages"), "closed_s": time.monotonic() - begin_s,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
