"""`observe` and `advise` under Keras: the same batches, losses, weights and threads as without us, native ones too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import tensorflow as tf
from keras_runs import BATCH, EAGER, RestlessTuner, first_column, loader, rows
from unchanged import MODES, Census, allocations, beyond

from intune_callbacks.keras import InTuneCallback

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
STEPS = 40
DATA: dict[str, Any] = {
    "fixed": lambda: rows(STEPS * BATCH, 0.002, workers=2),
    "automatic": lambda: rows(STEPS * BATCH, 0.002, workers=tf.data.AUTOTUNE),
    "sequential": lambda: rows(STEPS * BATCH, workers=None),
}


class Spy(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.census, self.losses = Census(), list[float]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.census.take()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])


class Remembering(keras.Sequential):  # type: ignore[misc]
    """Remembers the first column of each batch, while its step is plain Python."""

    def train_step(self, data: Any) -> Any:
        if not tf.inside_function():
            self.__dict__.setdefault("seen", []).append(first_column(data))
        return super().train_step(data)


def fit(data: Any, *callbacks: Any, eager: bool = False) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model, spy = Remembering([keras.layers.Dense(1)]), Spy()
    model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=False, run_eagerly=eager)
    model.fit(data, epochs=2, verbose=0, callbacks=[spy, *callbacks])
    return {
        "losses": spy.losses,
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "seen": model.__dict__.get("seen"),
        "alive": spy.census.told(),
    }


@pytest.mark.parametrize("kind", list(DATA))
def test_nothing_is_changed(kind: str, tmp_path: Path) -> None:
    make = DATA[kind]
    fit(make())  # TensorFlow starts threads of its own in the first fit
    off = fit(make(), InTuneCallback("off"))
    assert len(off["losses"]) == 2 * STEPS
    for mode in MODES:
        options = EAGER | {"cpus": 8.0, "policy": "model-jump", "run_dir": str(tmp_path / mode)}
        callback = InTuneCallback(mode, **options)
        ours = fit(make(), callback)
        for part in ("losses", "weights"):
            assert ours[part] == off[part], f"{mode}: {part}"
        assert beyond(ours["alive"], off["alive"]) == {}, mode
        assert callback.report["changes"] == 0 and callback.report["frozen"] is None
        # What is left to AUTOTUNE is changed by tf.data itself, and only followed.
        assert kind == "automatic" or len(allocations(tmp_path / mode)) == 1


def test_every_batch_is_the_same(tmp_path: Path) -> None:
    off = fit(DATA["fixed"](), eager=True)
    assert len(off["seen"]) == 2 * STEPS
    for mode in MODES:
        assert fit(DATA["fixed"](), InTuneCallback(mode, **EAGER), eager=True)["seen"] == off["seen"]


def test_a_torch_loader_keeps_its_own_engine() -> None:
    pytest.importorskip("torch")
    off = fit(loader(), eager=True)
    for mode in MODES:
        given = loader()
        ours = fit(given, InTuneCallback(mode, **EAGER), eager=True)
        assert ours == off
        assert "_get_iterator" not in vars(given)


class Raising(RestlessTuner):
    """Gives every stage more workers than TensorFlow has threads, which would be used before ours."""

    def batch(self, totals: Any, samples: int, exposed_wait_s: float | None = None) -> None:
        self.pipeline.resize({s.name: min(s.high, 2 * (os.cpu_count() or 1) + 2) for s in self.pipeline.stages()})


def test_tune_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: under a tuner that changes something there are native threads of ours."""
    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", Raising)
    fit(DATA["fixed"]())
    off = fit(DATA["fixed"]())
    ours = fit(DATA["fixed"](), InTuneCallback(**EAGER))
    assert ours["losses"] == off["losses"]
    assert beyond(ours["alive"], off["alive"])
