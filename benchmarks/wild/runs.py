"""Run the fits of the benchmark one after the other, each in a process of its own, and keep their results in a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.output import versions
from benchmarks.wild.entry import Entry, Fit, Numbers
from benchmarks.wild.slow import slow_reads

__all__ = ["LENGTHS_S", "ROOT", "TRIAL", "Key", "Store", "Workplace"]

ROOT = Path(__file__).parents[2]
LONGEST_S = 1800.0
QUICK = Fit(1, 30)
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": 1 << 33, "MALLOC_MMAP_THRESHOLD_": 1 << 25, "MALLOC_TOP_PAD_": 1 << 28}
"""Memory that was freed is kept. By itself glibc gives it back and asks for it anew in each step, or not: eight fits of
`hf-masked-lm` took 7.1 to 10.1 s and .6 to 3.2 million page faults, with InTune and without. 32 MiB is the largest
threshold there is: https://man7.org/linux/man-pages/man3/mallopt.3.html."""
TRIAL = "trial"
LENGTHS_S = {"short": 20.0, "long": 120.0}
"""How long a fit without InTune takes on the machine at hand, about."""
RESULT = '{"'
"""How the last line of a child begins."""


@dataclass(frozen=True, slots=True)
class Key:
    """What tells two fits apart.

    Args:
        name: of the entry.
        length: ``short``, ``long`` or ``trial``.
        mode: of InTune; ``off`` is without it.
        repeat: 0, 1, ...
        numbers: in place of the authors', as sorted JSON; empty for the authors' own.
    """

    name: str
    length: str
    mode: str
    repeat: int = 0
    numbers: str = ""

    @staticmethod
    def written(numbers: Numbers) -> str:
        """Return numbers as they stand in a key."""
        return json.dumps(dict(sorted(numbers.items()))) if numbers else ""


class Store:
    """The JSON file with all runs; what is in it is not run again, unless it failed.

    Args:
        path: of the file; None keeps nothing.
        seed: of all runs.

    Raises:
        SystemExit: when the file was made with another seed.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path, self.seed = path, seed
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["seed"] != seed:
                raise SystemExit(f"{path} was made with --seed {found['seed']}: go on with it, or take another file")
            self.rows = found["rows"]

    def find(self, key: Key) -> dict[str, Any] | None:
        """Return the run of this key, None if there is none."""
        fields = asdict(key)
        return next((row for row in self.rows if all(row[name] == value for name, value in fields.items())), None)

    def all(self, name: str, length: str, mode: str, numbers: str = "") -> list[dict[str, Any]]:
        """Return all repeats that did not fail, in order."""
        rows = [row for row in self.rows if (row["name"], row["length"], row["mode"]) == (name, length, mode)]
        rows = [row for row in rows if row["numbers"] == numbers and "error" not in row]
        return sorted(rows, key=lambda row: row["repeat"])

    def add(self, key: Key, result: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a run in place of what was there, write the file, and return the row."""
        old, row = self.find(key), {**asdict(key), **result}
        self.rows = [other for other in self.rows if other is not old] + [row]
        self.write()
        return row

    def write(self) -> None:
        """Write the file as a whole or not at all."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"benchmark": "wild", "versions": versions(), "seed": self.seed, "rows": self.rows}
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


class Workplace:
    """Where fits are run: the folder of the data, the store, and how long they are.

    Args:
        data: folder of the data.
        store: of the results.
        quick: fits of some seconds, on little data: shows that it runs.
    """

    def __init__(self, data: Path, store: Store, quick: bool = False) -> None:
        self.data, self.store, self.quick = data, store, quick

    def run(self, entry: Entry, key: Key) -> dict[str, Any]:
        """Return the run of this key, from the file or now.

        Args:
            entry: what to train.
            key: how.
        """
        known = self.store.find(key)
        if known is not None and "error" not in known:
            return known
        rows = entry.tiny if self.quick else entry.rows
        fit = self.fit(entry, key.length)
        begin = time.time()
        made = self._child(entry, "make", ["--rows", str(rows)])
        if "error" in made:
            return self.store.add(key, made)
        given = ["--rows", str(rows), "--epochs", str(fit.epochs), "--seed", str(self.store.seed)]
        given += ["--steps", str(fit.steps)] if fit.steps is not None else []
        given += ["--numbers", key.numbers] if key.numbers else []
        result = self._child(entry, key.mode, given, slow_reads(self.data, Path(made["folder"]), entry.read_ms))
        row = self.store.add(key, {"at": round(begin), "load": _load(), "commit": _commit(), **result})
        told = (
            row.get("error") or f"{row['wall_s']:.1f} s, {row['samples_per_s']:.4g} samples/s, losses {row['losses']}"
        )
        print(
            f"{entry.name}  {key.length} {key.mode} {key.repeat} {key.numbers}  {told}".replace("   ", "  "), flush=True
        )
        return row

    def fit(self, entry: Entry, length: str) -> Fit:
        """Return the fit of this length on this machine, which takes a trial the first time.

        Args:
            entry: what to train.
            length: ``short``, ``long`` or ``trial``.
        """
        if self.quick or length == TRIAL:
            return QUICK if self.quick else entry.trial
        wall_s = self.run(entry, Key(entry.name, TRIAL, "off")).get("wall_s")
        return _scaled(entry.trial, LENGTHS_S[length] / wall_s) if wall_s else entry.trial

    def _child(
        self, entry: Entry, mode: str, given: list[str], environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.wild.child", entry.name, mode, str(self.data), *given]
        allocator = {name: str(value) for name, value in ALLOCATOR.items()}
        variables = {**os.environ, **allocator, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})}
        variables.pop("INTUNE_MODE", None)
        # Where no bytecode may be written each child would compile our modules anew, those with the callback only.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        with subprocess.Popen(
            command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        ) as child:  # fmt: skip
            try:
                out, errors = child.communicate(timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                _end(child)
                return {"error": f"did not end within {LONGEST_S:.0f} s"}
            except BaseException:
                _end(child)
                raise
            _end(child)  # workers that it may have left behind
        lines = out.rstrip().splitlines()
        if child.returncode or not lines or not lines[-1].startswith(RESULT):
            return {"error": f"exit status {child.returncode}: {errors.rstrip()[-2000:]}"}
        said = [line for line in errors.splitlines() if "InTune" in line]
        return {**json.loads(lines[-1]), "card": "\n".join(lines[:-1]), **({"said": said} if said else {})}


def _scaled(fit: Fit, by: float) -> Fit:
    """Return a fit that is so many times as long: more epochs, or more steps where there is one of so many steps."""
    if fit.steps is None or fit.epochs > 1:
        return Fit(max(1, round(fit.epochs * by)), fit.steps)
    return Fit(1, int(round(fit.steps * by, -1 if fit.steps * by > 100 else 0)))


def _end(child: subprocess.Popen[str]) -> None:
    """End the child and all its workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
