"""With helpers, whatever their number, an iterable-style loader delivers what it delivers without; or it has none."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning_runs as runs  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from later_rows import SETTLED, Made, Rows, Run, decode, plain  # noqa: E402
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402

from intune_callbacks import later, live  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.session import lightning_fit  # noqa: E402

# Torch warns of more workers than CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MANY = {"load": 5, "load.window": 24}


def same(dataset: Any, sizes: Any = (MANY,), helped: bool = True, run: Any = None, **options: Any) -> Run:
    """Compare a training with helpers with a stock one; return the first."""
    options = {"batch_size": 4, "num_workers": 2} | options
    run = {"settle": True} | (run or {})
    torch.manual_seed(0)
    stock = Run(DataLoader(dataset, **options), **run)
    before = runs.running()
    torch.manual_seed(0)
    ours = Run(DataLoader(dataset, **options), list(sizes), **run)
    assert ours.seen == stock.seen
    assert (ours.helped > 0) == helped, ours.why_not
    assert vars(ours.loader).keys() == vars(stock.loader).keys()
    assert ours.loader.collate_fn is stock.loader.collate_fn and ours.loader.worker_init_fn is None
    ours.loader = ours.pipeline = None
    gc.collect()
    assert runs.only(before | set(multiprocessing.active_children() if options.get("persistent_workers") else ()))
    return ours


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    workers=st.integers(1, 4),
    helpers=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    batch_size=st.sampled_from([None, 4, 7]),
    drop_last=st.booleans(),
    persistent=st.booleans(),
    left_at=st.sampled_from([None, 3, 9]),
)
def test_batches_are_the_stock_ones(
    workers: int, helpers: list[int], batch_size: Any, drop_last: bool, persistent: bool, left_at: Any
) -> None:
    options = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": persistent}
    if batch_size is not None:
        options["drop_last"] = drop_last
    stock = Run(DataLoader(Rows(160), **options), epochs=3, left_at=left_at)
    sizes = [{"load": workers + count, "load.window": 2 * (workers + count)} for count in helpers]
    ours = Run(DataLoader(Rows(160), **options), sizes, epochs=3, left_at=left_at)
    assert ours.seen == stock.seen
    assert ours.why_not == ""


def test_helpers_make_batches_and_end_with_the_epoch() -> None:
    run = same(Rows(400), run={"epochs": 3})
    assert run.helped > 10 and run.why_not == ""
    assert run.stages[0].low == 2 and run.stages[0].current == 5 and run.stages[0].high > 5


def test_nothing_is_changed_before_more_is_asked_for() -> None:
    """In the stock stream of random numbers, too."""

    def drawing(dataset: Any, index: int) -> Any:
        return DRAWS(index)

    run = same(Made(drawing), sizes=[{"load": 2}] * 5, helped=False)
    assert run.why_not == ""


@later
def DRAWS(index: int) -> Any:
    return torch.tensor([float(index), random.random(), float(np.random.rand()), float(torch.rand(()))])


def test_random_numbers_do_not_depend_on_where_they_are_drawn() -> None:
    def drawing(dataset: Any, index: int) -> Any:
        return DRAWS(index)

    seen = []
    for load in (3, 8):
        torch.manual_seed(0)
        loader = DataLoader(Made(drawing, 600), batch_size=4, num_workers=2)
        run = Run(loader, [MANY | {"load": load}], epochs=1, settle=True)
        assert run.helped > 0 and run.why_not == ""
        # What was in flight until helpers had proved themselves is in the stock stream; results that came early are
        # not in the window.
        seen.append(run.seen[SETTLED + 3 * MANY["load.window"] :])
    assert len(seen[0]) > 50
    assert seen[0] == seen[1]


# -- what is yielded ---------------------------------------------------------------------------------------------------


@later
def times(index: int, factor: int = 1) -> Any:
    return {"x": torch.tensor([float(index * factor)]), "name": f"row {index}"}


@later
def nothing(index: int) -> Any:
    return None if index % 3 == 0 else torch.tensor([float(index)])


def nested(dataset: Any, index: int) -> Any:
    return {"index": index, "pair": (decode(index), [times(index, factor=2)]), "raw": torch.ones(2)}


def some(dataset: Any, index: int) -> Any:
    return times(index) if index % 3 else {"x": torch.zeros(1), "name": "third"}


def collate_some(items: list[Any]) -> Any:
    return torch.stack([item for item in items if item is not None])


class OwnMethod(Rows):
    """A method, decorated; and one wrapped within `__iter__`."""

    def __init__(self, inside: bool) -> None:
        super().__init__(400)
        self.factor, self.inside = 3, inside

    @later
    def decode(self, index: int) -> Any:
        return torch.tensor([float(index * self.factor)])

    def plainly(self, index: int) -> Any:
        return torch.tensor([float(index * self.factor)])

    def __iter__(self) -> Any:
        make = later(self.plainly) if self.inside else self.decode
        return (make(index) for index in self.numbers())


class Around(Rows):
    """A dataset around another one, of which it knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnMethod(True)

    def __iter__(self) -> Any:
        yield from self.inner


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Made(nested), {}),
        (Made(some), {}),
        (Made(lambda dataset, index: nothing(index)), {"collate_fn": collate_some}),
        (OwnMethod(False), {}),
        (OwnMethod(True), {}),
        (Around(), {}),
        (Rows(), {"batch_size": None, "persistent_workers": True}),
        (Rows(600), {"batch_size": 7, "drop_last": True, "timeout": 60}),
    ],
)
def test_samples_of_any_form(dataset: Any, options: dict[str, Any]) -> None:
    same(dataset, **options)


# -- refused, with a reason --------------------------------------------------------------------------------------------


def drawn_by_both(dataset: Any, index: int) -> Any:
    random.random()
    time.sleep(getattr(dataset, "pause_s", 0.0))
    return DRAWS(index)


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
    assert "calls `later`" in find(DataLoader(Rows(), num_workers=2)).why
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
    with pytest.raises(Exception, match="died while computing"):
        Run(loader, [MANY], settle=True)


def test_a_killed_worker_is_torchs_own_error() -> None:
    def kill(run: Run, number: int) -> None:
        if number == 20:
            info = [child for child in multiprocessing.active_children() if "intune" not in child.name]
            os.kill(min(child.pid for child in info), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        Run(DataLoader(Rows(400, 0.002), batch_size=4, num_workers=2), [MANY], hook=kill)


def test_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from intune_callbacks.pipelines.workers import ProcessPool

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


# -- whole trainings ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_fit_under_lightning(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = runs.NAMESPACES["lightning.pytorch"]

    def losses(*callbacks: Any) -> list[Any]:
        torch.manual_seed(0)
        loader, model = DataLoader(Rows(), 4, num_workers=2, persistent_workers=persistent), runs.make_model(namespace)
        runs.make_trainer(namespace, *callbacks, max_epochs=2).fit(model, loader)
        return model.seen

    stock = losses()
    monkeypatch.setattr(lightning_fit, "Tuner", runs.RestlessTuner)
    runs.RestlessTuner.made.clear()
    assert losses(InTuneCallback(decide_every_s=0.0, show_card=False)) == stock
    (tuner,) = runs.RestlessTuner.made
    assert tuner.resizes > len(stock)
    assert tuner.first[0].low == 2 < tuner.first[0].high


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


@pytest.mark.filterwarnings("ignore")
def test_a_starved_training_is_faster() -> None:
    def trained(loader: Any) -> tuple[list[Any], float]:
        begin_s = time.monotonic()
        seen = [plain(batch) for _ in range(2) for batch in loader]
        return seen, time.monotonic() - begin_s

    def make() -> Any:
        return DataLoader(Rows(3000, 0.004), batch_size=8, num_workers=2, persistent_workers=True)

    stock, stock_s = trained(make())
    tuned = live(make(), show_card=False)
    seen, tuned_s = trained(tuned)
    tuned.close()
    assert seen == stock
    assert tuned_s < 0.8 * stock_s
