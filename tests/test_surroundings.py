"""Worker processes that start in the middle of an epoch work in what the stock ones, which start with it, work in."""

from __future__ import annotations

import errno
import importlib
import itertools
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from around_training import AROUND, SAMPLES, imported
from processes import children
from torch.utils.data import DataLoader, Dataset, default_collate

from intune_callbacks.pipelines.torch.loader import MapLoader
from intune_callbacks.pipelines.workers.surroundings import Surroundings
from intune_callbacks.pipelines.workers.wire import Wire
from intune_callbacks.types import Clock


class Told(Dataset[Any]):
    def __init__(self, *fns: str | Callable[[int], Any]) -> None:
        self.fns = fns  # by their names where the dataset is sent to another interpreter

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        return [index, *((SAMPLES[fn] if isinstance(fn, str) else fn)(index) for fn in self.fns)]


def eventually(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    until_s = time.monotonic() + within_s
    while not true() and time.monotonic() < until_s:
        time.sleep(0.02)
    return true()


def trained(names: list[str], tuned: bool, method: str = "fork") -> list[Any]:
    """Each batch is asked for inside what the training does around it, but the iterator is made outside."""
    loader = DataLoader(Told(*names), batch_size=4, num_workers=2, multiprocessing_context=method)
    pipeline = MapLoader(loader, clock=Clock()) if tuned else None
    seen: list[Any] = []
    if pipeline is not None:
        pipeline.prepare()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = iter(loader)
        for number in range(20):
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(AROUND[name]())
                if pipeline is not None:
                    pipeline.resize({"load": 3 + number % 3 if method == "fork" else 3, "load.window": 8})
                batch = next(batches)
            seen.append([part.tolist() if isinstance(part, torch.Tensor) else part for part in batch])
    finally:
        if pipeline is not None:
            pipeline.close()
    return seen


def test_samples_are_those_of_the_stock_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.txt").write_text("7")
    monkeypatch.chdir(tmp_path)
    assert trained(list(SAMPLES), tuned=True) == trained(list(SAMPLES), tuned=False)


def test_a_pipe_that_the_training_closes_is_at_its_end() -> None:
    """Each worker that started meanwhile would hold it open: whoever reads from it waits for these, too."""
    loader = DataLoader(Told(), batch_size=4, num_workers=2)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        batches = iter(loader)
        next(batches)
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            pipeline.resize({"load": 4})
            assert len(list(itertools.islice(batches, 12))) == 12 and pipeline.stages()[0].current == 4
            assert cat.communicate(b"all", timeout=20.0)[0] == b"all"
        finally:
            cat.kill()
            cat.communicate()
        assert len(list(batches)) == 7
    finally:
        pipeline.close()


def mapped(index: int) -> int:
    with open("/proc/self/maps", errors="replace") as lines:
        return sum("/dev/shm/torch_" in line for line in lines)


def test_a_batch_of_the_stock_workers_is_held_by_nobody_who_starts_meanwhile(tmp_path: Path) -> None:
    """Each would hold what the training has then, until /dev/shm is full; what the training shares itself stays."""
    with open(os.fsencode(tmp_path) + b"/\xff", "w+b") as file:  # a name that is no text, among what is mapped
        file.write(b"here")
        file.flush()
        other = mmap.mmap(file.fileno(), 0)
    loader = DataLoader(Told(mapped), batch_size=4, num_workers=2)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        held += [torch.ones(5000).share_memory_()]
        pipeline.resize({"load": 4})
        *_, (_, many) = batches
        assert pipeline.stages()[0].current == 4 and len(held) == 4
        assert set(many.tolist()) == {1}
        other.close()
    finally:
        pipeline.close()


def test_what_has_got_the_number_of_a_closed_pipe_stays_open() -> None:
    reader, writer = os.pipe()
    seen = os.fstat(writer)
    Surroundings(None, strange={writer: (seen.st_dev, seen.st_ino + 1)}).run(lambda: None)
    os.write(writer, b"here")
    assert os.read(reader, 4) == b"here"
    Surroundings(None, strange={writer: (seen.st_dev, seen.st_ino)}).run(lambda: None)
    assert os.read(reader, 4) == b""  # nobody has the other end
    os.close(reader)
    os.close(writer)


def test_a_wire_that_is_closed_writes_into_no_other_file(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    wire = Wire(ours, None)
    number = wire._descriptor
    with (tmp_path / "other").open("wb") as other:
        wire.close()
        os.dup2(other.fileno(), number)
        with pytest.raises(OSError, match="Bad file descriptor"):
            wire.send(None)
    os.close(number)
    theirs.close()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_message_that_the_collector_takes_leaves_no_word_on_the_console() -> None:
    script = "import gc; from intune_callbacks.pipelines.workers.wire import packed; parts = packed([1])"
    script += "; parts.append(parts); del parts; gc.collect()"
    # Up to Python 3.12 only the development mode says what a later one always says.
    said = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, check=True)
    assert said.stderr == ""


def test_a_module_that_another_thread_is_importing_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the fork that thread holds the module's lock, which nobody would give back."""
    (tmp_path / "imported_slowly.py").write_text("import time\nBEGUN = True\ntime.sleep(0.7)\nVALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    loader = DataLoader(Told(imported), batch_size=4, num_workers=2, timeout=30.0)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    other = threading.Thread(target=importlib.import_module, args=("imported_slowly",))
    try:
        batches = iter(loader)
        next(batches)
        other.start()
        while not hasattr(sys.modules.get("imported_slowly"), "BEGUN"):
            time.sleep(0.01)
        pipeline.resize({"load": 4})
        assert all(batch[1].tolist() == [3] * 4 for batch in batches)
    finally:
        pipeline.close()
        other.join(30.0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_new_interpreter_begins_as_a_stock_one(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.txt").write_text("7")
    monkeypatch.chdir(tmp_path)
    names = ["directory", "environment", "autocast", "numpy", "dtype"]
    assert trained(names, tuned=True, method=method) == trained(names, tuned=False, method=method)


def warned(index: int) -> int:
    shown: list[object] = []
    warnings.showwarning = lambda *told, **how: shown.append(told)
    warnings.warn("the user's", stacklevel=1)
    return len(shown)


def test_what_the_training_was_warned_of_once_does_not_come_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert warned(0) == 1
        pipeline = MapLoader(loader := DataLoader(Told(warned), batch_size=4, num_workers=2), clock=Clock())
        pipeline.prepare()
        try:
            batches = iter(loader)
            pipeline.resize({"load": 3})
            assert not sum(int(shown.sum()) for _, shown in batches)
        finally:
            pipeline.close()


def is_shared(samples: list[Any]) -> Any:
    return default_collate([torch.zeros(2000) for _ in samples]).is_shared()


def test_no_batch_of_ours_is_made_in_shared_memory() -> None:
    """In a container it is small: a stock loader has room for what is in flight, not for one more of each worker."""
    loader = DataLoader(Told(), batch_size=2, num_workers=2, collate_fn=is_shared)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    try:
        batches = iter(loader)
        pipeline.resize({"load": 3})
        made = list(batches)
        assert made[0] and not any(made[-10:])
    finally:
        pipeline.close()


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return index


def test_where_no_more_processes_are_to_be_had_half_of_the_added_ones_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training needs some itself: the workers of a validation could not be started, and it ended."""
    loader = DataLoader(Rows(), batch_size=2, num_workers=2)
    pipeline = MapLoader(loader, clock=Clock())
    pipeline.prepare()
    stock, most = os.fork, 8

    def fork() -> int:
        if children() >= most:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return stock()

    monkeypatch.setattr(os, "fork", fork)
    try:
        batches = iter(loader)
        seen = [next(batches)]
        pipeline.resize({"load": 12})
        seen += itertools.islice(batches, 60)
        assert eventually(lambda: children() <= most // 2 + 1)
        assert (
            2 < pipeline.stages()[0].current == pipeline.stages()[0].high < most
            and "BlockingIOError" in pipeline.why_not
        )
        assert len(list(DataLoader(Rows(), batch_size=100, num_workers=2))) == 4
        assert torch.cat([*seen, *batches]).tolist() == list(range(400))
    finally:
        pipeline.close()
