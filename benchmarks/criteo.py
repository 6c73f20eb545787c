"""Criteo ingestion: CPU time per row from files to batches, ours beside what else there is, files in the page cache.

Each measurement is a fresh process. It first reads a small sample, which imports and compiles everything and is
compared with the plain parser row by row, then all rows under the clock. CPU time is that of the process and of all
processes below it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.criteo_rows import TABLE_ROWS, Arrays
from benchmarks.criteo_systems import CACHED, SYSTEMS, System, keep
from benchmarks.output import arguments, words, write
from dlrm_examples.convert import convert
from dlrm_examples.criteo.tsv import CATEGORIES, Block, parse_block_slowly
from dlrm_examples.generate import generate
from intune_callbacks.errors import MissingPackage

__all__ = ["child", "main", "measure", "prepare"]

BATCH_SIZE = 24_096
SHARDS, SLOW_SHARDS = 8, 2
SLOW_ROWS, SAMPLE_ROWS = 60_000, 3_000
TIMEOUT_S = 300.0
SAMPLE_EVERY_S = 0.2


def prepare(folder: Path, rows: int, seed: int, formats: Sequence[str]) -> None:
    """Make the data that is not there: all rows, the rows for the slow systems, and a sample, in each format."""
    sets = {"full": (rows, SHARDS), "slow": (min(rows, SLOW_ROWS), SLOW_SHARDS), "sample": (SAMPLE_ROWS, SLOW_SHARDS)}
    for name, (count, shards) in sets.items():
        files = generate(folder / name / "tsv", rows=count, shards=shards, seed=seed + (name == "sample"))
        for target in formats:
            done = folder / name / target / ".done"
            if target == "tsv" or (done.exists() and done.read_text() == f"{count} {seed}"):
                continue
            with contextlib.suppress(MissingPackage):
                for file in files:
                    if target == CACHED:
                        keep(file, folder / name / target)
                    else:
                        convert(file, folder / name / target, target)
                done.write_text(f"{count} {seed}")


def _files(folder: Path, name: str, target: str) -> list[str]:
    return sorted(str(path) for path in (folder / name / target).iterdir() if path.name.startswith("shard-"))


class _Watch:
    """CPU seconds and peak memory of this process and all below it."""

    def __init__(self) -> None:
        self._process, self._stop = psutil.Process(), threading.Event()
        self.peak_rss_bytes = 0

    def __enter__(self) -> _Watch:
        self._before_s, self._begin_s = self._cpu_s(), time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._begin_s, self._cpu_s() - self._before_s
        self._stop.set()
        self._thread.join()

    def _family(self) -> Iterator[psutil.Process]:
        yield self._process
        with contextlib.suppress(psutil.Error):
            yield from self._process.children(recursive=True)

    def _cpu_s(self) -> float:
        total = time.process_time()  # psutil counts in ticks of 10 ms, and a short run has none
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.children_user + times.children_system  # of children that have ended
                total += 0.0 if process == self._process else times.user + times.system
        return total

    def _sample(self) -> None:
        while True:
            rss = 0
            for process in self._family():
                with contextlib.suppress(psutil.Error):
                    rss += process.memory_info().rss
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
            if self._stop.wait(SAMPLE_EVERY_S):
                return


def same_rows(batches: Sequence[Arrays], files: Sequence[str]) -> bool:
    """Tell whether batches hold the rows of TSV files, in any order, as the plain parser reads them."""
    labels, dense, categories = (np.concatenate(column) for column in zip(*batches, strict=True))
    slow = [parse_block_slowly(Block(f, 0, Path(f).read_bytes()), (TABLE_ROWS,) * CATEGORIES) for f in files]
    wanted = [np.concatenate([getattr(part, name) for part in slow]) for name in ("labels", "dense", "categories")]
    if [array.shape for array in (labels, dense, categories)] != [array.shape for array in wanted]:
        return False
    mine, other = (np.lexsort((*columns.T, marks)) for marks, columns in ((labels, categories), (wanted[0], wanted[2])))
    return (
        np.array_equal(labels[mine], wanted[0][other])
        and np.array_equal(categories[mine], wanted[2][other])
        and np.allclose(dense[mine], wanted[1][other], rtol=1e-6, atol=1e-6)
    )


def child(number: int, threads: int, folder: Path) -> dict[str, Any]:
    """Run one system in this process and return what was measured.

    Args:
        number: which of `SYSTEMS`.
        threads: threads or workers it may use.
        folder: what `prepare` filled.
    """
    system = SYSTEMS[number]
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    sample = list(system.run(_files(folder, "sample", system.format), 1_000, threads))
    equal = same_rows(sample, _files(folder, "sample", "tsv"))
    files = _files(folder, "slow" if system.slow else "full", system.format)
    rows = 0
    with _Watch() as watch:
        for labels, _, _ in system.run(files, BATCH_SIZE, threads):
            rows += len(labels)
    return {
        "rows": rows,
        "equal": equal,
        "cpu_s": watch.cpu_s,
        "wall_s": watch.wall_s,
        "peak_rss_bytes": watch.peak_rss_bytes,
    }


def missing(system: System) -> list[str]:
    """Return the packages a system lacks."""
    return [package for package in system.needs if importlib.util.find_spec(package) is None]


def measure(number: int, threads: int, folder: Path) -> dict[str, Any]:
    """Run one system in a fresh process; ``error`` says what went wrong."""
    given = [str(number), str(threads), str(folder)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--child", *given],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIMEOUT_S:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][-200:]}
    return found


def summary(system: System, threads: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one system: medians over its runs, and the least CPU time."""
    row: dict[str, Any] = {"system": system.name, "format": system.format, "threads": threads}
    good = [run for run in runs if "error" not in run]
    if len(good) < len(runs):
        row["error"] = next(run["error"] for run in runs if "error" in run)
    if good:
        cpu_us = [run["cpu_s"] / run["rows"] * 1e6 for run in good]
        row |= {
            "cpu_us_per_row": round(statistics.median(cpu_us), 3),
            "cpu_us_per_row_least": round(min(cpu_us), 3),
            "rows_per_s": round(statistics.median(run["rows"] / run["wall_s"] for run in good)),
            "peak_rss_mb": round(max(run["peak_rss_bytes"] for run in good) / 1e6),
            "rows": good[0]["rows"],
            "equal_to_plain_parser": all(run["equal"] for run in good),
            "runs": len(good),
        }
    return row


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("criteo", __doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows read by all but the slow systems")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per system, interleaved (default 3)")
    parser.add_argument("--systems", type=words, default=[], help="only systems with one of these words in their name")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in (default: a temporary one)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        number, threads, folder = given.child
        print(json.dumps(child(int(number), int(threads), Path(folder))), flush=True)
        # tf.data and Ray may wait for ever for a thread that is inside a Python function at exit.
        sys.stdout.flush()
        import os

        os._exit(0)
    rows, repeats = (min(given.rows, 20_000), 1) if given.quick else (given.rows, given.repeats)
    chosen = [i for i, s in enumerate(SYSTEMS) if not given.systems or any(word in s.name for word in given.systems)]
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {(i, t): [] for i in chosen for t in SYSTEMS[i].threads}
    with contextlib.ExitStack() as stack:
        folder = given.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepare(folder, rows, given.seed, sorted({SYSTEMS[i].format for i in chosen}))
        shuffled = random.Random(given.seed)
        for _ in range(repeats):
            for number, threads in shuffled.sample(sorted(runs), len(runs)):
                lacking = missing(SYSTEMS[number])
                if not lacking:
                    runs[number, threads].append(measure(number, threads, folder))
                    print(SYSTEMS[number].name, SYSTEMS[number].format, threads, runs[number, threads][-1], flush=True)
                elif not runs[number, threads]:
                    runs[number, threads].append({"error": f"pip install {' '.join(lacking)}"})
    return write("criteo", [summary(SYSTEMS[i], t, found) for (i, t), found in runs.items()], given.seed, given.json)


if __name__ == "__main__":
    main()
