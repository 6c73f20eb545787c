"""How much is kept: what windows and workers leave; torchvision's images all or none; once for all ranks of a node."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_items import GB, decode, epochs, loader_of, seen
from torch.utils.data import Dataset, Subset

from intune_callbacks import TunerConfig, live
from intune_callbacks.cache.images import FOLDER
from intune_callbacks.cache.pure import ADDRESS
from intune_callbacks.session.cache import Cache
from intune_callbacks.types import Resources


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
        time.sleep(0.01)
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
    assert second[2] < 30 * 0.01  # none of it was computed again
