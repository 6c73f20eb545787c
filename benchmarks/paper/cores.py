"""The emulation against real CPU work: the same pipelines on the machine's own CPUs, predicted and measured."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.emulated import VirtualMachine
from benchmarks.live_loop import Case
from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import grouped, spread

__all__ = ["TITLE", "RealMachine", "draw", "rows", "tasks"]

TITLE = "Real cores: batches/s predicted by the emulation and measured with real CPU work on this machine"
SYSTEMS = ("Unoptimized", "even split", "Plumber LP", "N in every stage", "AUTOTUNE", "InTune (dqn)")
WORK_S, SIGMA = 0.2, 0.8
BLOCK = bytes(1 << 18)


class RealMachine(VirtualMachine):
    """The CPUs of this machine: a call really computes, without the GIL, until its thread has used what it costs."""

    def compute(self, stage: str, seconds: float) -> None:
        """Hash blocks of zeros for so many CPU seconds of this thread."""
        begin, before_s = time.perf_counter(), time.thread_time()
        while time.thread_time() - before_s < seconds:
            hashlib.sha256(BLOCK)
        with self._lock:
            self._held_s += time.perf_counter() - begin
            self._asked_s += seconds
            self._calls += 1
            self._stage_s[stage] = self._stage_s.get(stage, 0.0) + seconds

    def thread_time(self) -> float:
        """Return the CPU seconds of the calling thread."""
        return time.thread_time()


def _measure(system: str, case: Case, real: bool, times: tuple[float, float]) -> Run:
    from benchmarks import tfdata_cases

    if real:
        setattr(tfdata_cases, "VirtualMachine", RealMachine)  # noqa: B010 - in this process only
    live = tfdata_cases.LiveData(case, tfdata_cases.SYSTEMS[system])
    try:
        live.train(times[0], live.tuner)
        return {"batches_per_s": round(live.measure(times[1], live.tuner).throughput, 3), "limit": case.fluid_limit}
    finally:
        live.close()


def tasks(options: Options) -> list[Task]:
    """Return an emulated and a real run for each system and seed."""
    times, cpus = ((3.0, 3.0) if options.quick else (40.0, 20.0)), os.cpu_count() or 1
    return [
        Task(
            {"system": system, "machine": "real" if real else "emulated", "seed": seed},
            _measure,
            (system, Case("tfdata", cpus, WORK_S, SIGMA, seed), real, times),
            alone=True,
        )
        for seed in options.seeds
        for system in SYSTEMS
        for real in (False, True)
    ]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for each system."""
    found = []
    for key, group in grouped(runs, "system").items():
        predicted, measured = (_by_seed(group, machine) for machine in ("emulated", "real"))
        both = sorted(predicted.keys() & measured.keys())
        found.append(
            key
            | spread("predicted batches/s", [predicted[seed] for seed in both])
            | spread("measured batches/s", [measured[seed] for seed in both])
            | spread("measured / predicted", [measured[seed] / predicted[seed] for seed in both])
            | {"seeds": len(both)}
        )
    return found


def _by_seed(runs: Sequence[Run], machine: str) -> dict[int, float]:
    return {run["seed"]: run["batches_per_s"] for run in runs if run["machine"] == machine}


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw measured over predicted; on the line both are the same."""
    axes = figure.subplots()
    for key, group in grouped(runs, "system").items():
        predicted, measured = (_by_seed(group, machine) for machine in ("emulated", "real"))
        both = sorted(predicted.keys() & measured.keys())
        axes.scatter([predicted[seed] for seed in both], [measured[seed] for seed in both], label=key["system"])
    top = max((run["batches_per_s"] for run in runs), default=1.0) * 1.1
    axes.plot(np.array([0, top]), np.array([0, top]), color="#999999", lw=1)
    axes.set(xlabel="predicted, batches/s", ylabel="measured, batches/s")
    axes.legend(fontsize=8)
