"""What would not be exact with helpers has none, and the report says why; errors are those of a stock loader."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import numpy as np  # noqa: E402
from later_rows import MANY, Made, Rows, Run, decode, drawn, plain, same, times  # noqa: E402
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402

from intune_callbacks import later, live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

# Torch warns of more workers than CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# -- refused, with a reason --------------------------------------------------------------------------------------------


def drawn_by_both(dataset: Any, index: int) -> Any:
    random.random()
    time.sleep(getattr(dataset, "pause_s", 0.0))
    return drawn(index)


@later
def by_itself(index: int) -> Any:
    return torch.tensor([float(index), float(np.random.default_rng().random() < 2), time.monotonic()])[:3]


def changed_after(dataset: Any, index: int) -> Any:
    dataset.buffer = getattr(dataset, "buffer", np.zeros(1, np.float32))
    dataset.buffer[0] = index
    return copied(dataset.buffer)


@later
def copied(buffer: Any) -> Any:
    return torch.from_numpy(buffer.copy())


def looked_at(dataset: Any, index: int) -> Any:
    return times(index)["x"]


def left_out(dataset: Any, index: int) -> Any:
    return decode(index) + 1


def not_sent(dataset: Any, index: int) -> Any:
    return called(lambda: index)


@later
def called(fn: Any) -> Any:
    return torch.tensor([float(fn())])


def reads_state(dataset: Any, index: int) -> Any:
    dataset.at = index
    return later(dataset.numbers_at)(index)


class Stateful(Made):
    def numbers_at(self, index: int) -> Any:
        return torch.tensor([float(index - self.at)])


def never(dataset: Any, index: int) -> Any:
    return torch.tensor([float(index)])


@later
def broken(index: int) -> Any:
    if index % 2:
        raise ValueError(f"row {index}")
    return torch.tensor([float(index)])


def caught(dataset: Any, index: int) -> Any:
    try:
        return broken(index)
    except ValueError:
        return torch.tensor([-1.0])


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Made(drawn_by_both), "both draw from the global random state"),
        (Made(changed_after), "differs"),
        (Made(looked_at), "not yielded as they are"),
        (Made(left_out), "not yielded as they are"),
        (Made(not_sent), "cannot be sent to another process"),
        (Stateful(reads_state), "differs"),
        (Made(never), "no sample of a batch came by `later`"),
        (Made(caught), "is caught in the dataset's `__iter__`"),
    ],
    ids=lambda given: given if isinstance(given, str) else given.make.__name__,
)
def test_what_would_not_be_exact_has_none(dataset: Any, why: str) -> None:
    dataset.rows = 160
    run = same(dataset, helped=False, persistent_workers=dataset.make is changed_after)
    assert why in run.why_not
    assert run.stages[0].sequential and run.stages[0].current == 2


class NextEpoch(Rows):
    """From its second epoch on samples depend on what only its workers know."""

    epoch = 0

    def make(self, index: int) -> Any:
        return torch.tensor([float(index + 1000 * (self.epoch > 1))])

    def __iter__(self) -> Any:
        self.epoch += 1
        for index in self.numbers():
            yield later(self.make)(index)


def test_workers_that_live_on_prove_themselves_in_each_epoch() -> None:
    run = same(NextEpoch(), persistent_workers=True)
    assert "differs" in run.why_not


def test_what_is_random_by_itself_has_none() -> None:
    run = Run(DataLoader(Made(lambda dataset, index: by_itself(index)), batch_size=4, num_workers=2), [MANY])
    assert run.helped == 0 and "random by itself" in run.why_not


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_that_copy_nothing(method: str) -> None:
    found = find(DataLoader(Rows(), num_workers=2, multiprocessing_context=method))
    assert f"started by {method}, and helpers need fork" in found.why
    assert found.pipeline is not None and found.pipeline.stages()[0].sequential


def test_other_loaders_have_none() -> None:
    assert "helpers that make batches come and go" in find(DataLoader(Rows(), num_workers=2)).why
    assert "in_order=False" in find(DataLoader(Rows(), num_workers=2, in_order=False)).why
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    assert find(stateful(Rows(), num_workers=2)).pipeline.stages()[0].sequential


# -- errors ------------------------------------------------------------------------------------------------------------


@later
def fails(index: int, at: int) -> Any:
    if index == at:
        raise KeyError(f"row {index}")
    return torch.tensor([float(index)])


@pytest.mark.parametrize("at", [0, 90, 501])
def test_an_error_comes_where_it_comes_in_stock_and_is_the_same(at: int) -> None:
    def failed(sizes: Any) -> Any:
        loader = DataLoader(Made(lambda dataset, index: fails(index, at), 600), batch_size=4, num_workers=2)
        seen: list[Any] = []
        with pytest.raises(KeyError) as raised:
            Run(loader, sizes, hook=lambda run, number: seen.append(number), settle=True)
        return len(seen), str(raised.value).split("\\n")[0].split("Original")[0], "row" in str(raised.value)

    assert failed([MANY]) == failed(None)


@later
def stops(index: int) -> Any:
    if index == 500:
        raise StopIteration
    return torch.tensor([float(index)])


def test_stop_iteration_is_an_error() -> None:
    for sizes in (None, [MANY]):
        with pytest.raises(RuntimeError, match="generator raised StopIteration"):
            Run(
                DataLoader(Made(lambda dataset, index: stops(index), 600), batch_size=4, num_workers=2),
                sizes,
                settle=True,
            )


def test_a_killed_helper_loses_nothing() -> None:
    killed = []

    def kill(run: Run, number: int) -> None:
        if run.pipeline is not None and number in (20, 30):
            for helpers in run.pipeline._helpers.values():
                for pid in helpers.jobs.pool.pids[:2]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    same(Rows(400, 0.002), run={"hook": kill, "epochs": 1})
    assert killed


@later
def kills_helpers(index: int) -> Any:
    if index >= 400 and multiprocessing.current_process().name.startswith("Fork"):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.tensor([float(index)])


def test_a_batch_that_kills_every_helper_ends_the_training() -> None:
    """As it would have ended the worker: it is not tried without end."""
    loader = DataLoader(Made(lambda dataset, index: kills_helpers(index), 800), batch_size=4, num_workers=2)
    with pytest.raises(Exception, match="is killed by signal"):
        Run(loader, [MANY], settle=True)


def test_a_killed_worker_is_torchs_own_error() -> None:
    def kill(run: Run, number: int) -> None:
        if number == 20:
            info = [child for child in multiprocessing.active_children() if "intune" not in child.name]
            os.kill(min(child.pid for child in info), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        Run(DataLoader(Rows(400, 0.002), batch_size=4, num_workers=2), [MANY], hook=kill)


def test_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from intune_callbacks.pipelines.workers.processes import ProcessPool

    def refused(self: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(ProcessPool, "get", refused)
    run = same(Rows(), helped=False)
    assert "no more processes" in run.why_not and run.stages[0].current == 2


def test_given_back_in_mid_epoch() -> None:
    def give_back(run: Run, number: int) -> None:
        if run.pipeline is not None and number == 25:
            run.pipeline.release()

    same(Rows(400), run={"hook": give_back, "epochs": 1})


def test_worker_info_in_a_helper_is_that_of_the_worker() -> None:
    same(Made(lambda dataset, index: who(index)))


@later
def who(index: int) -> Any:
    info = get_worker_info()
    return torch.tensor([float(index), float(info.id), float(info.num_workers), float(info.seed % 1000)])


def test_met_late_it_has_helpers_from_the_next_epoch_on() -> None:
    loader = DataLoader(Rows(400), batch_size=4, num_workers=2)
    stock = [plain(batch) for batch in loader]
    pipeline, iterator = find(loader).pipeline, iter(loader)
    seen = [plain(next(iterator))]
    iterator = pipeline.adopt(iterator)
    assert pipeline.stages()[0].sequential
    seen += [plain(batch) for batch in iterator]
    assert seen == stock
    iterator = pipeline.adopt(iter(loader))
    assert pipeline.resize({"load": 4})["load"] == 4
    assert [plain(batch) for batch in iterator] == stock
    pipeline.close()


@pytest.mark.filterwarnings("ignore")
def test_the_report_says_why_there_are_none() -> None:
    dataset = Made(drawn_by_both, 3000)
    dataset.pause_s = 0.002
    tuned = live(DataLoader(dataset, batch_size=8, num_workers=2), show_card=False, decide_every_s=0.2)
    for _ in tuned:
        pass
    report = tuned.close()
    assert report["stages"][0]["current"] == 2
    assert "no helpers beside them" in report["next"] and "both draw from the global random state" in report["next"]
