"""The cases that are the same on any backend of Keras.

As a script it runs those named on its command line on the backend of ``KERAS_BACKEND`` and prints them as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from keras_runs import (
    BATCH,
    EAGER,
    ROWS,
    Numbered,
    Pages,
    RestlessTuner,
    Settles,
    generator,
    keras,
    loader,
    make_model,
    rows,
    trained,
)

from intune_callbacks.keras import InTuneCallback
from intune_callbacks.session import fit


def exact(make_data: Callable[[], Any], workers_kind: str | None = None, **options: Any) -> dict[str, Any]:
    """The same training without us and with random changes all the time."""
    plain = trained(make_data, [InTuneCallback(mode="off"), Settles()], **options)
    RestlessTuner.made.clear()
    tuner, fit.Tuner = fit.Tuner, RestlessTuner  # type: ignore[misc, assignment]
    try:
        callback = InTuneCallback(show_card=False, max_workers=6, decide_every_s=0.0, workers_kind=workers_kind)
        tuned = trained(make_data, [callback], **options)
    finally:
        fit.Tuner = tuner  # type: ignore[misc]
    made = RestlessTuner.made[0]
    return {
        "plain": plain,
        "tuned": tuned,
        "resizes": made.resizes,
        "samples": made.samples,
        "frozen": callback.report["frozen"],
    }


def starved() -> dict[str, Any]:
    """40 ms a batch of data with one worker, a small compiled model."""
    callback = InTuneCallback(mode="observe", **EAGER)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    history = model.fit(rows(160, 0.01, workers=1), epochs=2, verbose=0, callbacks=[callback]).history
    return {"report": callback.report, "logged": {k: v for k, v in history.items() if k.startswith("intune/")}}


def fed() -> dict[str, Any]:
    """A model of 12 ms a step on data that is ready."""
    callback = InTuneCallback(mode="observe", **EAGER)
    made = trained(rows, [callback], 0.012, epochs=2)
    return {"report": callback.report, "logged": made["logged"]}


def validated() -> dict[str, Any]:
    """Validation on the very dataset that is trained on, with a pause that is no step."""

    class Pausing(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_test_begin(self, logs: Any = None) -> None:
            time.sleep(0.3)

    callback = InTuneCallback(mode="observe", **EAGER)
    made = trained(rows, [Pausing(), callback], 0.005, validate=True)
    return {**made, "report": callback.report}


def unseeded() -> list[str]:
    """What a tuned fit on a loader has imported; `keras.utils.set_random_seed` alone would import TensorFlow."""
    callback = InTuneCallback(**EAGER | {"policy": "dqn"})
    make_model().fit(loader(), verbose=0, epochs=2, callbacks=[callback])
    assert callback.report["frozen"] is None and callback.report["stages"]
    return sorted({"torch", "tensorflow"} & set(sys.modules))


def others() -> dict[str, Any]:
    """What is not tunable is measured and named."""
    reports = {}
    x, y = np.ones((ROWS, 2), np.float32), np.ones((ROWS, 1), np.float32)
    kinds = {
        "pages": lambda: {"x": Pages()},
        "generator": lambda: {"x": generator()},
        "arrays": lambda: {"x": x, "y": y},
    }
    for kind, make in kinds.items():
        callback = InTuneCallback(**EAGER)
        model = make_model()
        model.fit(**make(), batch_size=BATCH if kind == "arrays" else None, verbose=0, callbacks=[callback])
        reports[kind] = callback.report
    return reports


CASES: dict[str, Callable[[], Any]] = {
    "dataset": lambda: exact(rows),
    "validated_dataset": lambda: exact(rows, validate=True),
    "unknown": lambda: exact(lambda: rows(unknown=True)),
    "steps_per_epoch": lambda: exact(lambda: rows().repeat(), steps_per_epoch=10, epochs=3),
    "class_weight": lambda: exact(
        lambda: rows().map(lambda x, y: (x, y // 64)), class_weight={0: 1.0, 1: 3.0}, epochs=1
    ),
    "loader": lambda: exact(loader),
    "loader_workers": lambda: exact(lambda: loader(num_workers=2)),
    "pydataset": lambda: exact(lambda: Numbered(workers=3, item_s=0.001)),
    "pydataset_steps": lambda: exact(lambda: Numbered(workers=2, max_queue_size=3), steps_per_epoch=10, epochs=4),
    "pydataset_endless": lambda: exact(
        lambda: Numbered(None, workers=2, max_queue_size=3), steps_per_epoch=10, epochs=3, shuffle=False
    ),
    "pydataset_processes": lambda: exact(lambda: Numbered(workers=1, use_multiprocessing=True)),
    "pydataset_consent": lambda: exact(Numbered, workers_kind="thread"),
    "many": lambda: exact(lambda: rows(8000), epochs=2),  # by hand: 20,000 changes, some minutes
    "starved": starved,
    "fed": fed,
    "validated": validated,
    "others": others,
    "unseeded_loader": unseeded,
    "loaded": lambda: sorted({"torch", "tensorflow"} & set(sys.modules)),
}

if __name__ == "__main__":
    print("\n" + json.dumps({name: CASES[name]() for name in sys.argv[1:]}))
