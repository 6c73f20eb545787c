"""The adapters, faults and moments of the fault matrix, and epochs with such a fault in them."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from intune_callbacks.pipelines.find import find
from intune_callbacks.pipelines.workers import wire
from intune_callbacks.pipelines.workers.processes import ProcessPool

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
