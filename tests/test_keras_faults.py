"""InTuneCallback in `model.fit` on the TensorFlow backend: what goes wrong, and what it leaves as it was."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
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
from busy_machine import eventually
from keras_runs import EAGER, KEYS, ROWS, compiled, fit, rows

from intune_callbacks.keras import InTuneCallback
from intune_callbacks.session import keras_fit
from intune_callbacks.types import Hint

pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Breaks(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 7:
            raise self.error


def test_closing_what_an_error_left_open_adds_no_thread_for_good() -> None:
    before, closed = set(threading.enumerate()), threading.Event()

    class Open:
        def close(self, interrupted: bool) -> None:
            threading.current_thread()  # as whoever joins a worker asks
            closed.set()

    keras_fit._abandoned(Open())  # type: ignore[arg-type]
    assert closed.wait(30)
    assert eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_after_an_error_in_the_training_everything_is_undone(error: BaseException, tmp_path: Path) -> None:
    callback, model = InTuneCallback(run_dir=str(tmp_path), **EAGER), compiled()
    with pytest.raises(type(error)):
        model.fit(rows(), verbose=0, callbacks=[callback, Breaks(error)])
    error.__traceback__ = None
    assert eventually(lambda: (gc.collect(), callback.report)[1])
    assert callback.report["steps"] >= 5
    assert (tmp_path / "report.json").exists()
    history = model.fit(rows(), verbose=0, callbacks=[callback]).history
    assert callback.report["steps"] > 20
    assert set(history) >= KEYS


def test_a_used_callback_can_be_copied_and_keeps_its_report() -> None:
    callback = InTuneCallback(**EAGER)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(rows(), verbose=0, callbacks=[callback])
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert copied.report == callback.report and copied.report["steps"]
        model.fit(rows(), verbose=0, callbacks=[copied])
        assert copied.report["frozen"] is None


def test_a_loader_is_given_back() -> None:
    pytest.importorskip("torch")
    loader = runs.loader(num_workers=1)
    before = set(vars(loader))
    callback, seen = InTuneCallback(**EAGER), []

    class Looks(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append("_get_iterator" in vars(loader))

    compiled().fit(loader, verbose=0, epochs=2, callbacks=[callback, Looks()])
    assert any(seen)
    assert set(vars(loader)) == before
    assert callback.report["stages"][0]["name"] == "load"


@pytest.mark.parametrize("hook", ["start", "batch_begin", "epoch_begin", "epoch_logs"])
def test_an_error_of_ours_freezes_the_tuner_and_not_the_training(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise OSError("no such luck")

    monkeypatch.setattr(keras_fit.Fit, hook, breaks)
    callback = InTuneCallback(show_card=False)
    with pytest.warns(RuntimeWarning, match="InTune froze, training goes on"):
        history = fit(callback, epochs=2).history
    assert len(history["loss"]) == 2
    if hook != "start":
        assert "no such luck" in callback.report["frozen"]


def test_a_keras_that_looks_otherwise_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_fit, "from_fit", lambda frame: (None, None))
    callback = InTuneCallback(**EAGER)
    history = fit(callback).history
    assert "nothing is measured" in callback.report["why"] and "versions" in callback.report["next"]
    assert "loss" in history


def test_a_loop_that_calls_the_callbacks_itself_is_told_what_to_write() -> None:
    callback = InTuneCallback(**EAGER)
    callbacks = keras.callbacks.CallbackList([callback], model=compiled())
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch in range(3):
        callbacks.on_train_batch_begin(batch)
        callbacks.on_train_batch_end(batch)
    callbacks.on_epoch_end(0, {})
    callbacks.on_train_end()
    assert "live(dataset)" in callback.report["next"] and "version" not in callback.report["next"]
    assert callback.report["frozen"] is None


MIRRORED = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras_runs as runs
from intune_callbacks.keras import InTuneCallback
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = runs.keras.Sequential([runs.keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
callback = InTuneCallback(show_card=False)
history = model.fit(runs.rows(), verbose=0, callbacks=[callback]).history
print("why:", callback.report["why"], "next:", callback.report["next"], callback.report["frozen"], sorted(history))
"""


def test_a_mirrored_dataset_is_left_alone_and_named() -> None:
    variables = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", MIRRORED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables)
    assert run.returncode == 0, run.stderr[-2000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("why:"))
    assert "spread the dataset over the devices" in line
    assert "None" in line and "intune/rss_frac" in line
    assert "intune/wait_frac" not in line  # not measured, not made up


BROKEN = """
import sys
import keras_runs as runs
from intune_callbacks.keras import InTuneCallback
class Breaks(runs.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 7:
            raise ValueError("mine")
runs.fit(InTuneCallback(run_dir=sys.argv[1]), Breaks())
"""


def test_a_script_that_ends_with_an_error_leaves_its_report(tmp_path: Path) -> None:
    variables = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", BROKEN, str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables)
    assert run.returncode == 1 and "ValueError: mine" in run.stderr and "InTune" not in run.stdout
    assert (tmp_path / "run" / "report.json").exists(), run.stderr[-2000:]
    assert not list((tmp_path / "run").glob("*.partial"))


HINT = Hint("as_row has 2 workers for 1 file", kind="files", stage="as_row")


def test_hints_reach_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from intune_callbacks.pipelines.tf import tfdata

    class Hinted(tfdata.DatasetPipeline):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.hints = (HINT,)

    monkeypatch.setattr(tfdata, "DatasetPipeline", Hinted)
    callback = InTuneCallback(**EAGER)
    fit(callback, data=rows())
    assert callback.report["hints"] == [asdict(HINT)]


def test_validation_data_is_never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from intune_callbacks.pipelines.tf import tfdata

    looked_at: list[Any] = []

    class Noted(tfdata.DatasetPipeline):
        def __init__(self, dataset: Any, **given: Any) -> None:
            looked_at.append(dataset)
            super().__init__(dataset, **given)

    monkeypatch.setattr(tfdata, "DatasetPipeline", Noted)
    train, test = rows(), rows()
    fit(InTuneCallback(show_card=False), data=train, validation_data=test, epochs=2)
    assert len(looked_at) == 1
    assert looked_at[0] is train


def test_steps_of_several_batches_see_them_all() -> None:
    def losses(*callbacks: Any) -> list[float]:
        keras.utils.set_random_seed(3)
        model = compiled(steps_per_execution=4)
        model.compile(keras.optimizers.SGD(1e-5), "mse", steps_per_execution=4, jit_compile=False)
        return list(model.fit(rows(), epochs=3, verbose=0, callbacks=list(callbacks)).history["loss"])

    callback = InTuneCallback(show_card=False)
    assert losses(callback) == losses()
    assert callback.report["steps"] == 3 * ROWS // 4
