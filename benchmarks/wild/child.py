"""One fit in a fresh process: ``python -m benchmarks.wild.child NAME MODE DATA``; its last line is JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.wild.entry import Fit, folder_of
from benchmarks.wild.fit import MODES, train
from benchmarks.wild.registry import ENTRIES

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Make the data (mode ``make``), or train once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wild.child", description=__doc__)
    parser.add_argument("name", choices=sorted(ENTRIES))
    parser.add_argument("mode", choices=("make", *MODES))
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--numbers", type=json.loads, default={}, help="instead of the authors', as a JSON object")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    entry = ENTRIES[given.name]
    folder = folder_of(entry, given.data, given.rows or entry.rows)
    if given.mode == "make":
        print(json.dumps({"folder": str(folder)}), flush=True)
        return
    unknown = set(given.numbers) - entry.settable
    if unknown:
        parser.error(f"{entry.name} has no number {sorted(unknown)}, only {sorted(entry.settable)}")
    fit = Fit(given.epochs, given.steps)
    result = train(entry, given.mode, folder, {**entry.numbers, **given.numbers}, fit, given.seed)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
    # What the frameworks do at exit is not of interest here, and must not hold up the next run.
    sys.stdout.flush()
    os._exit(0)
