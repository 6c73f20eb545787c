"""What one pipeline of the benchmark is: its source, its data, the authors' numbers, how long it is trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["AUTOTUNE", "CALLS", "WORKERS", "Entry", "Fit", "Numbers", "folder_of"]

AUTOTUNE = -1
"""As ``tf.data.AUTOTUNE``, so that this module does not import TensorFlow; 0 is a stage that is not parallel."""
CALLS = (1, 2, 4, 8, 16, 32)
WORKERS = (0, 1, 2, 4, 8, 16)
VERSION = 1
"""Of the data; another one is made anew."""

Numbers = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Fit:
    """How long to train.

    Args:
        epochs: passes.
        steps: batches of one epoch; None is the whole data.
    """

    epochs: int = 1
    steps: int | None = None


@dataclass(frozen=True)
class Entry:
    """One public input pipeline.

    Args:
        name: short and unique.
        code: ``module.stem``: where ``stem_data(folder, rows)`` writes the data, ``stem(folder, numbers, batch)`` gives
            what `fit` is called with, and ``stem_model()`` a compiled Keras model or a network for `Recorded`.
        kind: ``tf.data``, ``map-style``, ``iterable``, ``datapipe``, ``nodes`` or ``HF datasets``.
        domain: ``recommender``, ``vision``, ``text``, ``audio`` or ``tabular``.
        repository, commit, path: the authors' own code.
        left_out: what differs from it, in plain words.
        batch: samples of one batch.
        numbers: the authors' numbers; `AUTOTUNE` where they leave it to tf.data.
        rows: samples of the data.
        tiny: samples in the tests, enough for some batches.
        trial: a fit of 3 to 30 s on 2 CPUs; it says how long the measured ones are on the machine at hand.
        sweep: values to try per number, where other values keep samples and order.
        stages: stage in InTune's report -> its number; "" is none of the authors' own, ``+prefetch`` a prefetch at the
            end where they have none; the others are numbers of the same name.
        read_ms: how much longer each read of the data takes; 0 is the local disk.
        could_gain: it waits for data that other numbers could bring sooner: it gets long fits.
        needs: packages that constraints.txt does not have.
    """

    name: str
    code: str
    kind: str
    domain: str
    repository: str
    commit: str
    path: str
    left_out: str
    batch: int
    numbers: Numbers
    rows: int
    tiny: int
    trial: Fit
    sweep: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)
    read_ms: int = 0
    could_gain: bool = False
    needs: tuple[str, ...] = ()

    @property
    def framework(self) -> str:
        """``keras`` or ``lightning``."""
        return "keras" if self.kind == "tf.data" else "lightning"

    @property
    def settable(self) -> set[str]:
        """Names of the numbers that can be given."""
        more = {"+prefetch"} if self.framework == "keras" else {"prefetch_factor", "persistent_workers"}
        return set(self.numbers) | more

    def make(self, folder: Path, rows: int) -> None:
        """Write the data."""
        self._part("_data")(folder, rows)

    def load(self, folder: Path, numbers: Numbers) -> Any:
        """Return the loader or dataset with these numbers."""
        data = self._part("")(folder, numbers, self.batch)
        return data.prefetch(numbers["+prefetch"]) if "+prefetch" in numbers else data

    def model(self) -> Any:
        """Return the model."""
        return self._part("_model")()

    def _part(self, ending: str) -> Callable[..., Any]:
        module, stem = self.code.split(".")
        part: Callable[..., Any] = getattr(import_module(f"benchmarks.wild.{module}"), stem + ending)
        return part


def folder_of(entry: Entry, data: Path, rows: int) -> Path:
    """Return the folder of the entry's data; made if it is not there, whole or not at all.

    Args:
        entry: whose data.
        data: folder of all data.
        rows: samples.
    """
    folder = data.resolve() / f"{entry.name}-{rows}-v{VERSION}"
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        entry.make(unfinished, rows)
        unfinished.rename(folder)
    return folder
