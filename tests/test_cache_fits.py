"""A training that keeps results of pure functions gets what it gets without: Lightning, loops, Keras."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cache_items import Decoded, decode, epochs, loader_of
from torch.utils.data import IterableDataset

from intune_callbacks import live
from intune_callbacks.cache.pure import ADDRESS


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        told = torch.utils.data.get_worker_info()
        for index in range(0 if told is None else told.id, 60, 1 if told is None else told.num_workers):
            yield decode(index)


def opened() -> list[str]:
    """Return the caches that this process has open."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.islink(link) and "intune-cache" in os.readlink(link)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Decoded(), Streamed()], ids=["map", "iterable"])
def test_a_loop_gets_the_same_batches_and_its_work_is_done_once(dataset: Any, workers: int, tmp_path: Path) -> None:
    stock = epochs(loader_of(dataset, workers))
    with live(loader_of(dataset, workers), run_dir=str(tmp_path), show_card=False) as loader:
        assert ADDRESS in os.environ
        assert epochs(loader) == stock
    use = json.loads((tmp_path / "report.json").read_text())["cache"]
    (seen,) = use["functions"]
    assert seen["name"].endswith("decode")
    assert seen["hits"] > seen["misses"] > 0
    assert ADDRESS not in os.environ


@pytest.mark.parametrize("mode", ["off", "observe", "advise"])
def test_in_other_modes_nothing_is_kept(mode: str, tmp_path: Path) -> None:
    with live(loader_of(Decoded(), 0), mode=mode, run_dir=str(tmp_path), show_card=False) as loader:
        assert ADDRESS not in os.environ
        epochs(loader, 1)
    report = tmp_path / "report.json"
    assert not report.exists() or "cache" not in json.loads(report.read_text())


def test_a_training_of_lightning_is_the_same_and_the_card_tells(tmp_path: Path, capsys: Any) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    from intune_callbacks.lightning import InTuneCallback

    class Model(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = torch.nn.Linear(800, 1), []

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch[0].flatten(1)).square().mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-5)

    def losses(count: int, **arguments: Any) -> list[float]:
        lightning.seed_everything(1, verbose=False)
        model = Model()
        callbacks = [InTuneCallback(**arguments)] if arguments else []
        trainer = lightning.Trainer(
            max_epochs=count,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, loader_of(Decoded(), 2))
        return list(model.losses)

    assert losses(3, run_dir=str(tmp_path / "three")) == losses(3)
    card = capsys.readouterr().out
    assert "decode:" in card
    assert "calls from memory" in card
    losses(1, run_dir=str(tmp_path / "one"))
    assert "nothing was kept: no sample comes twice: there is one epoch" in capsys.readouterr().out
    one = json.loads((tmp_path / "one" / "report.json").read_text())["cache"]
    assert one["used_bytes"] == 0
    assert all(row["hits"] == 0 for row in one["functions"])


def test_a_training_of_keras_keeps_what_a_pydataset_decodes(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    from intune_callbacks.keras import InTuneCallback

    class Rows(keras.utils.PyDataset):  # type: ignore[name-defined, misc]
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            return decode(index), np.ones((8, 1), np.float32)

    def weights(**arguments: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((100,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callbacks = [InTuneCallback(**arguments)] if arguments else []
        model.fit(Rows(workers=2), epochs=3, verbose=0, callbacks=callbacks, shuffle=False)
        return model.get_weights()

    tuned, stock = weights(run_dir=str(tmp_path), show_card=False), weights()
    assert all((one == other).all() for one, other in zip(tuned, stock, strict=True))
    (seen,) = json.loads((tmp_path / "report.json").read_text())["cache"]["functions"]
    assert seen["hits"] >= 30, seen


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    loader = live(loader_of(Decoded(), 2), show_card=False)
    assert opened()
    epochs(loader, 1)
    loader.close()
    assert sum(os.stat(link).st_blocks for link in opened()) * 512 < 100_000  # of what a worker of now may still hold
    del loader


def _trained_for_ever(told: Any) -> None:
    loader = live(loader_of(Decoded(), 2), show_card=False)
    told.put(0)
    while True:
        for _ in loader:
            pass


def test_nothing_is_left_of_a_training_that_was_killed() -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    training = context.Process(target=_trained_for_ever, args=(told,))
    training.start()
    told.get(timeout=60.0)
    time.sleep(0.5)
    children = psutil.Process(training.pid).children(recursive=True)
    training.kill()
    training.join(30.0)
    psutil.wait_procs(children, timeout=30.0)  # they hold the memory, and end by themselves
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
