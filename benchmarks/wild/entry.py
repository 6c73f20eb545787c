"""What one pipeline of the benchmark is: where it comes from, its data, its loader with the authors' numbers, its model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["AUTOTUNE", "POWERS", "WORKERS", "Entry", "Fit", "Numbers", "folder_of"]

AUTOTUNE = -1
"""As ``tf.data.AUTOTUNE``, so that this module does not import TensorFlow."""
POWERS = (1, 2, 4, 8, 16, 32)
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
        framework: ``keras`` or ``lightning``.
        kind: ``tf.data``, ``map-style``, ``iterable``, ``datapipe``, ``nodes`` or ``HF datasets``.
        domain: ``recommender``, ``vision``, ``text``, ``audio`` or ``tabular``.
        repository, commit, path: where the authors' own code stands.
        left_out: what differs from it, in plain words.
        batch: samples of one batch.
        numbers: the authors' numbers; `AUTOTUNE` where they leave it to tf.data.
        make: write the data, ``make(folder, rows)``.
        rows: how many samples `make` writes.
        tiny: how many in the tests: enough for four batches.
        load: ``load(folder, numbers)`` gives what `fit` is called with.
        model: gives a compiled Keras model, or the network of a `benchmarks.wild.fit.Classifier`.
        short, long: fits of about 20 s and 2 min with the authors' numbers on 2 CPUs.
        sweep: values to try per number, where another value keeps samples and order.
        stages: name of a stage in InTune's report -> its number; the names of numbers stand for themselves.
        read_ms: how much longer each read of the data takes; 0 is the local disk.
        could_gain: it waits for data that other numbers could bring sooner: it gets a long fit.
        needs: packages that constraints.txt does not have.
    """

    name: str
    framework: str
    kind: str
    domain: str
    repository: str
    commit: str
    path: str
    left_out: str
    batch: int
    numbers: Numbers
    make: Callable[[Path, int], None]
    rows: int
    tiny: int
    load: Callable[[Path, Numbers], Any]
    model: Callable[[], Any]
    short: Fit
    long: Fit
    sweep: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)
    read_ms: int = 0
    could_gain: bool = False
    needs: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """One line for tables."""
        return f"{self.repository} {self.path} @ {self.commit[:10]}"


def folder_of(entry: Entry, data: Path, rows: int) -> Path:
    """Return the folder of the entry's data; made if it is not there, whole or not at all.

    Args:
        entry: whose data.
        data: folder of all data.
        rows: samples.
    """
    folder = data.resolve() / f"{entry.make.__module__.rsplit('.', 1)[-1]}-{entry.make.__name__}-{rows}-v{VERSION}"
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        entry.make(unfinished, rows)
        unfinished.rename(folder)
    return folder
