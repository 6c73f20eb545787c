"""What a decision of the agent service takes, in wall time: beside the same decision here, alone and among many others.

The service is a process of its own on this machine, so a network's own time comes on top. Trainings are threads of one
other process that ask at the pace of a training, with synthetic observations that follow what was decided. Each
compares every answer with the same policy's here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from benchmarks.decision_pipeline import Synthetic
from benchmarks.output import arguments, write
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.service.client import Agent, RemotePolicy

__all__ = ["main", "run"]

STAGES = (5, 32)
TRAININGS = (1, 50)
PACE_S = {1: 0.125, 50: 1.0}
"""Seconds between two decisions; a service answers ten a second of one training."""
SETTLING = 5


@contextmanager
def _service() -> Iterator[tuple[str, psutil.Process]]:
    words = [sys.executable, "-m", "intune_callbacks", "serve-agent", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split("'")[1], psutil.Process(process.pid)
        finally:
            process.kill()


def _train(stages: int, seed: int, count: int, address: str | None, pace_s: float, start_s: float) -> dict[str, Any]:
    """Return the seconds of each decision of one training, and how many answers were of the service and as here."""
    own, here = make_policy("dqn"), make_policy("dqn")
    policy: Any = own if address is None else RemotePolicy(Agent(address), own)
    pipeline, taken_s, same = Synthetic(stages, seed), [], 0
    for number in range(count):
        time.sleep(max(0.0, start_s + number * pace_s - time.perf_counter()))
        seen = pipeline.observe()
        expected = here.decide(seen)
        begin_s = time.perf_counter()
        found = policy.decide(seen)
        taken_s.append(time.perf_counter() - begin_s)
        same += found == expected
        pipeline.allocation |= found.allocation
    answered = count if address is None else policy.answered
    return {"taken_s": taken_s[SETTLING:], "same": same, "answered": answered}


def run(stages: Sequence[int], trainings: Sequence[int], seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return one row for each number of stages and of trainings, here and asked of a service.

    Args:
        stages: worker stages.
        trainings: at once.
        seconds: of each row.
        seed: of the observations.
    """
    rows: list[dict[str, Any]] = []
    for each in stages:
        for many in trainings:
            pace_s = PACE_S.get(many, 1.0)
            count = SETTLING + max(1, round(seconds / pace_s))
            with _service() as (address, process):
                for where in (None, address):
                    cpu_s = sum(process.cpu_times()[:2])
                    with ThreadPoolExecutor(many) as pool:
                        start_s = time.perf_counter() + 0.1
                        jobs = [
                            # Trainings of a fleet do not decide at the same moment.
                            pool.submit(_train, each, seed + n, count, where, pace_s, start_s + pace_s * n / many)
                            for n in range(many)
                        ]
                        found = [job.result() for job in jobs]
                    cpu_s = sum(process.cpu_times()[:2]) - cpu_s
                    rows.append(_row(each, many, where, found, count, cpu_s))
    return rows


def _row(
    stages: int, trainings: int, where: str | None, found: Sequence[dict[str, Any]], count: int, cpu_s: float
) -> dict[str, Any]:
    taken_ms = 1e3 * np.concatenate([one["taken_s"] for one in found])
    made = trainings * count
    return {
        "stages": stages,
        "trainings": trainings,
        "decided": "here" if where is None else "by the service",
        "p50_ms": round(float(np.median(taken_ms)), 2),
        "p99_ms": round(float(np.percentile(taken_ms, 99)), 2),
        "answered": round(sum(one["answered"] for one in found) / made, 4),
        "same": round(sum(one["same"] for one in found) / made, 4),
        "service_cpu_ms": None if where is None else round(1e3 * cpu_s / made, 2),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("remote", __doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each row (default 30)")
    given = parser.parse_args(argv)
    stages, trainings = (STAGES[:1], (1, 3)) if given.quick else (STAGES, TRAININGS)
    return write(
        "remote", run(stages, trainings, 2.0 if given.quick else given.seconds, given.seed), given.seed, given.json
    )


if __name__ == "__main__":
    main()
