"""Trains pipelines of `benchmarks.wild` for some batches, without InTune and with a hasty one, and prints the losses.

Run as a script, with a folder and the names of pipelines of one framework: forks do not go with TensorFlow.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.wild.entry import Fit, folder_of
from benchmarks.wild.fit import train
from benchmarks.wild.registry import ENTRIES

STEPS = 3
HASTY: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 1, "warmup_batches": 1, "show_card": False}


def compared(name: str, data: Path) -> dict[str, Any]:
    """Return what both fits of a pipeline gave."""
    entry = ENTRIES[name]
    folder = folder_of(entry, data, entry.tiny)
    fits = {}
    for mode, given in (("off", {}), ("tune", HASTY)):
        if entry.framework == "keras":
            import keras

            keras.backend.clear_session()
        fits[mode] = train(entry, mode, folder, entry.numbers, Fit(1, STEPS), 0, **given)
    return fits


if __name__ == "__main__":
    print("\n" + json.dumps({name: compared(name, Path(sys.argv[1])) for name in sys.argv[2:]}), flush=True)
    os._exit(0)
