"""Every adapter, fault and moment: samples as stock or an error in its place, and nothing left behind.

The cells and what they promise are in docs/reliability.md, which a test compares with this file.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.workers import wire
from intune_callbacks.pipelines.workers.processes import ProcessPool

pytestmark = pytest.mark.filterwarnings("ignore")
ITEMS, EPOCHS, BOUND_S = 24, 3, 30.0

# What a worker does to one item of one epoch, which children that live on hear of, too.
PLAN: dict[str, Any] = {"at": None, "what": ""}
EPOCH = multiprocessing.Value("i", 0)


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


def work(item: Any) -> Any:
    number = int(item)
    if (EPOCH.value, number) != PLAN["at"]:
        return item
    what = PLAN["what"]
    if what == "raise":
        raise ValueError("the user's own")
    if what == "stop":
        raise StopIteration
    if what == "slow":
        time.sleep(0.4)
    if what == "hang":
        time.sleep(3600.0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return Unsendable() if what == "unsendable" else item


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        return work(index)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=None, **options)


def graph(method: str) -> Loader[Any]:
    mapper = ParallelMapper(IterableWrapper(range(ITEMS)), work, num_workers=2, method=method)  # type: ignore[arg-type]
    return Loader(mapper)


def dataset() -> Any:
    tf = pytest.importorskip("tensorflow")
    numbers = tf.data.Dataset.range(ITEMS)
    return numbers.map(lambda i: tf.numpy_function(work, [i], tf.int64), num_parallel_calls=2)


@dataclass(frozen=True)
class Adapter:
    make: Callable[[], Any]
    forks: bool
    options: dict[str, Any]


ADAPTERS = {
    "DataLoader": Adapter(lambda: loader(num_workers=2), True, {}),
    "DataLoader, kept workers": Adapter(lambda: loader(num_workers=2, persistent_workers=True), True, {}),
    "DataLoader, threads": Adapter(lambda: loader(num_workers=2), False, {"workers_kind": "thread"}),
    "DataLoader, from 0": Adapter(loader, True, {"workers_kind": "process"}),
    "nodes, threads": Adapter(lambda: graph("thread"), False, {}),
    "nodes, processes": Adapter(lambda: graph("process"), True, {}),
    "tf.data": Adapter(dataset, False, {}),
}
MOMENTS = {"first": (0, 0), "middle": (1, 11), "seam": (0, ITEMS - 1), "end": (EPOCHS - 1, ITEMS - 1)}
OF_ITEMS = ("raise", "stop", "slow")
OF_PROCESSES = ("kill", "unsendable")
OF_SYSTEM = ("fork", "thread", "pipe", "memory")
NTH = (1, 2, 5)
USED: set[str] = set()


class Refuses:
    """A call that fails the n-th time it is asked for, and at no other."""

    def __init__(
        self, stock: Callable[..., Any], nth: int, error: Callable[[], BaseException], counts: Callable[..., bool]
    ) -> None:
        self.stock, self.nth, self.error, self.counts, self.seen = stock, nth, error, counts, 0
        self.owner = os.getpid()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if os.getpid() == self.owner and self.counts(*arguments):
            self.seen += 1
            if self.seen == self.nth:
                raise self.error()  # anew: a traceback keeps what it went through
        return self.stock(*arguments, **options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda *a, **k: self(instance, *a, **k)


def refuse(monkeypatch: pytest.MonkeyPatch, what: str, nth: int) -> None:
    def always(*_: Any) -> bool:
        return True

    if what == "fork":
        again = OSError, errno.EAGAIN, "Resource temporarily unavailable"
        monkeypatch.setattr(ProcessPool, "get", Refuses(ProcessPool.get, nth, partial(*again), always))
    elif what == "thread":
        ours = Refuses(
            threading.Thread.start,
            nth,
            partial(RuntimeError, "can't start new thread"),
            lambda t: t.name.startswith("intune-"),
        )
        monkeypatch.setattr(threading.Thread, "start", ours)
    elif what == "pipe":
        context = type(multiprocessing.get_context("fork"))
        none_left = partial(OSError, errno.EMFILE, "Too many open files")
        monkeypatch.setattr(context, "Pipe", Refuses(context.Pipe, nth, none_left, always))
    elif what == "memory":
        monkeypatch.setattr(
            wire.Wire, "receive", Refuses(wire.Wire.receive, nth, partial(MemoryError, "no memory"), always)
        )


def epochs(adapter: Adapter, seed: int) -> Iterator[list[Any]]:
    """What each epoch delivered, an error's type in its place, while the numbers change at each step."""
    source, draw = adapter.make(), random.Random(seed)
    found = find(source, **adapter.options)
    assert found.pipeline is not None, found.why
    pipeline = found.pipeline
    pipeline.prepare()
    source = getattr(pipeline, "dataset", source)
    try:
        for EPOCH.value in range(EPOCHS):
            iterator: Any = pipeline.adopt(iter(source))
            delivered: list[Any] = []
            failed = 0
            while failed < 3 and len(delivered) <= ITEMS:
                try:
                    delivered.append(int(next(iterator)))
                    failed = 0
                except StopIteration:
                    break
                except Exception as error:
                    delivered.append(type(error).__name__)
                    failed += 1
                pipeline.resize({s.name: draw.randint(min(3, s.high), min(6, s.high)) for s in pipeline.stages()})
            yield delivered
            del iterator
    finally:
        pipeline.close()


def leftovers() -> tuple[list[str], int, int]:
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("intune")]
    return threads, len(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))


def run(adapter: Adapter, seed: int = 1) -> list[list[Any]]:
    """Everything that was delivered; fails where anything stays behind, or it takes too long."""
    before, begin_s = leftovers(), time.monotonic()
    seen = list(epochs(adapter, seed))
    ended_s = time.monotonic()
    assert ended_s - begin_s < BOUND_S
    # A queue of torch's own is closed when it likes.
    while (after := leftovers())[:2] != before[:2] or after[2] > before[2] + 1:
        assert time.monotonic() < ended_s + 8.0, (before, after)
        time.sleep(0.02)
    return seen


def in_its_place(delivered: list[Any], at: int) -> bool:
    """True if all is as it would be without a fault, but for an error at one place and what stock leaves out then."""
    if delivered[:at] != list(range(at)) or not isinstance(delivered[at], str):
        return False
    rest = [value for value in delivered[at + 1 :] if not isinstance(value, str)]
    return rest == list(range(at + 1, at + 1 + len(rest)))


@pytest.fixture(autouse=True)
def _plan(request: pytest.FixtureRequest) -> Iterator[None]:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name and name not in USED:
        USED.add(name)
        list(epochs(ADAPTERS[name], 0))  # the first use opens what stays open
    yield
    PLAN.update(at=None, what="")
    EPOCH.value = 0


@pytest.mark.parametrize("name", ADAPTERS)
def test_without_a_fault_all_is_there(name: str) -> None:
    assert run(ADAPTERS[name]) == [list(range(ITEMS))] * EPOCHS


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", [*OF_ITEMS, *OF_PROCESSES])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_fault_of_one_item(name: str, what: str, moment: str) -> None:
    adapter = ADAPTERS[name]
    if what in OF_PROCESSES and not adapter.forks:
        pytest.skip("the item is computed in this process")
    if what not in ("raise", "slow") and moment == "first" and "DataLoader" in name:
        pytest.skip("it comes from the stock loader, which may hang")
    PLAN.update(at=MOMENTS[moment], what=what)
    epoch, at = MOMENTS[moment]
    seen = run(adapter)
    for number, delivered in enumerate(seen):
        if number != epoch or what == "slow":
            # Where stock kept workers died, the loader is of no more use; it says so at each batch.
            assert delivered == list(range(ITEMS)) or (
                what == "kill" and "kept" in name and all(isinstance(value, str) for value in delivered)
            )
        elif what == "stop" and "DataLoader" in name:
            assert delivered == list(range(at)), delivered  # as in a stock loader the epoch ends there
        else:
            assert in_its_place(delivered, at), delivered


@pytest.mark.parametrize("nth", NTH)
@pytest.mark.parametrize("what", OF_SYSTEM)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "tf.data"])
def test_a_fault_of_the_system(name: str, what: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ADAPTERS[name]
    if what != "thread" and not adapter.forks:
        pytest.skip("no process is started")
    refuse(monkeypatch, what, nth)
    seen = run(adapter, seed=nth)
    if what == "memory":
        lost = [(epoch, at) for epoch, part in enumerate(seen) for at, v in enumerate(part) if isinstance(v, str)]
        assert len(lost) <= 1
        for epoch, at in lost:
            assert seen[epoch][at] == "MemoryError" and in_its_place(seen[epoch], at)
            del seen[epoch]
        assert seen == [list(range(ITEMS))] * len(seen)
        return
    assert seen == [list(range(ITEMS))] * EPOCHS


HANGS = """
import multiprocessing, os, sys, time, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import test_fault_matrix as matrix
adapter = matrix.ADAPTERS[sys.argv[2]]
matrix.PLAN.update(at=(1, 5), what="hang")
source = adapter.make()
pipeline = matrix.find(source, **adapter.options).pipeline
pipeline.prepare()
for matrix.EPOCH.value in range(2):
    iterator = pipeline.adopt(iter(source))
    for number in range(matrix.ITEMS if matrix.EPOCH.value == 0 else 5):
        assert int(next(iterator)) == number
        pipeline.resize({stage.name: 3 for stage in pipeline.stages() if stage.unit == "workers"})
    if matrix.EPOCH.value == 0:
        assert next(iterator, None) is None
begin_s = time.monotonic()
pipeline.close()
print(time.monotonic() - begin_s, len(multiprocessing.active_children()), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "tf.data"])
def test_a_worker_that_hangs_is_not_waited_for_at_the_end(name: str) -> None:
    """In a process of its own: threads that hang stay for as long as they do."""
    command = [sys.executable, "-c", HANGS, str(Path(__file__).parent), name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    took_s, children = run.stdout.split()
    if ADAPTERS[name].forks:
        assert float(took_s) < 8.0
        assert int(children) == 0
    else:
        assert float(took_s) < BOUND_S


def test_the_page_lists_the_matrix() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reliability.md").read_text()
    for word in (*OF_ITEMS, *OF_PROCESSES, *OF_SYSTEM, *ADAPTERS, *MOMENTS):
        assert re.search(rf"`{re.escape(word)}`", text), word
