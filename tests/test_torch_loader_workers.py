"""The workers of a DataLoader that is being resized: what they see and draw, how they fail, and that they end."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    get_worker_info,
)
from torch_squares import Squares, key  # noqa: E402

from intune_callbacks import WorkerDied  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402


class Noisy(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int):
        return torch.rand(1).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("workers", [1, 3])
def test_random_state_belongs_to_the_batch(workers: int) -> None:
    def run(workers: int) -> list:
        torch.manual_seed(0)
        loader = DataLoader(Noisy(), batch_size=4, num_workers=0)
        pipeline = find(loader, workers_kind="process").pipeline
        iterator = pipeline.adopt(iter(loader))
        pipeline.resize({"load": workers, "load.window": 6})
        out = [key(batch) for batch in iterator]
        pipeline.close()
        return out

    drawn = run(workers)
    assert drawn == run(2)
    assert len({tuple(part) for batch in drawn for part in batch}) == 3 * len(drawn)


def init_value(worker_id: int) -> None:
    os.environ["INTUNE_TEST_WORKER"] = str(worker_id)


class SeesWorker(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int):
        assert get_worker_info().id == int(os.environ["INTUNE_TEST_WORKER"])
        return i


def test_worker_init_fn_and_worker_info() -> None:
    loader = DataLoader(SeesWorker(), batch_size=2, num_workers=1, worker_init_fn=init_value)
    pipeline = find(loader, workers_kind="process").pipeline
    assert [b.tolist() for b in pipeline.adopt(iter(loader))] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    pipeline.close()


class Faulty(Squares):
    def __init__(self, bad: int, how: str) -> None:
        super().__init__(40)
        self.bad, self.how = bad, how

    def __getitem__(self, i: int):
        if i == self.bad and self.how == "raise":
            raise KeyError("the user's own error")
        if i == self.bad and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if i == self.bad and self.how == "hang":
            time.sleep(30)
        return super().__getitem__(i)[0]


def consume(pipeline, iterator):
    """Return (batches before the error, error, batches after it)."""
    before, after, error = [], [], None
    while True:
        try:
            (before if error is None else after).append(next(iterator).tolist())
        except StopIteration:
            pipeline.close()
            return before, error, after
        except Exception as raised:
            assert error is None
            error = raised


def adopted(dataset, **arguments):
    loader = DataLoader(dataset, batch_size=4, **arguments)
    pipeline = find(loader, workers_kind="process").pipeline
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 2, "load.window": 4})
    return pipeline, iterator


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_surfaces_at_its_batch_with_the_workers_traceback(num_workers: int) -> None:
    before, error, after = consume(*adopted(Faulty(13, "raise"), num_workers=num_workers))
    assert len(before) == 3 and before[-1] == [8, 9, 10, 11]
    # With no workers of the user's it is the training that raised it, at last.
    assert isinstance(error, KeyError) and ("__getitem__" in str(error)) == bool(num_workers)
    assert after == [[i, i + 1, i + 2, i + 3] for i in range(16, 40, 4)]


def test_a_killed_worker_is_an_error_at_its_batch_and_training_could_go_on() -> None:
    before, error, after = consume(*adopted(Faulty(13, "kill")))
    assert len(before) == 3
    assert isinstance(error, WorkerDied) and isinstance(error, RuntimeError)
    assert re.match(r"DataLoader worker \(pid \d+\) is killed by signal: Killed\. ", str(error))
    assert after == [[i, i + 1, i + 2, i + 3] for i in range(16, 40, 4)]


def test_a_hanging_worker_times_out_and_closing_does_not_wait_for_it() -> None:
    pipeline, iterator = adopted(Faulty(13, "hang"), num_workers=1, timeout=1)
    got = [next(iterator).tolist() for _ in range(3)]
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iterator)
    begin_s = time.monotonic()
    pipeline.close()
    assert time.monotonic() - begin_s < 8 and got[-1] == [8, 9, 10, 11]


def test_nothing_outlives_an_iterator_that_is_dropped() -> None:
    _pipeline, iterator = adopted(Squares())
    next(iterator)
    children = iterator.children.pool.pids
    assert children
    del iterator
    assert not [t for t in threading.enumerate() if t.name.startswith("intune-")]
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_parked_children_are_used_again() -> None:
    pipeline, iterator = adopted(Squares(400))
    next(iterator)
    pipeline.resize({"load": 4, "load.window": 8})
    for _ in range(10):
        next(iterator)
    children = set(iterator.children.pool.pids)
    pipeline.resize({"load": 1})
    for _ in range(20):
        next(iterator)
    pipeline.resize({"load": 4})
    for _ in range(10):
        next(iterator)
    assert set(iterator.children.pool.pids) == children and len(children) == 4
    pipeline.close()
