"""InTuneCallback in `model.fit` on the TensorFlow backend: arguments, modes, what it logs and measures."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import time
import warnings
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

from busy_machine import three_attempts
from keras_runs import EAGER, KEYS, ROWS, compiled, fit, rows

from intune_callbacks import ConfigError, TunerConfig
from intune_callbacks.errors import install_line
from intune_callbacks.keras import InTuneCallback

pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Spy(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes what hangs on the objects of the `fit` it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: set[str] = set()
        self.epoch_iterator: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        frame: Any = sys._getframe(1)
        while "epoch_iterator" not in frame.f_locals:
            frame = frame.f_back
        found, callbacks = frame.f_locals["epoch_iterator"], frame.f_locals["callbacks"]
        self.attributes |= {f"iterator.{name}" for name in vars(found)}
        self.attributes |= {f"adapter.{name}" for name in vars(found.data_adapter)}
        self.attributes |= {f"callbacks.{name}" for name in vars(callbacks)}
        self.attributes |= {f"dataset.{type(found._distributed_dataset).__name__}"}


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_a_default_that_was_given_is_an_argument() -> None:
    callback = InTuneCallback("tune", warmup_batches=20)
    assert callback.settings.given == {"mode", "warmup_batches"}


def test_arguments_are_those_of_the_config_with_the_same_defaults() -> None:
    parameters = inspect.signature(InTuneCallback.__init__).parameters
    for name, field in TunerConfig.__dataclass_fields__.items():
        if name != "mode":
            assert parameters[name].default == field.default, name
            assert parameters[name].annotation == field.type, name


def test_all_bad_arguments_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTUNE_MODE", "tun")
    with pytest.raises(ConfigError) as caught:
        InTuneCallback(policy="model", warmup_batches=-1, run_dir=3, show_card="yes")  # type: ignore[arg-type]
    given = [problem.split("=")[0] for problem in caught.value.problems]
    assert given == ["INTUNE_MODE", "policy", "warmup_batches", "run_dir", "show_card"]


def test_no_keras_installed_says_what_to_install() -> None:
    code = "import sys; sys.modules['keras'] = None\nimport intune_callbacks.keras"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "MissingPackage" in run.stderr
    assert install_line("keras") in run.stderr


def test_a_model_of_keras_2_is_named_and_what_to_do() -> None:
    model = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})
    with pytest.raises(ConfigError, match=r"Mine: it is one of tf_keras .* over live"):
        InTuneCallback().set_model(type("Mine", (model,), {})())
    InTuneCallback().set_model(keras.Sequential())


def test_keras_stays_asynchronous() -> None:
    # One overridden hook of this name, and Keras waits for the result of each step.
    for name in ("on_train_batch_end", "on_batch_end", "on_test_batch_end", "on_predict_batch_end"):
        assert getattr(InTuneCallback, name) is getattr(keras.callbacks.Callback, name)


# -- modes -------------------------------------------------------------------------------------------------------------


def test_off_leaves_no_trace() -> None:
    without, off, tuned = Spy(), Spy(), Spy()
    fit(without)
    callback = InTuneCallback(mode="off")
    logged = fit(callback, off).history
    assert off.attributes == without.attributes
    assert callback.report == {}
    assert set(logged) == {"loss"}
    fit(InTuneCallback(show_card=False), tuned)
    assert tuned.attributes != without.attributes  # so that the comparison above means something


@pytest.mark.parametrize("mode", ["observe", "advise"])
def test_observe_and_advise_measure_and_change_nothing(mode: str, tmp_path: Path) -> None:
    callback = InTuneCallback(mode=mode, run_dir=str(tmp_path), cpus=8.0, policy="model-jump", **EAGER)
    fit(callback, data=rows(200, 0.006, workers=1))
    report = callback.report
    assert (report["mode"], report["changes"], report["verdict"]) == (mode, 0, "input-bound")
    assert report["before"]["allocation"] == report["after"]["allocation"]
    assert report["before"]["allocation"]["as_row"] == 1
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) > 3
    advised = [decision["granted"] for decision in report["decisions"]]
    assert any(granted.get("as_row", 0) > 1 for granted in advised) == (mode == "advise")


@three_attempts
def test_tune_feeds_a_starved_model(tmp_path: Path) -> None:
    given = EAGER | {"decide_every_s": 0.1, "policy": "model-jump"}
    callback = InTuneCallback(run_dir=str(tmp_path / "run"), cpus=8.0, **given)
    fit(callback, data=rows(1600, 0.006, workers=1))
    report = callback.report
    assert report["frozen"] is None
    assert report["changes"] >= 1
    assert report["after"]["allocation"]["as_row"] > 1
    assert report["after"]["throughput_samples_per_s"] > 1.5 * report["before"]["throughput_samples_per_s"]
    assert report == json.loads((tmp_path / "run" / "report.json").read_text())
    assert "as_row" in report["pipeline"]


@three_attempts
def test_a_second_fit_goes_on_where_the_first_one_ended() -> None:
    given = EAGER | {"decide_every_s": 0.1, "policy": "model-jump"}
    callback, data, model = InTuneCallback(cpus=8.0, **given), rows(800, 0.006, workers=1), compiled()

    def workers(given: Any) -> float:
        history = model.fit(given, verbose=0, steps_per_epoch=3, epochs=1, callbacks=[callback]).history
        return float(history["intune/workers/as_row"][0])

    model.fit(data, verbose=0, callbacks=[callback])
    found = {stage["name"]: stage["current"] for stage in callback.report["stages"]}["as_row"]
    assert found > 1
    assert workers(data) == found
    assert workers(rows(800, workers=1)) == 1  # other data
    assert workers(data) == 1


# -- logs --------------------------------------------------------------------------------------------------------------


def test_every_logger_sees_the_keys_whatever_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    stopping = keras.callbacks.EarlyStopping("intune/wait_frac", mode="min", patience=100)
    given = [log, stopping, InTuneCallback(show_card=False)]
    history = compiled().fit(rows(), epochs=2, verbose=2, callbacks=given).history
    stages = {f"intune/{what}/{name}" for what in ("workers", "window", "queue_fill") for name in ("as_row", "batch")}
    assert {key for key in history if key.startswith("intune/")} == KEYS | stages | {"intune/window/prefetch"}
    assert all(len(values) == 2 and all(isinstance(v, float) for v in values) for values in history.values())
    head, *lines = (tmp_path / "log.csv").read_text().splitlines()
    assert set(history) <= set(head.split(","))
    assert len(lines) == 2
    shown = capsys.readouterr().out
    assert "intune/wait_frac" in shown and "loss" in shown
    assert "intune/workers" not in shown
    assert given[2] is not given[0]  # the user's own list keeps its order
    assert isinstance(given[0], keras.callbacks.CSVLogger)


def test_the_card_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    fit(InTuneCallback(**EAGER | {"show_card": True}), epochs=2)
    assert capsys.readouterr().out.count("InTune") == 1
    fit(InTuneCallback(**EAGER), epochs=2)
    assert capsys.readouterr().out == ""


# -- what is measured --------------------------------------------------------------------------------------------------


class Slow(keras.layers.Layer):  # type: ignore[misc]
    """Takes `step_s` seconds, and tells TensorFlow so."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def call(self, x: Any) -> Any:
        def wait(value: Any) -> Any:
            time.sleep(self.step_s)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)


def slow_fit(callback: Any, step_s: float, batch_s: float, steps_per_execution: int, batches: int = 50) -> Any:
    def load(index: Any) -> Any:
        time.sleep(batch_s)
        return index

    def as_batch(index: Any) -> Any:
        value = tf.cast(tf.ensure_shape(tf.numpy_function(load, [index], tf.int64), []), tf.float32)
        return tf.fill([8, 2], value), tf.fill([8, 1], value)

    data = tf.data.Dataset.range(batches).map(as_batch, num_parallel_calls=1).prefetch(2)
    inputs = keras.Input((2,), batch_size=8)
    model = keras.Model(inputs, keras.layers.Dense(1)(Slow(step_s)(inputs)))
    model.compile(keras.optimizers.SGD(1e-9), "mse", jit_compile=False, steps_per_execution=steps_per_execution)
    return model.fit(data, verbose=0, callbacks=[callback]).history


@pytest.mark.parametrize("steps_per_execution", [1, 5])
@pytest.mark.parametrize(("step_s", "batch_s", "low", "high"), [(0.03, 0.005, 0.0, 0.1), (0.01, 0.06, 0.25, 0.9)])
def test_wait_and_model_time(step_s: float, batch_s: float, low: float, high: float, steps_per_execution: int) -> None:
    callback = InTuneCallback(mode="observe", **EAGER)
    logged = slow_fit(callback, step_s, batch_s, steps_per_execution)
    wait_frac = logged["intune/wait_frac"][0]
    assert low <= wait_frac <= high
    # In a starved run of 50 batches everything but the time of the first call is measured.
    assert (callback.report["steps"], callback.report["samples"]) == (50, 400)
    assert 8 / logged["intune/throughput_samples_per_s"][0] >= 0.95 * max(step_s, batch_s)
    room = min(1.0, max(1e-3, (1.0 - logged["intune/rss_frac"][0]) / 0.08))
    held = math.log(logged["intune/throughput_samples_per_s"][0] / 8 * room) - logged["intune/reward"][0]
    assert -1e-6 < held < 0.1


class Compiles(keras.layers.Layer):  # type: ignore[misc]
    """Takes its time when the model is compiled, and none in a step."""

    def call(self, x: Any) -> Any:
        time.sleep(0.5)
        return x


class OwnClock(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_begin(self, logs: Any = None) -> None:
        self.begin_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.wall_s = time.perf_counter() - self.begin_s


@pytest.mark.parametrize("unknown", [False, True])
@three_attempts
def test_compiling_the_model_is_part_of_the_whole_run(unknown: bool) -> None:
    callback, clock = InTuneCallback(mode="observe", **EAGER), OwnClock()
    inputs = keras.Input((2,), batch_size=8)
    model = keras.Model(inputs, keras.layers.Dense(1)(Compiles()(inputs)))
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(rows(unknown=unknown), verbose=0, callbacks=[clock, callback])
    whole = callback.report["whole"]
    assert clock.wall_s > 0.5
    assert whole["wall_s"] == pytest.approx(clock.wall_s, rel=0.03)
    assert whole["throughput_samples_per_s"] == pytest.approx(ROWS / clock.wall_s, rel=0.03)
    assert whole["paused_s"] > 0.5, "a first call that compiles is neither wait nor the model's time"


def test_the_callback_costs_little() -> None:
    class Timed(InTuneCallback):
        spent_s: list[float] = []  # noqa: RUF012

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            begin_s = time.perf_counter()
            super().on_train_batch_begin(batch, logs)
            self.spent_s.append(time.perf_counter() - begin_s)

    fit(Timed(show_card=False, decide_every_s=3600.0), data=rows(4000), epochs=1)
    typical_s = sorted(Timed.spent_s)[len(Timed.spent_s) // 2]
    assert typical_s < 500e-6  # 25 us where this was written; the limit is for a machine that is busy otherwise


@pytest.mark.parametrize("unknown", [False, True])
def test_the_tuner_learns_how_many_epochs_are_left(unknown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("intune_callbacks.session.tuner.Tuner.expect", lambda _, *given: told.append(given))
    fit(InTuneCallback(show_card=False), data=rows(unknown=unknown), epochs=3)
    assert [epochs_left for _, _, epochs_left in told] == [3, 2, 1]
    assert all((batches is None) == unknown for _, batches, _ in told)
