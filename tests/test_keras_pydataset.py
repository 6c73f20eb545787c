"""`model.fit` on a `keras.utils.PyDataset`, TensorFlow backend: live where it has workers, exact, and given back."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tf = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests are of the TensorFlow backend", allow_module_level=True)

import keras_runs as runs
import numpy as np
from busy_machine import eventually
from keras_cases import exact
from keras_runs import EAGER, Numbered, compiled, fit
from processes import children

from intune_callbacks.keras import InTuneCallback
from intune_callbacks.pipelines.find import ONLY_MAP_STYLE
from intune_callbacks.session import keras_source

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "threads": ({"workers": 3, "item_s": 0.002}, {}),
    "in order": ({"workers": 2}, {"shuffle": False}),
    "narrow queue": ({"workers": 2, "max_queue_size": 1}, {}),
    "unlimited queue": ({"workers": 2, "max_queue_size": 0}, {}),
    "processes": ({"workers": 1, "use_multiprocessing": True}, {}),
    "class weight": ({"workers": 2}, {"class_weight": {0: 1.0, 1: 3.0, 2: 2.0}}),
    "validated": ({"workers": 2}, {"validate": True}),
    "one batch": ({"workers": 2, "batches": 1}, {"epochs": 4}),
    "steps": ({"workers": 2, "max_queue_size": 3}, {"steps_per_epoch": 10, "epochs": 3}),
    "endless": (
        {"workers": 2, "max_queue_size": 3, "batches": None},
        {"steps_per_epoch": 10, "epochs": 3, "shuffle": False},
    ),
    "consent": ({}, {"workers_kind": "thread"}),
    "consent to processes": ({}, {"workers_kind": "process"}),
    "threads to processes": ({"workers": 2}, {"workers_kind": "process"}),
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    # What other tests of the same process have left is not ours.
    before = {*threading.enumerate(), *multiprocessing.active_children()}
    yield
    gc.collect()
    assert not [thread.name for thread in {*threading.enumerate()} - before if thread.name == "intune-load"]
    assert not {*multiprocessing.active_children()} - before


@pytest.mark.parametrize("name", EXACT)
def test_random_live_changes_leave_the_training_as_it_was(name: str) -> None:
    given, options = EXACT[name]
    datasets: list[Numbered] = []
    before = {*threading.enumerate()}

    def make() -> Numbered:
        datasets.append(Numbered(**given))
        return datasets[-1]

    made = exact(make, **options)
    # TensorFlow's own threads start and end the workers: `threading` would keep a dummy of each that asks who it is.
    assert not [thread for thread in {*threading.enumerate()} - before if isinstance(thread, threading._DummyThread)]
    stock, ours = datasets
    for what in ("seen", "tested", "history", "weights", "random"):
        assert made["tuned"][what] == made["plain"][what], what
    assert made["frozen"] is None and made["resizes"] >= 4
    assert runs.RestlessTuner.made[0].pipeline.stats().delivered >= len(made["plain"]["seen"]) - 2
    assert ours.ended == stock.ended
    assert vars(ours).keys() == vars(stock).keys()
    if "processes" not in name:
        assert sorted(ours.asked) == sorted(stock.asked)


@pytest.mark.parametrize("given", [{"steps_per_epoch": 10, "epochs": 3}, {"steps_per_epoch": 30, "epochs": 1}])
@pytest.mark.parametrize("batches", [24, None])
def test_with_consent_an_iterator_goes_on_in_the_next_epoch(batches: int | None, given: dict[str, Any]) -> None:
    # What an epoch's end changes is left out: tf.data asks ahead as far as it likes.
    made = exact(lambda: Numbered(batches, dated=False), workers_kind="thread", **given)
    for what in ("seen", "history", "weights", "random"):
        assert made["tuned"][what] == made["plain"][what], what
    assert made["frozen"] is None


@pytest.mark.parametrize("kind", [None, "thread"])
def test_an_error_in_the_dataset_comes_as_without_us(kind: str | None) -> None:
    def raised(mode: str) -> str:
        data = Numbered(workers=1 if kind else 2, breaks_at=9)
        with pytest.raises(Exception, match="no batch 9") as caught:
            fit(InTuneCallback(mode, workers_kind=kind, **EAGER), data=data, shuffle=False)
        return type(caught.value).__name__

    assert raised("tune") == raised("off")


class Breaks(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 7:
            raise ValueError("mine")


def test_after_an_error_in_the_training_no_worker_is_left() -> None:
    callback, data = InTuneCallback(**EAGER), Numbered(workers=2, use_multiprocessing=True)
    with pytest.raises(ValueError, match="mine") as caught:
        fit(callback, Breaks(), data=data)
    caught.value.__traceback__ = None
    del caught
    assert eventually(lambda: (gc.collect(), not children())[1])
    history = fit(callback, data=data).history
    assert callback.report["stages"][0]["name"] == "load"
    assert len(history["loss"]) == 1


def test_training_may_stop_in_mid_epoch() -> None:
    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 5

    data, callback = Numbered(workers=2), InTuneCallback(**EAGER)
    fit(callback, Stops(), data=data)
    assert callback.report["frozen"] is None and callback.report["steps"] == 6


class Evaluates(keras.callbacks.Callback):  # type: ignore[misc]
    """Evaluates and predicts on what is trained on, in the middle of it."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data, self.found = data, list[Any]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 11:
            self.found += [self.model.evaluate(self.data, verbose=0), self.model.predict(self.data, verbose=0).sum()]


def test_somebody_may_evaluate_on_the_dataset_meanwhile() -> None:
    def ran(mode: str) -> Any:
        keras.utils.set_random_seed(5)
        model, data = runs.make_model(), Numbered(workers=2, dated=False)
        other = Evaluates(data)
        model.fit(data, epochs=2, verbose=0, callbacks=[other, InTuneCallback(mode, **EAGER)])
        return model.seen, [float(found) for found in other.found], [np.asarray(w).tolist() for w in model.weights]

    assert ran("tune") == ran("off")


def test_a_starved_model_is_fed_and_a_second_fit_goes_on_with_what_was_found() -> None:
    def spent_s(data: Any, callback: Any) -> float:
        model = compiled()
        model.fit(data, verbose=0, steps_per_epoch=3, callbacks=[InTuneCallback("off")])  # compiles
        begin_s = time.perf_counter()
        model.fit(data, verbose=0, epochs=2, callbacks=[callback])
        return time.perf_counter() - begin_s

    # 200 batches of 40 ms on average: 4 s on two workers.
    data = Numbered(100, item_s=0.02, workers=2)
    before = {name: value for name, value in vars(data).items() if name.startswith("_")}
    callback = InTuneCallback(**EAGER | {"decide_every_s": 0.1, "policy": "model-jump", "cpus": 8.0})
    stock_s, ours_s = spent_s(data, InTuneCallback("off")), spent_s(data, callback)
    report = callback.report
    assert ours_s < stock_s / 1.3
    # What is left of the run behind the change may hold no whole window: its own figures are none then.
    found = next(stage["current"] for stage in report["stages"] if stage["name"] == "load")
    assert found > 2 and report["changes"] >= 1
    assert report["whole"]["throughput_samples_per_s"] > 1.3 * report["before"]["throughput_samples_per_s"]
    history = compiled().fit(data, verbose=0, steps_per_epoch=3, callbacks=[callback]).history
    assert history["intune/workers/load"] == [found]
    assert {name: value for name, value in vars(data).items() if name.startswith("_")} == before


def test_workers_on_a_cluster_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune_callbacks.pipelines.ray.given.check_packages", lambda: None)
    callback = InTuneCallback(**{**EAGER, "workers_kind": "ray", "ray_address": "127.0.0.1:9"})
    fit(callback, data=Numbered(20, workers=2), epochs=1)
    assert callback.report["pipeline"] == ONLY_MAP_STYLE.format("Numbered")
    assert callback.report["frozen"] is None and callback.report["steps"] == 20


def test_without_workers_it_is_left_alone_and_told_so() -> None:
    makers = set()

    class Told(Numbered):
        def __getitem__(self, number: int) -> Any:
            makers.add(threading.current_thread().name)
            return super().__getitem__(number)

    callback = InTuneCallback(**EAGER)
    fit(callback, data=Told(60, item_s=0.005), epochs=2)
    report = callback.report
    assert report["changes"] == 0 and report["frozen"] is None
    assert report["pipeline"] == keras_source.LEFT_ALONE and "set workers=2" in report["pipeline"]
    assert report["stages"][0]["current"] == 0
    # TensorFlow prefetches in a thread of its own.
    assert [hint["kind"] for hint in report["hints"]] == ["ahead"] and "batch itself" not in report["cause"]
    assert not any("intune" in name for name in makers)
    assert "num_workers" not in str([report[key] for key in ("next", "why", "cause", "advice")])


@pytest.mark.parametrize("given", [{}, {"workers": 2}, {"workers": 2, "use_multiprocessing": True}])
def test_observe_and_advise_change_nothing(given: dict[str, Any]) -> None:
    stock = runs.trained(lambda: Numbered(item_s=0.002, **given), [InTuneCallback("off")])
    for mode in ("observe", "advise"):
        callback = InTuneCallback(mode, **EAGER)
        ours = runs.trained(lambda: Numbered(item_s=0.002, **given), [callback])
        for what in ("seen", "history", "weights", "random"):
            assert ours[what] == stock[what], what
        report = callback.report
        assert report["changes"] == 0 and report["frozen"] is None
        assert report["stages"][0]["current"] == (given.get("workers", 0))
        assert report["stages"][0]["when"] == ("epoch" if given else "user")  # as in mode `tune`
        assert report["before"]["wait_frac"] is not None


@pytest.mark.parametrize("given", [{}, {"workers": 2}])
def test_a_keras_that_looks_otherwise_is_timed(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_source, "ENQUEUER", (*keras_source.ENQUEUER, "not_there"))
    monkeypatch.setattr(keras_source, "GENERATORS", (("_not_there",) if not given else (), ()))
    callback = InTuneCallback(**EAGER)
    fit(callback, data=Numbered(**given))
    assert "this version of Keras keeps the workers of a PyDataset where InTune" in callback.report["next"]
    assert callback.report["before"]["wait_frac"] is not None
    assert callback.report["stages"] == []


def test_everything_is_given_back() -> None:
    found: list[Any] = []

    class Looks(InTuneCallback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            import sys

            frame: Any = sys._getframe(1)
            while "epoch_iterator" not in frame.f_locals:
                frame = frame.f_back
            adapter = frame.f_locals["epoch_iterator"].data_adapter
            before = dict(vars(adapter))
            super().on_train_begin(logs)
            found.append((adapter, before, dict(vars(adapter))))

        def on_train_end(self, logs: Any = None) -> None:
            super().on_train_end(logs)
            adapter, before, _ = found[-1]
            found.append({name for name, value in vars(adapter).items() if before.get(name) is not value})

    fit(Looks(**EAGER), data=Numbered(workers=2))
    (_, before, during), left = found
    assert during["enqueuer"] is not before["enqueuer"]
    assert left <= {"_within_epoch", "_output_signature"}
