"""Threads and processes of a torchdata.nodes graph: how many compute, and that they end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
tn = pytest.importorskip("torchdata.nodes")

from test_torchdata import source  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402


@pytest.fixture(autouse=True)
def _collect_here() -> Iterator[None]:
    """A stock mapper that is collected in one of its own threads tries to join itself: collect in this thread only."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


THREADS = """
import sys
import torch
import torchdata.nodes as tn
from intune_callbacks.pipelines.find import find

loader = tn.Loader(tn.ParallelMapper(tn.IterableWrapper(range(64)), torch.tensor, num_workers=2))
pipeline = find(loader).pipeline if sys.argv[1] == "ours" else None
if pipeline is not None:
    pipeline.prepare()
items = iter(loader)
next(items)
print(torch.get_num_threads(), flush=True)
del items
if pipeline is not None:
    pipeline.close()
"""


def test_the_model_computes_on_as_many_threads_as_with_the_stock_mapper() -> None:
    """Each thread of a stock mapper calls `torch.set_num_threads(1)`; a process that is new takes that over."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    said = {
        name: subprocess.run(
            [sys.executable, "-c", THREADS, name],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for name in ("stock", "ours")
    }
    assert said["ours"] == said["stock"]


class Held(tn.BaseNode):
    """The numbers, each epoch anew; the first one ever asked for comes only when it is let go."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.number = count, 0
        self.is_asked, self.is_free = threading.Event(), threading.Event()

    def reset(self, initial_state=None) -> None:
        super().reset(initial_state)
        self.number = initial_state["number"] if initial_state else 0

    def next(self) -> int:
        self.is_asked.set()
        assert self.is_free.wait(30)
        if self.number == self.count:
            raise StopIteration
        self.number += 1
        return self.number - 1

    def get_state(self):
        return {"number": self.number}


@pytest.mark.parametrize(
    "make", [lambda held: tn.ParallelMapper(held, lambda x: x, 1), lambda held: tn.Prefetcher(held, 2)]
)
def test_a_stock_reader_in_a_slow_read_is_waited_for(make) -> None:
    """Lightning makes an iterator only to see whether it can; torchdata waits half a second for its threads."""
    held = Held(20)
    loader = tn.Loader(make(held))
    snapshot = threading.Thread(target=iter, args=(loader,), daemon=True)
    snapshot.start()
    assert held.is_asked.wait(30)
    snapshot.join(30)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    threading.Timer(1.5, held.is_free.set).start()
    assert list(iter(loader)) == list(range(20))
    pipeline.close()


def test_the_processes_of_an_epoch_end_with_it_whoever_holds_its_iterator() -> None:
    """An error that was raised in it may: its finalizer would run late, and find the pipes of its workers closed."""
    mapper = tn.ParallelMapper(source(None), abs, num_workers=2, method="process")
    loader = tn.Loader(mapper)
    pipeline = find(loader).pipeline
    pipeline.prepare()
    next(iter(loader))
    (node,) = (stage.node for stage in pipeline._stages)
    held = node._it
    assert held.engine.pool.pids
    next(iter(loader))
    assert node._it is not held and not held.engine.pool.pids
    pipeline.close()
    assert not node._it.engine.pool.pids
