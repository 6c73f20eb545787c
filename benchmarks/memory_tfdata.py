"""tf.data inside a memory cgroup: large batches on an emulated machine, AUTOTUNE beside ours.

Every stage leaves one batch of the given size; ``allowed`` is the share of the fluid limit that the best static
allocation reaches with the batches that fit, ``held`` (`benchmarks.memory_bound`). AUTOTUNE takes its memory budget
from the host and does not see the container. Where no cgroup can be made the rows say so, and the limit is told to our
guard alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.emulated import SHARES
from benchmarks.memory_bound import TRIES, attainable
from benchmarks.output import arguments, numbers, write

__all__ = ["Group", "child", "main", "measure", "memory_group"]

SYSTEMS = ("InTune (dqn)", "AUTOTUNE", "AUTOTUNE ram_budget 1 GB", "even split")
LIMIT_BYTES = 4 << 30
SOFT_LIMIT, SIGMA = 0.90, 0.8
MB = 1 << 20
COPIED_BYTES_PER_S = 640 * MB
SETTLE_BATCHES, FINAL_BATCHES = 480, 240
QUICK_S = 4.0
STARTUP_S = 120.0
Group = Path | None


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """Make a cgroup (v2 or v1) with a memory limit; None where that is not permitted."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory") / f"intune-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        swap = group / ("memory.swap.max" if v2 else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if v2 else str(limit_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def child(system: str, cpus: int, batch_bytes: int, times: Sequence[float], seed: int, limit_bytes: int) -> None:
    """Run one system and print its result as a line of JSON; the body of the process in the cgroup.

    Args:
        system: of `SYSTEMS`.
        cpus: virtual CPUs.
        batch_bytes: what every stage leaves.
        times: seconds to settle and to measure.
        seed: of the irregularity.
        limit_bytes: the cgroup's limit, told to the tuner's probe where there is no cgroup; 0 inside one.
    """
    from benchmarks.live_loop import Case
    from benchmarks.tfdata_memory import Heavy

    # Five copies of every batch are written on the host (.6 CPU seconds per GB where each page is new): so slowly that
    # the host's own CPUs are not the limit.
    work_s = cpus * len(SHARES) * batch_bytes / COPIED_BYTES_PER_S
    case = Case("tfdata", cpus, work_s, SIGMA, seed)
    live = Heavy(case, system, batch_bytes, limit_bytes)
    print(json.dumps({"base_bytes": live.used_bytes()}), flush=True)
    live.train(times[0], live.tuner)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    measured = live.measure(times[1], live.tuner)
    host_cpus = (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)
    print(
        json.dumps(
            {
                "throughput": measured.throughput,
                "fluid": case.fluid_limit,
                "peak_bytes": live.peak_bytes,
                "host_cpus": round(host_cpus, 3),
                "work_s": case.work_s,
                "frozen": live.tuner.frozen if live.tuner is not None else None,
                "allocation": {stage.name: stage.current for stage in live.pipeline.stages()} if live.pipeline else {},
            }
        ),
        flush=True,
    )


def measure(system: str, cpus: int, batch_mb: int, times: tuple[float, float], seed: int) -> dict[str, Any]:
    """Run one system in a fresh process inside a fresh cgroup and return its row.

    Args:
        system: of `SYSTEMS`.
        cpus: virtual CPUs.
        batch_mb: what every stage leaves, in MiB.
        times: seconds to settle and to measure.
        seed: of the irregularity.
    """
    with memory_group(LIMIT_BYTES) as group:
        told = 0 if group is not None else LIMIT_BYTES
        given = [system, str(cpus), str(batch_mb * MB), *map(str, times), str(seed), str(told)]
        join = f"echo $$ > {group}/cgroup.procs && " if group is not None else ""
        done = subprocess.run(
            ["sh", "-c", f'{join}exec "$0" "$@"', sys.executable, "-m", __spec__.name, "--child", *given],
            capture_output=True,
            text=True,
            timeout=2 * sum(times) + STARTUP_S,
            check=False,
        )
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found |= json.loads(line)
    row: dict[str, Any] = {
        "system": system,
        "cpus": cpus,
        "batch_mb": batch_mb,
        "cgroup": group is not None,
        "killed": done.returncode in (-9, 137),
    }
    if "throughput" in found:
        held = int((SOFT_LIMIT * LIMIT_BYTES - found["base_bytes"]) / (batch_mb * MB))
        allowed, _ = attainable(cpus, held, SIGMA, seed, 2 if times[0] <= QUICK_S else TRIES)
        row |= {
            "held": held,
            "allowed": round(allowed, 4),
            "fraction_of_allowed": round(found["throughput"] / found["fluid"] / allowed, 4),
            "fraction_of_fluid": round(found["throughput"] / found["fluid"], 4),
            "peak_gb": round(found["peak_bytes"] / 1e9, 2),
            "host_cpus": found["host_cpus"],
            "frozen": found["frozen"],
            "allocation": found["allocation"],
        }
    elif not row["killed"]:
        row["error"] = done.stderr[-500:]
    return row


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("memory_tfdata", __doc__.split("\n")[0])
    parser.add_argument("--cpus", type=int, default=32, help="virtual CPUs (default 32)")
    parser.add_argument("--batch-mb", type=numbers, default=[16, 64], help="batch sizes in MiB (default 16,64)")
    parser.add_argument("--child", nargs=7, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        system, cpus, batch_bytes, settle_s, final_s, seed, told = given.child
        child(system, int(cpus), int(batch_bytes), (float(settle_s), float(final_s)), int(seed), int(told))
        # tf.data may wait for ever for a thread that is inside a Python function at exit.
        sys.stdout.flush()
        import os

        os._exit(0)
    rows = []
    for batch_mb in given.batch_mb:
        a_batch_s = len(SHARES) * batch_mb * MB / COPIED_BYTES_PER_S
        times = (QUICK_S, QUICK_S) if given.quick else (SETTLE_BATCHES * a_batch_s, FINAL_BATCHES * a_batch_s)
        for system in SYSTEMS:
            rows.append(measure(system, given.cpus, batch_mb, times, given.seed))
            print(rows[-1], flush=True)
    return write("memory_tfdata", rows, given.seed, given.json)


if __name__ == "__main__":
    main()
