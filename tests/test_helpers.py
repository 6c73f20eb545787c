"""With helpers, whatever their number, an iterable-style loader delivers what it delivers without; or it has none."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning_runs as runs  # noqa: E402
from busy_machine import eventually  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from later_rows import MANY, SETTLED, Made, Rows, Run, decode, drawn, plain, same, times  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from intune_callbacks import later, live  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.pipelines.torch.helpers import Relay  # noqa: E402

# Torch warns of more workers than CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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
        return drawn(index)

    run = same(Made(drawing), sizes=[{"load": 2}] * 5, helped=False)
    assert run.why_not == ""


def test_random_numbers_do_not_depend_on_where_they_are_drawn() -> None:
    def drawing(dataset: Any, index: int) -> Any:
        return drawn(index)

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
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", runs.RestlessTuner)
    runs.RestlessTuner.made.clear()
    assert losses(InTuneCallback(decide_every_s=0.0, show_card=False)) == stock
    (tuner,) = runs.RestlessTuner.made
    assert tuner.resizes > len(stock)
    assert tuner.first[0].low == 2 < tuner.first[0].high


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


def test_the_collector_may_end_the_thread_that_reads_results_in_that_very_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing:
        def get(self, block: bool, timeout: float) -> Any:
            raise RuntimeError("a worker has ended")

    stock = threading._allocate_lock

    def collected() -> Any:
        """A thread that begins to wait for an event makes a lock, which may call the collector, inside the event's."""
        if threading.current_thread().name == "intune-results":
            relay.ended.set()
        return stock()

    relay = Relay(Failing(), lambda number, data: data)
    monkeypatch.setattr(threading, "_allocate_lock", collected)
    with pytest.raises(RuntimeError, match="a worker has ended"):
        relay.get()
    time.sleep(0.3)
    monkeypatch.undo()
    ending = threading.Thread(target=relay.ended.set, daemon=True)
    ending.start()
    assert eventually(lambda: not relay._thread.is_alive() and not ending.is_alive(), within_s=20.0)
