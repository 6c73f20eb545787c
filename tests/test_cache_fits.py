"""A training that keeps results of pure functions gets what it gets without: Lightning, loops, Keras, ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from intune_callbacks import TunerConfig, live, pure
from intune_callbacks.cache.images import FOLDER
from intune_callbacks.cache.pure import ADDRESS
from intune_callbacks.session.cache import Cache
from intune_callbacks.types import Observation, Resources

GB = 10**9


@pure
def decode(number: int) -> np.ndarray[Any, Any]:
    time.sleep(0.003)
    return np.random.default_rng(number).random((8, 100)).astype(np.float32)


class Decoded(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(decode(index)) + index, index


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        told = torch.utils.data.get_worker_info()
        for index in range(0 if told is None else told.id, 60, 1 if told is None else told.num_workers):
            yield decode(index)


def opened() -> list[str]:
    """Return the caches that this process has open."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.islink(link) and "intune-cache" in os.readlink(link)]


def digest(batches: Any) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for part in batch if isinstance(batch, (list, tuple)) else [batch]:
            found.update(part.numpy().tobytes())
    return found.hexdigest()


def epochs(loader: Any, count: int = 3) -> list[str]:
    torch.manual_seed(3)
    return [digest(loader) for _ in range(count)]


def loader_of(dataset: Any, workers: int) -> DataLoader[Any]:
    shuffle = not isinstance(dataset, IterableDataset)
    return DataLoader(dataset, batch_size=6, shuffle=shuffle, num_workers=workers)


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


# -- its size --------------------------------------------------------------------------------------------------------


def seen(used: float, wait: float = 0.5, limit: float = 10.0) -> Observation:
    machine = Resources(1.0, int(limit * GB), int(used * GB))
    return Observation(100, 1.0, 1.0, 10, 100, 10.0, 100.0, wait, 0.1, (), {}, machine)


def test_it_has_what_nothing_else_needs() -> None:
    cache = Cache(TunerConfig(memory_soft_limit=0.9))
    try:
        cache.fit(seen(3.0), 3.0 * GB)
        assert cache.use().limit_bytes == 6 * GB
        cache.fit(seen(3.0, wait=0.01), 3.0 * GB)
        assert cache.use().limit_bytes == 0  # the model does not wait: nothing more is kept
        cache.fit(seen(3.0), 8.95 * GB)
        assert cache.use().limit_bytes == GB // 20
        cache.fit(seen(3.0), 9.2 * GB)
        assert cache.use().limit_bytes == 0
        cache.fit(seen(3.0), 3.0 * GB)
        for number in range(50):
            decode(number)
        used_bytes = cache.used_bytes
        assert used_bytes > 100_000
        small = dataclasses.replace(seen(0.0), resources=Resources(1.0, 1_000_000, 0))
        cache.fit(small, 850_000.0)
        assert cache.used_bytes <= 50_000  # windows and workers come first
    finally:
        cache.close()
    assert cache.use() is None


def test_as_the_last_epoch_begins_nothing_more_is_kept() -> None:
    cache = Cache(TunerConfig())
    try:
        cache.expect(10, 30, 3, is_first=True)
        decode(1000)
        before = cache.used_bytes
        assert before > 0
        cache.expect(10, 30, 1, is_first=False)
        decode(1001)
        assert cache.used_bytes == before
        cache.fit(seen(3.0), 3.0 * GB)
        decode(1002)
        assert cache.used_bytes == before
    finally:
        cache.close()


def test_two_trainings_of_a_process_have_one() -> None:
    first, second = Cache(TunerConfig()), Cache(TunerConfig())
    decode(2000)
    first.close()
    assert second.used_bytes > 0
    second.close()
    assert ADDRESS not in os.environ


# -- torchvision -----------------------------------------------------------------------------------------------------


class Folder(Dataset[Any]):
    """As torchvision.datasets.ImageFolder is, which is not installed here."""

    def __init__(self, loader: Any, count: int = 40) -> None:
        self.loader, self.samples = loader, [(f"{number}.jpg", number % 2) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return torch.from_numpy(self.loader(path)) + torch.rand(1), target


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        Path(f"{number}.jpg").write_text("an image")
    folder, package = types.ModuleType(FOLDER), types.ModuleType("torchvision")
    package.get_image_backend = lambda: "PIL"  # type: ignore[attr-defined]
    for name, module in (("torchvision", package), ("torchvision.datasets", types.ModuleType("x")), (FOLDER, folder)):
        monkeypatch.setitem(sys.modules, name, module)
    asked: list[str] = []

    def default_loader(path: str) -> Any:
        asked.append(path)
        time.sleep(0.003)
        return np.full(1000, float(path.partition(".")[0]))

    default_loader.__module__ = FOLDER
    folder.default_loader, folder.asked = default_loader, asked  # type: ignore[attr-defined]
    return folder


def test_images_of_torchvision_are_kept_before_the_transforms(torchvision: Any) -> None:
    dataset = Folder(torchvision.default_loader)
    stock = epochs(loader_of(Subset(dataset, range(30)), 0), 4)
    torchvision.asked.clear()
    with live(loader_of(Subset(dataset, range(30)), 0), show_card=False) as loader:
        assert epochs(loader, 4) == stock
        assert dataset.loader is not torchvision.default_loader
    assert dataset.loader is torchvision.default_loader
    assert len(torchvision.asked) <= 2 * 30 + 8 + 1  # from the second epoch on, for it may have been the only one


def test_images_that_do_not_all_fit_are_not_kept(torchvision: Any) -> None:
    dataset, cache = Folder(torchvision.default_loader), Cache(TunerConfig())
    try:
        cache.cut(loader_of(dataset, 0), 3)
        epochs(loader_of(dataset, 0), 1)
        cache.fit(seen(3.0), 3.0 * GB)
        before = cache.used_bytes
        assert before > 40 * 8000  # all of them fit
        small = dataclasses.replace(seen(0.0), resources=Resources(1.0, 1_000_000, 0))
        cache.fit(small, 400_000.0)
        assert dataset.loader is torchvision.default_loader
        assert cache.used_bytes == 0
        (row,) = cache.use().functions
        assert row.why_not == "all images would take 326 kB, and half of the free memory is 250 kB"
    finally:
        cache.close()


def test_an_image_that_is_written_anew_is_read_anew(torchvision: Any) -> None:
    dataset = Folder(torchvision.default_loader)
    with live(loader_of(dataset, 0), show_card=False) as loader:
        epochs(loader, 3)
        torchvision.asked.clear()
        epochs(loader, 1)
        assert torchvision.asked == []
        Path("7.jpg").write_text("another")
        epochs(loader, 1)
        assert torchvision.asked == ["7.jpg"]


def test_a_loader_of_the_users_own_is_left_alone(torchvision: Any) -> None:
    def own(path: str) -> Any:
        return np.zeros(3)

    dataset = Folder(own)
    with live(loader_of(dataset, 0), show_card=False) as loader:
        epochs(loader, 3)
        assert dataset.loader is own


# -- ranks -----------------------------------------------------------------------------------------------------------


def _rank(rank: int, folder: str, told: Any, go_on: Any) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    cache = Cache(TunerConfig(), rank, 2)
    cache.expect(10, 30, 3, is_first=True)
    if rank == 0:
        kept = [decode(number).sum() for number in range(30)]
        told.put((rank, kept, cache.used_bytes))
    assert go_on.wait(60.0)
    if rank == 1:
        begin_s = time.perf_counter()
        kept = [decode(number).sum() for number in range(30)]
        told.put((rank, kept, time.perf_counter() - begin_s))
    told.close()
    told.join_thread()
    torch.distributed.barrier()
    cache.close()
    torch.distributed.destroy_process_group()


def test_the_ranks_of_a_node_share_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    told, go_on = context.Queue(), context.Event()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), told, go_on)) for rank in range(2)]
    for one in ranks:
        one.start()
    first = told.get(timeout=120.0)
    go_on.set()
    second = told.get(timeout=120.0)
    for one in ranks:
        one.join(60.0)
    assert [one.exitcode for one in ranks] == [0, 0]
    assert first[1] == second[1]
    assert first[2] > 30 * 3200
    assert second[2] < 30 * 0.003  # none of it was computed again
