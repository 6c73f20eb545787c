"""Keras's own progress bar and loggers show what they are to show, and Keras stays as fast as without it."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import tensorflow as tf
from keras_runs import BATCH, EAGER, rows

from intune_callbacks.keras import InTuneCallback

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
STEPS = 60


def fit(*callbacks: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=False)
    data = rows(STEPS * BATCH, 0.001, workers=1)
    return model.fit(data, callbacks=list(callbacks), **{"epochs": 2, "verbose": 0} | options)


def printed(capsys: pytest.CaptureFixture[str], *callbacks: Any, **options: Any) -> list[str]:
    """Return what a fit prints, without colours, one entry for each time a bar is drawn."""
    capsys.readouterr()
    fit(*callbacks, **options)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return [drawn for drawn in re.split(r"[\b\r\n]+", text) if drawn.strip()]


def test_the_bar_has_one_field_more(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, InTuneCallback(mode="observe", **EAGER), verbose=1)
    drawn = [line for line in shown if line.lstrip().startswith(tuple("0123456789"))]
    fields = [re.search(r" - in: (\d+)%>(\d+)%", line) for line in drawn]
    assert sum(field is not None for field in fields) > len(drawn) / 2
    known = [field for field in fields if field is not None]
    assert len({field[1] for field in known}) == 1  # what it was at first
    assert all(0 <= int(field[2]) <= 100 for field in known)
    last = [line for line in drawn if line.startswith(f"{STEPS}/{STEPS}")]
    assert all(" - loss: " in line and " - in: " in line for line in (last[0], last[-1]))
    assert "intune/" not in "".join(shown)  # one field


def test_where_the_bar_prints_numbers_only_the_share_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, InTuneCallback(mode="observe", **EAGER), verbose=2)
    assert [len(re.findall(r" - intune/wait_frac: [0-9.e-]+$", line)) for line in shown] == [0, 1, 0, 1]
    assert " - in: " not in "".join(shown) and "intune/workers" not in "".join(shown)


def test_silent_and_off_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, InTuneCallback(mode="observe", **EAGER), verbose=0) == []
    with_us, without = (printed(capsys, *given, verbose=1) for given in ([InTuneCallback(mode="off")], []))
    assert " in: " not in "".join(with_us)
    timeless = [
        [re.sub(r"[0-9.]+(ms|us|s)\b", "", line) for line in (lines[0], lines[-1])] for lines in (with_us, without)
    ]
    assert timeless[0] == timeless[1]


class Looks(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes what hangs on the fit's bar, and whether Keras hands results over in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: set[str] = set()
        self.list: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        frame: Any = sys._getframe(1)
        while "epoch_iterator" not in frame.f_locals:
            frame = frame.f_back
        self.list = frame.f_locals["callbacks"]
        self.hooks |= {name for name, value in vars(self.list._progbar).items() if callable(value)} - {"progbar"}


def test_the_users_own_bar_is_given_back() -> None:
    bar, looks = keras.callbacks.ProgbarLogger(), Looks()
    fit(bar, looks, InTuneCallback(**EAGER), verbose=1)
    assert looks.list._progbar is bar
    assert "on_epoch_end" in looks.hooks  # so that the next line means something
    assert "on_epoch_end" not in vars(bar)
    assert "in" not in bar.progbar._values and "in" not in bar.progbar._values_order


def test_a_bar_that_looks_otherwise_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
        def _maybe_init_progbar(self) -> None:
            super()._maybe_init_progbar()
            for name in ("_values", "_values_order"):
                vars(self.progbar).pop(name, None)
            self.progbar.update = lambda *given, **named: None

    callback = InTuneCallback(mode="observe", **EAGER)
    fit(Other(), callback, verbose=1)
    assert callback.report["frozen"] is None


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_every_key(tmp_path: Path) -> None:
    history = fit(keras.callbacks.TensorBoard(str(tmp_path), write_graph=False), InTuneCallback(**EAGER)).history
    logged: dict[str, list[float]] = {}
    for file in (tmp_path / "train").glob("events.*"):
        for record in tf.data.TFRecordDataset(str(file)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                logged.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    ours = {key for key in history if key.startswith("intune/")}
    assert {"intune/wait_frac", "intune/throughput_samples_per_s", "intune/workers/as_row"} <= ours
    for key in ours:
        assert logged[f"epoch_{key}"] == pytest.approx(history[key], rel=1e-5)
