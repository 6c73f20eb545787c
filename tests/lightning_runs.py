"""What the Lightning tests share: a model that remembers its batches, loaders of every kind, a restless tuner."""

from __future__ import annotations

import inspect
import multiprocessing
import random
import threading
import time
from typing import Any, ClassVar

import lightning.pytorch
import pytorch_lightning
import torch
import torchdata.nodes as nodes
from busy_machine import eventually
from processes import started
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from intune_callbacks.pipelines.base import Combined

NAMESPACES = {"pytorch_lightning": pytorch_lightning, "lightning.pytorch": lightning.pytorch}
LIGHTNING = NAMESPACES["lightning.pytorch"]
ROWS, BATCH = 96, 4
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}
# Argument of `fit`, since Lightning 2.6; before, it is torch's own default that holds.
SAFE = {"weights_only": True} if "weights_only" in inspect.signature(pytorch_lightning.Trainer.fit).parameters else {}


class Rows(Dataset[torch.Tensor]):
    """Row i is the number i, twice."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    """The rows as a stream of unknown length, a share for each worker."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, ROWS, step):
            yield torch.full((2,), float(index))


class Batches:
    """Iterable batches of no known type."""

    def __iter__(self) -> Any:
        return (torch.full((BATCH, 2), float(index)) for index in range(ROWS // BATCH))


def as_row(index: int) -> torch.Tensor:
    return torch.full((2,), float(index))


class Sized(nodes.Loader):  # type: ignore[type-arg]
    """A graph whose length the user knows."""

    def __len__(self) -> int:
        return ROWS // BATCH


def graph(*, length: bool = False, process: bool = False) -> Any:
    """A torchdata graph with two mappers and a prefetcher."""
    node: Any = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(ROWS)))
    node = nodes.ParallelMapper(node, as_row, num_workers=2, method="process" if process else "thread")
    node = nodes.ParallelMapper(nodes.Batcher(node, BATCH), torch.stack, num_workers=1)
    return (Sized if length else nodes.Loader)(nodes.Prefetcher(node, 2))


def slow(index: int) -> torch.Tensor:
    time.sleep(0.003)
    return as_row(index)


def slow_graph(rows: int = ROWS) -> Any:
    """One mapper that needs 12 ms a batch with the one worker it has."""
    node: Any = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(rows)))
    node = nodes.ParallelMapper(node, slow, num_workers=1)
    return nodes.Loader(nodes.ParallelMapper(nodes.Batcher(node, BATCH), torch.stack, num_workers=1))


def shuffled(rows: int = ROWS, batch_size: int = BATCH, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(rows), batch_size=batch_size, shuffle=True, **options)


def stateful(**options: Any) -> Any:
    return StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True, **options)


def make_model(namespace: Any, **hooks: Any) -> Any:
    """A LightningModule whose `seen` holds every training batch as nested tuples; `hooks` replace its methods."""

    class Model(namespace.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(plain(batch))
            return sum(self.layer(part).mean() for part in tensors(batch)) + 0 * self.layer.weight.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    for name, hook in hooks.items():
        setattr(Model, name, hook)
    return Model()


def running() -> set[Any]:
    """Return the threads and child processes alive now."""
    return {*threading.enumerate(), *multiprocessing.active_children()}


def only(before: set[Any]) -> bool:
    """Return whether nothing runs but `before`; what has been told to end gets some time for it."""
    return eventually(lambda: running() <= before, 5.0)


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.flatten().tolist())
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return None if batch is None else tuple(plain(part) for part in batch)


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else ([] if batch is None else batch)
    return [tensor for part in parts for tensor in tensors(part)]


def make_trainer(namespace: Any, *callbacks: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return namespace.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(callback: Any, namespace: Any = LIGHTNING, loader: Any = None, **options: Any) -> Any:
    model = make_model(namespace)
    trainer = make_trainer(namespace, callback, **options)
    trainer.fit(model, graph() if loader is None else loader)
    return trainer


class Memory:
    """Keeps what a Trainer logs."""

    def __init__(self, namespace: Any) -> None:
        logged = self.logged = {}  # type: dict[int, dict[str, float]]

        class Logger(namespace.loggers.Logger):  # type: ignore[misc, name-defined]
            name, version = "memory", "0"

            def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                logged.setdefault(step or 0, {}).update(metrics)

        self.logger = Logger()

    @property
    def keys(self) -> set[str]:
        return {key for metrics in self.logged.values() for key in metrics if key.startswith("intune/")}


class Spy:
    """A callback that notes the threads that began after it, and the private attributes of the loops while training"""

    def __new__(cls, namespace: Any) -> Any:
        class Callback(namespace.Callback):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.earlier = set(threading.enumerate())  # of an earlier test: they end at some moment
                self.threads: set[str] = set()
                self.attributes: set[str] = set()
                self.children: set[int | None] = set()

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                loop = trainer.fit_loop
                self.threads |= {thread.name for thread in threading.enumerate() if thread not in self.earlier}
                self.children |= {child.pid for child in started()}
                self.attributes |= {f"epoch_loop.{name}" for name in vars(loop.epoch_loop)}
                self.attributes |= {f"source.{name}" for name in vars(loop._data_source)}
                self.attributes |= {f"loader.{name}" for x in loop._combined_loader.flattened for name in vars(x)}
                self.attributes |= {f"iterator {type(x).__name__}" for x in loop._combined_loader._iterator.iterators}

        return Callback()


class RestlessTuner:
    """In place of `Tuner`: sets every stage to a random value after every batch."""

    made: ClassVar[list[RestlessTuner]] = []
    is_warm = True

    def __init__(self, pipeline: Combined, config: Any, **_: Any) -> None:
        self.pipeline, self.config = pipeline, config
        self.random = random.Random(0)
        self.frozen: str | None = None
        self.resizes, self.rebinds, self.samples, self.batches = 0, 0, 0, 0
        self.first = pipeline.stages()
        RestlessTuner.made.append(self)

    def batch(self, totals: Any, samples: int, exposed_wait_s: float | None = None) -> None:
        self.batches += 1
        self.samples += samples
        wanted = {stage.name: self.random.randint(stage.low, min(stage.high, 4)) for stage in self.pipeline.stages()}
        self.pipeline.resize(wanted)
        self.resizes += len(wanted)

    def expect(self, epoch_batches: int | None, batches: int | None, epochs_left: int | None = None) -> None:
        pass

    def end(self, totals: Any, samples: int = 0) -> None:
        pass

    def rebind(self, pipeline: Combined) -> None:
        self.pipeline, self.rebinds = pipeline, self.rebinds + 1

    def summary(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]

    def close(self) -> None:
        pass
