"""Whole fits on cheap input, with the callback as it is by default and with mode `off`: never slower, no more CPU.

Off and tune take turns in one child process per kind, so that a busy machine hits both; figures are medians of pairs.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.never_slower_fits import fit
from benchmarks.never_slower_kinds import KINDS, Kind, kind_named
from benchmarks.output import arguments, write

__all__ = ["main", "pairs_of", "row_of"]

WALL_LIMIT, CPU_LIMIT, HEADLINE_LIMIT = 1.03, 1.05, 0.03
EPOCHS, FEW = 3, 50
CHILD_LIMIT_S = 900.0


def pairs_of(kind: Kind, pairs: int, seconds: float) -> list[dict[str, Any]]:
    """Return one mapping per pair: wall and CPU seconds a batch of both sides, and how far the headline is off.

    Args:
        kind: what to train on.
        pairs: so many, in alternating order.
        seconds: a fit lasts about so long.
    """
    few, many = (FEW, 5 * FEW) if seconds > 1.0 else (5, 15)
    _measured(kind, "off", few)  # imports and compilers
    short, long = (_measured(kind, "off", count) for count in (few, many))
    # What a fit costs apart from its steps cancels out.
    step_s = max(1e-4, (many * long["wall_s"] - few * short["wall_s"]) / (many - few))
    batches = max(20, int(seconds / EPOCHS / step_s))
    _measured(kind, "tune", few)
    made = []
    for number in range(pairs):
        order = ("off", "tune") if number % 2 == 0 else ("tune", "off")
        took = {mode: _measured(kind, mode, batches) for mode in order}
        made.append({**took, "batches": batches})
    return made


def _measured(kind: Kind, mode: str, batches: int) -> dict[str, Any]:
    gc.collect()
    before_s = _cpu_s()
    fitted = fit(kind, mode, batches, EPOCHS)
    gc.collect()  # a dropped iterator joins its workers, which then are in the children's time
    report = fitted.report
    claimed = report.get("whole", {}).get("throughput_samples_per_s")
    stages = [stage for stage in report.get("stages", []) if stage.get("unit") == "workers"]
    return {
        "wall_s": fitted.wall_s / fitted.steps,
        "cpu_s": (_cpu_s() - before_s) / fitted.steps,
        "headline_off": None if claimed is None else claimed / fitted.samples_per_s - 1.0,
        "changes": report.get("changes", 0),
        "workers": [[stage["first"], stage["current"]] for stage in stages],
        "frozen": report.get("frozen"),
    }


def _cpu_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in spent)


def row_of(kind: Kind, pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one kind from its pairs.

    Args:
        kind: whose.
        pairs: as `pairs_of` returns them, at least one.
    """
    walls = [pair["tune"]["wall_s"] / pair["off"]["wall_s"] for pair in pairs]
    cpus = [pair["tune"]["cpu_s"] / pair["off"]["cpu_s"] for pair in pairs]
    offs = [abs(pair["tune"]["headline_off"]) for pair in pairs if pair["tune"]["headline_off"] is not None]
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    headline = max(offs) if offs else None
    kept = wall <= WALL_LIMIT and cpu <= CPU_LIMIT and (headline is None or headline <= HEADLINE_LIMIT)
    return {
        "kind": kind.name,
        "framework": kind.framework,
        "kept": kept,
        "wall_ratio": round(wall, 3),
        "cpu_ratio": round(cpu, 3),
        "headline_off": None if headline is None else round(headline, 3),
        "wall_ratios": " ".join(f"{ratio:.2f}" for ratio in walls),
        "off_us": round(statistics.median(pair["off"]["wall_s"] for pair in pairs) * 1e6),
        "off_cpu_us": round(statistics.median(pair["off"]["cpu_s"] for pair in pairs) * 1e6),
        "batches": EPOCHS * pairs[0]["batches"],
        "changes": [pair["tune"]["changes"] for pair in pairs],
        "frozen": next((pair["tune"]["frozen"] for pair in pairs if pair["tune"]["frozen"]), None),
    }


def _in_child(kind: Kind, pairs: int, seconds: float) -> dict[str, Any]:
    """Measure in a process of its own: frameworks, their threads and their allocators do not meet."""
    command = [sys.executable, "-m", "benchmarks.never_slower", "--child", "--only", kind.name]
    command += ["--pairs", str(pairs), "--seconds", str(seconds)]
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if kind.framework == "keras":
        quiet["KERAS_BACKEND"] = os.environ.get("KERAS_BACKEND", "tensorflow")
    try:
        ended = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=True
        )
        return row_of(kind, json.loads(ended.stdout.strip().splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
    except subprocess.TimeoutExpired:
        why = [f"not done after {CHILD_LIMIT_S:.0f} s"]
    return {"kind": kind.name, "framework": kind.framework, "kept": False, "error": why[0]}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("never_slower", __doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAME", type=kind_named, help="the kind whose name begins so (default all)")
    parser.add_argument("--pairs", type=int, default=5, help="fits of each side (default 5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="about what one fit lasts (default 8)")
    parser.add_argument("--child", action="store_true", help="measure in this process and print the pairs as JSON")
    given = parser.parse_args(argv)
    pairs, seconds = (1, 0.3) if given.quick else (given.pairs, given.seconds)
    if given.child:
        print(json.dumps(pairs_of(given.only, pairs, seconds)))
        return {}
    # What the file holds is not measured again, unless it is asked for by name.
    done = json.loads(given.json.read_text())["rows"] if given.json and given.json.exists() else []
    rows = {row["kind"]: row for row in done if "error" not in row}
    for kind in KINDS if given.only is None else (given.only,):
        if kind.name not in rows or given.only is not None:
            rows[kind.name] = _in_child(kind, pairs, seconds)
            write("never_slower", list(rows.values()), given.seed, given.json)
    return write("never_slower", list(rows.values()), given.seed, given.json)


if __name__ == "__main__":
    main()
