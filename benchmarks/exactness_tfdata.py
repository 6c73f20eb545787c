"""Random changes of running tf.data pipelines, in a plain loop and inside `model.fit`, against the untouched ones.

Each kind of pipeline is built twice from the same seeds; one is iterated as it is, the other while all its numbers are
set at random, between elements and half of the time also from a second thread.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.differences import Differences, compare, exact
from benchmarks.output import arguments, words, write

__all__ = ["fitted", "main", "stress"]

HANG_S, FIT_LIMIT_S = 120, 1800
MOST = 9
"""Largest number set: the pipelines are short, and what is ahead of the consumer should change all the time."""
BACKENDS = ("tensorflow", "torch", "jax")
FITS = Path(__file__).parents[1] / "tests" / "keras_cases.py"


def stress(kind: str, changes: int, seed: int) -> dict[str, Any]:
    """Return the row of one kind of pipeline after at least `changes` random changes in as many epochs as they take.

    Args:
        kind: of `benchmarks.tfdata_kinds.KINDS`.
        changes: numbers to set; each call sets all of a pipeline's.
        seed: of all choices.
    """
    from benchmarks.tfdata_kinds import KINDS, elements, plain
    from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline
    from intune_callbacks.types import Clock

    total, made, epochs, choices = Differences(), 0, 0, random.Random(seed)
    begin = time.perf_counter()
    stock = KINDS[kind]()
    pipeline = DatasetPipeline(KINDS[kind](), clock=Clock())

    def change(generator: random.Random) -> int:
        stages = pipeline.stages()
        pipeline.resize({s.name: generator.randint(s.low, min(s.high, MOST)) for s in stages})
        return len(stages)

    while made < changes:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        stop, beside = threading.Event(), [0]

        def meanwhile(generator: random.Random, stop: threading.Event = stop, beside: list[int] = beside) -> None:
            while not stop.wait(generator.random() * 0.005):
                beside[0] += change(generator)

        thread = threading.Thread(target=meanwhile, args=(random.Random(choices.random()),))
        if choices.random() < 0.5:
            thread.start()
        try:
            delivered = []
            for element in pipeline.dataset:
                delivered.append(_identity(plain(element)))
                made += change(choices)
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
        total.add(compare(delivered, [_identity(element) for element in elements(stock)]))
        made, epochs = made + beside[0], epochs + 1
    faulthandler.cancel_dump_traceback_later()
    pipeline.close()
    return _row(kind, made, total, epochs, time.perf_counter() - begin)


def fitted(backend: str) -> dict[str, Any]:
    """Return the row of a `model.fit` of some thousand steps on one backend of Keras, changed before every batch.

    Raises:
        RuntimeError: the fit failed, with the end of its error output.
    """
    begin = time.perf_counter()
    variables = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(FITS.parents[1])}
    command = [sys.executable, "-W", "ignore", str(FITS), "many"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=FIT_LIMIT_S, env=variables, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr[-2000:]}")
    made = json.loads(run.stdout.splitlines()[-1])["many"]
    plain, tuned = made["plain"], made["tuned"]
    total = compare([_identity(batch) for batch in tuned["seen"]], [_identity(batch) for batch in plain["seen"]])
    row = _row(f"model.fit on {backend}", made["resizes"], total, 2, time.perf_counter() - begin)
    return row | {
        "same_history": tuned["history"] == plain["history"],
        "same_weights": tuned["weights"] == plain["weights"],
    }


def _row(kind: str, changes: int, total: Differences, epochs: int, seconds: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "changes": changes,
        "items": total.items,
        "lost": total.lost,
        "repeated": total.repeated,
        "out_of_order": total.out_of_order,
        "epochs": epochs,
        "seconds": round(seconds, 1),
    }


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _identity(part)) for key, part in sorted(value.items()))
    return tuple(map(_identity, value)) if isinstance(value, (list, tuple)) else value


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line; the exit code is 1 if anything was not exact."""
    parser = arguments("exactness_tfdata", __doc__.split("\n")[0])
    parser.add_argument("--changes", type=int, default=100_000, help="shared among the kinds (default 100000)")
    parser.add_argument("--kinds", type=words, help="names, separated by commas (default all)")
    parser.add_argument("--backends", type=words, default=list(BACKENDS), help="for model.fit; '' leaves it out")
    given = parser.parse_args(argv)
    from benchmarks.tfdata_kinds import KINDS

    kinds = given.kinds or list(KINDS)
    changes = min(given.changes, 40 * len(kinds)) if given.quick else given.changes
    rows = []
    for number, kind in enumerate(kinds):
        rows.append(stress(kind, -(-changes // len(kinds)), given.seed * 1000 + number))
        print(rows[-1], flush=True)
    for backend in [] if given.quick else given.backends:
        rows.append(fitted(backend))
        print(rows[-1], flush=True)
    return write("exactness_tfdata", rows, given.seed, given.json)


if __name__ == "__main__":
    raise SystemExit(0 if exact(main()) else 1)
