"""The first fit on a machine: our operations are compiled beside it, and it waits for nothing and loses nothing."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")

import numpy as np
from keras_runs import EAGER, ROWS, make_model, rows

from intune_callbacks.keras import InTuneCallback
from intune_callbacks.pipelines.tf import build as tf_build
from intune_callbacks.pipelines.tf import shipped as tf_shipped
from intune_callbacks.session import fit

EPOCHS = 4
pytestmark = [
    pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Compiler:
    """Takes the place of g++: waits for leave, then hands out the library that is there already."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.leave, script = folder / "leave", folder / "compiler"
        script.write_text(
            f'#!/bin/sh\nwhile [ ! -e "{self.leave}" ]; do sleep 0.05; done\n'
            f'while [ "$1" != "-o" ]; do shift; done\ncp "{library}" "$2"\n'
        )
        script.chmod(0o755)
        self.words = str(script)

    def finish(self) -> None:
        self.leave.touch()
        until_s = time.monotonic() + 60.0
        while not tf_build.library_path().exists():
            assert time.monotonic() < until_s
            time.sleep(0.02)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Compiler(tmp_path, tf_build.build())
    monkeypatch.setenv("CXX", made.words)
    monkeypatch.setenv("INTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tf_shipped, "FOLDER", tmp_path / "built")
    yield made
    made.finish()  # nobody is left behind who waits


class Leave(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Lets the compiler finish in the middle of the second epoch."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()
        self.compiler, self.batches = compiler, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches == ROWS // 4 + 3:
            self.compiler.finish()


def seen(*callbacks: Any, **options: Any) -> list[list[float]]:
    model = make_model()
    dataset = rows().repeat() if options else rows()
    model.fit(dataset, epochs=EPOCHS, callbacks=list(callbacks), verbose=0, **options)
    return model.seen


def test_a_fit_goes_on_while_the_operations_are_compiled_and_is_tuned_from_the_next_epoch_on(
    compiler: Compiler, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "COMPILE_AFTER_S", 0.0)
    stock, callback = seen(), InTuneCallback(**EAGER)
    assert seen(callback, Leave(compiler)) == stock
    report = callback.report
    assert "beside this training" in capfd.readouterr().err
    assert {stage["name"] for stage in report["stages"]} >= {"as_row", "batch", "prefetch"}
    assert (report["steps"], report["samples"]) == (EPOCHS * ROWS // 4, EPOCHS * ROWS)
    assert report["whole"]["epochs"] == EPOCHS and report["frozen"] is None
    assert "are live" in report["pipeline"]


def test_each_epoch_logs_the_same_keys(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one length, as `pandas.DataFrame(history.history)` asks for."""
    monkeypatch.setattr(fit, "COMPILE_AFTER_S", 0.0)
    callbacks = [InTuneCallback(**EAGER), Leave(compiler)]
    history = make_model().fit(rows(), epochs=EPOCHS, callbacks=callbacks, verbose=0).history
    assert callbacks[0].report["stages"]
    assert {key: len(values) for key, values in history.items()} == dict.fromkeys(history, EPOCHS)


class Noting(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Sees whether anybody compiles during the fit."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.begun |= tf_build.library_path().with_suffix(".lock").exists()


def test_a_short_fit_is_left_as_it_is_and_the_compiler_begins_at_its_end(compiler: Compiler) -> None:
    stock, callback, noting = seen(), InTuneCallback(**EAGER), Noting()
    assert seen(callback, noting) == stock
    assert not noting.begun and not tf_build.library_path().exists()
    assert callback.report["stages"] == [] and "intune build-tf" in callback.report["next"]
    compiler.finish()
    again = InTuneCallback(**EAGER)
    assert seen(again) == stock
    assert again.report["stages"]


def test_one_iterator_for_all_epochs_stays_the_users_own(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "COMPILE_AFTER_S", 0.0)
    many = {"steps_per_epoch": ROWS // 4}
    stock, callback = seen(**many), InTuneCallback(**EAGER)
    assert seen(callback, Leave(compiler), **many) == stock
    assert callback.report["stages"] == []


def test_a_compiler_that_cannot_be_started_freezes_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> None:
        raise FileNotFoundError("no sh in this container")

    monkeypatch.setattr(fit, "COMPILE_AFTER_S", 0.0)
    stock, callback = seen(), InTuneCallback(**EAGER)
    with monkeypatch.context() as broken:
        broken.setattr(tf_build, "begin", begin)
        assert seen(callback) == stock
    assert callback.report["frozen"] is None and "no sh in this container" in callback.report["next"]
    tf_build.library_path().touch()  # for the fixture, which has nobody to wait for


def test_arrays_do_not_call_the_compiler(compiler: Compiler) -> None:
    data = np.zeros((ROWS, 2), np.float32)
    callback = InTuneCallback(**EAGER)
    make_model().fit(data, data[:, :1], batch_size=4, epochs=2, callbacks=[callback], verbose=0)
    assert not tf_build.cache_folder().exists()
    assert callback.report["samples"] == 2 * ROWS and "sliced in memory" in callback.report["next"]
    tf_build.cache_folder().mkdir()
    tf_build.library_path().touch()  # for the fixture, which has nobody to wait for


def test_without_a_compiler_nothing_is_touched_and_the_report_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(tf_build, "_compiler", lambda: None)
    stock, callback = seen(), InTuneCallback(**EAGER)
    assert seen(callback) == stock
    assert callback.report["stages"] == [] and "apt install g++" in callback.report["next"]
    assert callback.report["whole"]["throughput_samples_per_s"] > 0.0
