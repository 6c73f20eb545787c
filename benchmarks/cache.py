"""What keeping decoded samples brings where all, half or a tenth of them fit into the memory that is left.

Each training is a process, or one for each rank, in a memory cgroup: what it needs without keeping anything, and room
for that part of the samples below the soft limit. Beside ours: no cache, a dictionary in each worker, MONAI's
CacheDataset, `tf.data.Dataset.cache`, and the same arena with fixed sizes, of which the best is searched. All have the
same two workers. ``of_best`` is the second and third epoch's throughput over that of the best static size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.cache_fits import EPOCHS, SYSTEMS, fit
from benchmarks.memory_tfdata import memory_group
from benchmarks.output import arguments, numbers, words, write

__all__ = ["main", "measure"]

MB = 1 << 20
SHAPES = {1: (3000, 64 << 10), 10: (1600, 128 << 10), 50: (200, MB)}
"""Decode time in ms -> samples, and bytes of one: about 200 MB, and 2 to 10 s an epoch, of two workers."""
FITS = {"whole": 1.1, "half": 0.5, "a tenth": 0.1}
SIZES = (0.1, 0.25, 0.5, 0.75, 1.05)
"""Static sizes that are tried, of all samples."""
SOFT_LIMIT, LARGE_BYTES, TIMEOUT_S = 0.90, 16 << 30, 180.0


def measure(
    system: str, shape: tuple[int, float, int], static_bytes: int, limit_bytes: int, where: dict[str, Any]
) -> dict[str, Any]:
    """Return what the ranks of one training measured: samples/s of each epoch, whether it was killed, memory in use.

    Args:
        system: of `SYSTEMS`.
        shape: samples, seconds of decoding one, its bytes.
        static_bytes: see `fit`.
        limit_bytes: of the cgroup.
        where: see `fit`.
    """
    ranks = where["ranks"]
    with memory_group(limit_bytes) as group, tempfile.TemporaryDirectory() as folder:
        join = f"echo $$ > {group}/cgroup.procs && " if group is not None else ""
        given = [
            json.dumps([system, *shape, static_bytes, {**where, "rank": rank, "folder": folder}])
            for rank in range(ranks)
        ]
        command = ["sh", "-c", f'{join}exec "$0" "$@"', sys.executable, "-m", __spec__.name, "--child"]
        children = [
            subprocess.Popen([*command, one], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for one in given
        ]
        told = []
        for child in children:
            try:
                told.append(child.communicate(timeout=TIMEOUT_S))
            except subprocess.TimeoutExpired:
                child.kill()
                told.append(child.communicate())
    found = []
    for out, _ in told:
        with contextlib.suppress(json.JSONDecodeError, IndexError):
            found.append(json.loads(out.splitlines()[-1]))
    row: dict[str, Any] = {"cgroup": group is not None, "killed": any(c.returncode in (-9, 137) for c in children)}
    if len(found) < ranks:
        return row if row["killed"] else row | {"error": "\n".join(err for _, err in told)[-500:]}
    epochs = [[one["epochs"][n] for one in found] for n in range(EPOCHS)]
    row["samples_per_s"] = [round(sum(one["samples_per_s"] for one in epoch), 1) for epoch in epochs]
    row["digests"] = [[one["digest"] for one in epoch] for epoch in epochs]
    row["used_mb"] = round(max(one["used_bytes"] for one in found) / MB)
    return row


def _later(row: dict[str, Any]) -> float:
    """Samples/s behind the first epoch."""
    later = row["samples_per_s"][1:]
    return len(later) / sum(1.0 / one for one in later)


def compare(decode_ms: int, fits: str, kind: str, ranks: int, seed: int, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each system."""
    count, sample_bytes = SHAPES[decode_ms]
    count = count // 10 if quick else count
    shape, data_bytes = (count, decode_ms / 1e3, sample_bytes), count * sample_bytes
    where = {"kind": kind, "ranks": ranks, "seed": seed}
    about = {"decode_ms": decode_ms, "fits": fits, "kind": kind, "ranks": ranks}
    stock = measure("none", shape, 0, LARGE_BYTES, where)
    if "used_mb" not in stock:
        return [about | {"system": "none"} | stock]
    limit_bytes = int((stock["used_mb"] * MB + FITS[fits] * data_bytes) / SOFT_LIMIT)
    rows = [about | {"system": "none"} | stock]
    for system in SYSTEMS[1:]:
        if system == ("MONAI CacheDataset" if kind == "tf" else "Dataset.cache()"):
            continue
        if system == "dict per worker" and kind == "tf":
            continue
        if system == "MONAI CacheDataset" and find_spec("monai") is None:
            rows.append(about | {"system": system, "error": "not installed: pip install --no-deps monai"})
            continue
        sizes = [size for size in SIZES if size <= FITS[fits]] if system == "static" else [min(1.0, FITS[fits])]
        for size in sizes:
            found = measure(system, shape, int(size * data_bytes), limit_bytes, where)
            named = f"{system} {size:.0%}" if system == "static" else system
            rows.append(about | {"system": named} | found)
            print(rows[-1].get("samples_per_s"), named, flush=True)
    static = [_later(row) for row in rows if row["system"].startswith("static") and "samples_per_s" in row]
    for row in rows:
        digests = row.pop("digests", None)
        if digests is not None:
            row["same"] = digests == stock.get("digests", digests)
            row["times_none"] = round(_later(row) / _later(stock), 2)
            row["of_best"] = round(_later(row) / max(static), 3) if static else None
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("cache", __doc__.split("\n")[0])
    parser.add_argument("--decode-ms", type=numbers, default=list(SHAPES), help="of 1, 10, 50 (default: all)")
    parser.add_argument("--fits", type=words, default=list(FITS), help=f"of {', '.join(FITS)} (default: all)")
    parser.add_argument("--ranks", type=numbers, default=[1, 2], help="processes that train (default 1,2)")
    parser.add_argument("--kills", type=int, default=0, help="so often ours alone, half of it fits: is it killed?")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        print(json.dumps(fit(*json.loads(given.child))), flush=True)
        os._exit(0)  # what others started may not end by itself
    rows: list[dict[str, Any]] = []
    if given.kills:
        count, sample_bytes = SHAPES[10]
        where = {"kind": "torch", "ranks": 1, "seed": given.seed}
        stock = measure("none", (count // 4, 0.01, sample_bytes), 0, LARGE_BYTES, where)
        limit_bytes = int((stock["used_mb"] * MB + 0.125 * count * sample_bytes) / SOFT_LIMIT)
        found = [measure("InTune", (count // 4, 0.01, sample_bytes), 0, limit_bytes, where) for _ in range(given.kills)]
        killed, failed = sum(row["killed"] for row in found), sum("error" in row for row in found)
        rows.append({"system": "InTune", "runs": len(found), "killed": killed, "failed": failed})
        return write("cache", rows, given.seed, given.json)
    for decode_ms in given.decode_ms[:1] if given.quick else given.decode_ms:
        for fits in given.fits[:1] if given.quick else given.fits:
            rows += compare(decode_ms, fits, "torch", 1, given.seed, given.quick)
    for ranks in () if given.quick else [ranks for ranks in given.ranks if ranks > 1]:
        rows += compare(10, "whole", "torch", ranks, given.seed, False)
    if not given.quick:
        rows += compare(10, "whole", "tf", 1, given.seed, False)
    return write("cache", rows, given.seed, given.json)


if __name__ == "__main__":
    main()
