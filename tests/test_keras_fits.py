"""Fits as strangers make them: a second callback, steps taken together, arrays, one fit after the other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import tensorflow as tf
from keras_runs import EAGER, rows

from intune_callbacks.keras import InTuneCallback
from intune_callbacks.pipelines.tf import build as tf_build
from intune_callbacks.pipelines.tf import graph as tf_graph
from intune_callbacks.pipelines.tf import tfdata
from intune_callbacks.session import fit as session_fit

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
ROWS = 68
X = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)


@pytest.fixture(autouse=True)
def _loaded() -> None:
    keras.utils.set_random_seed(3)  # a shuffle made before the first fit has no other seed than a later one
    tfdata.load()


class Told(keras.callbacks.Callback):  # type: ignore[misc]
    """What Keras tells its callbacks, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.all.append((batch, dict(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.all.append({key: value for key, value in logs.items() if not key.startswith("intune/")})


def told(
    given: dict[str, Any], *callbacks: Any, together: int = 1, kind: type = keras.Sequential
) -> tuple[list[Any], list[str]]:
    """Return what a fit told, and of what it warned."""
    keras.utils.set_random_seed(3)
    model, note = kind([keras.layers.Input((2,)), keras.layers.Dense(1)]), Told()
    model.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=False, steps_per_execution=together)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model.fit(**given, epochs=2, verbose=0, callbacks=[note, *callbacks])
    return note.all, sorted({str(one.message) for one in raised if "ran out of data" in str(one.message)})


def slices() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, X[:, :1]))


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": X[:, :1], "batch_size": 4},
    "a dataset": lambda: {"x": slices().batch(4)},
    "of unknown length": lambda: {"x": slices().filter(lambda x, y: True).batch(4).prefetch(1)},
}


@pytest.mark.parametrize(("kind", "compiled"), [*((kind, True) for kind in GIVEN), ("arrays", False)])
def test_what_cannot_be_taken_apart_is_told_batch_by_batch_as_without_us(
    kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf_graph, "LARGEST_HELD_BYTES", 0)
    if not compiled:
        monkeypatch.setattr(tfdata, "is_compiled", lambda: False)
        monkeypatch.setattr(tf_build, "begin", lambda: None)
    stock, callback = told(GIVEN[kind](), together=5), InTuneCallback(**EAGER)
    assert told(GIVEN[kind](), callback, together=5) == stock
    assert len(stock[0]) == 2 * (4 + 1)  # of 17 batches the last two come alone
    assert callback.report["frozen"] is None and callback.report["stages"] == []
    if compiled:
        assert callback.report["whole"]["samples"] == 2 * ROWS
        assert kind == "arrays" or "MB of tensors are part of the dataset" in callback.report["next"]


def test_arrays_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of 12 MB of them took five times as long as the fit."""
    taken_apart = []
    monkeypatch.setattr(tf_graph.DatasetGraph, "__init__", lambda self, dataset: taken_apart.append(dataset))
    stock, callback = told(GIVEN["arrays"]()), InTuneCallback(**EAGER)
    assert told(GIVEN["arrays"](), callback) == stock
    assert callback.report["whole"]["samples"] == 2 * ROWS and taken_apart == []


def test_a_second_callback_of_a_fit_stands_aside(restless: object) -> None:
    stock = told({"x": rows(unknown=True)})
    first, second = InTuneCallback(**EAGER), InTuneCallback(**EAGER)
    assert told({"x": rows(unknown=True)}, first, second) == stock
    assert first.report["stages"] and first.report["frozen"] is None
    assert second.report["stages"] == [] and "another InTuneCallback" in second.report["why"]


class FirstTwo(tf.data.Dataset):  # type: ignore[misc]
    """A user's class that makes its iterators in a way of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        super().__init__(inner._variant_tensor)

    def _inputs(self) -> list[Any]:
        return [self.inner]

    @property
    def element_spec(self) -> Any:
        return self.inner.element_spec

    def __iter__(self) -> Any:
        return iter(self.inner.take(2))


def test_a_dataset_that_makes_its_own_iterators_keeps_them() -> None:
    stock, callback = told({"x": FirstTwo(rows())}), InTuneCallback(**EAGER)
    assert told({"x": FirstTwo(rows())}, callback) == stock
    assert len(stock[0]) == 2 * (2 + 1)
    assert "FirstTwo" in callback.report["next"]


class Whole(keras.Sequential):  # type: ignore[misc]
    """Compiles its step with the fetch inside, as Keras did before 3.8."""

    traced: ClassVar[list[int]] = []

    def make_train_function(self, force: bool = False) -> None:
        def step(iterator: Any) -> Any:
            self.traced.append(1)
            return self.train_step(next(iterator))

        if self.train_function is None:
            self.train_function = tf.function(step)


@pytest.mark.parametrize("made", ["compiled", "not compiled", "in a way of its own"])
def test_a_step_with_the_fetch_inside_is_compiled_once(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if made == "not compiled":
        monkeypatch.setattr(tfdata, "is_compiled", lambda: False)
        monkeypatch.setattr(tf_build, "begin", lambda: None)
    data = FirstTwo if made == "in a way of its own" else lambda dataset: dataset
    Whole.traced.clear()
    stock, callback = told({"x": data(rows())}, kind=Whole), InTuneCallback(**EAGER)
    times = len(Whole.traced)
    assert told({"x": data(rows())}, callback, kind=Whole) == stock
    assert len(Whole.traced) == 2 * times
    assert callback.report["frozen"] is None
    assert callback.report["whole"]["samples"] == (2 * 96 if made == "compiled" else 0)  # else nobody sees them


def test_the_whole_run_begins_before_our_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback's start takes, be it a full garbage collection inside it, its user waits for."""
    original, spans = session_fit.MachineProbe, dict[str, float]()

    def slow(**options: Any) -> Any:
        time.sleep(0.5)
        return original(**options)

    monkeypatch.setattr(session_fit, "MachineProbe", slow)
    first = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: spans.update(begin=time.perf_counter()))
    last = keras.callbacks.LambdaCallback(on_train_end=lambda logs: spans.update(end=time.perf_counter()))
    callback = InTuneCallback(show_card=False)
    told({"x": slices().batch(4)}, first, callback, last)
    assert callback.report["whole"]["wall_s"] == pytest.approx(spans["end"] - spans["begin"], abs=0.1)
