"""The simulator's throughput against real torchdata pipelines on the emulated machine, for random pipelines.

A pipeline runs under a fixed random allocation and is measured, and `intune_callbacks.pretrain.flow` is asked for the
same machine. Workers stay within the CPUs: the emulated machine has no caches, interference or time slicing to compare.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from benchmarks.agreement_cases import Drawn, draw
from benchmarks.emulated import VirtualMachine
from benchmarks.live_cases import Live
from benchmarks.live_loop import ENDLESS
from benchmarks.output import arguments, write
from intune_callbacks.decide.view import Floats
from intune_callbacks.pretrain.flow import flow
from intune_callbacks.pretrain.machines import MOST_WORKER_STAGES, Machines, sample
from intune_callbacks.session.tuner import Tuner

__all__ = ["AGREE", "Stretch", "compare", "main", "measure", "simulate", "simulated"]

AGREE = 0.05
WARM_S, MEASURED_S = 5.0, 60.0
BUFFER, QUIET, UNEVEN, UNLIMITED = 1.0, 0.01, 0.1, 1e9


class Compute:
    """The map function of one stage: holds a virtual CPU, part of the time under the lock."""

    def __init__(self, case: Drawn, machine: VirtualMachine, stage: int) -> None:
        self.case, self.machine, self.stage, self.__name__ = case, machine, stage, f"stage{stage}"
        self.lock = threading.Lock()

    def __call__(self, item: int) -> int:
        odd = self.stage == self.case.odd
        seconds = self.case.stage_s[self.stage] * (self.case.factor(item) if odd else 1.0)
        if odd and self.case.lock:
            with self.lock:
                self.machine.compute(self.__name__, seconds * self.case.lock)
            seconds *= 1.0 - self.case.lock
        self.machine.compute(self.__name__, seconds)
        return item


class Emulated(Live):
    """A drawn pipeline on the emulated machine, and a model that takes its time for every batch."""

    case: Drawn

    def _torchdata(self) -> Loader[int]:
        node: Any = IterableWrapper(range(ENDLESS))
        for stage in range(len(self.case.stage_s)):
            node = ParallelMapper(node, Compute(self.case, self.machine, stage), num_workers=1)
        return Loader(node)

    def step(self, tuner: Tuner | None) -> None:
        super().step(tuner)
        if self.case.model_s:
            time.sleep(self.case.model_s)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was measured: batches per second, the irregular stage's mean cost factor, and `Usage.sleep_inflation`."""

    rate: float
    factor: float
    sleep_inflation: float


def measure(case: Drawn, warm_s: float = WARM_S, seconds: float = MEASURED_S) -> Stretch:
    """Run a pipeline on the emulated machine.

    Args:
        case: the pipeline.
        warm_s: before the measurement, on top of the time the windows take to fill.
        seconds: of the measurement, see `Live.measure`.

    Raises:
        RuntimeError: when the pipeline refuses the drawn allocation.
    """
    live = Emulated(case)
    try:
        wanted = {f"stage{i}": n for i, n in enumerate(case.workers)}
        wanted |= {f"stage{i}.window": n for i, n in enumerate(case.windows)}
        if (applied := live.resize(wanted)) != wanted:
            raise RuntimeError(f"asked for {wanted}, the pipeline took {applied}: draw allocations within its limits")
        live.train(warm_s + sum(case.windows) * case.slowest_s)
        first = len(live.deliveries)
        measured = live.measure(seconds)
    finally:
        live.close()
    batches = range(first, len(live.deliveries))
    drawn_s = sum(case.batch_work_s(batch) for batch in batches)
    factor = sum(map(case.factor, batches)) / len(batches)
    return Stretch(measured.delivered * case.work_s * len(batches) / drawn_s, factor, measured.sleep_inflation)


def simulated(case: Drawn) -> Machines:
    """Return the simulated machine that stands for a drawn pipeline.

    Work, lock and model are as drawn, all other limits are off. The rule for what has no counterpart: `cv` is that of
    the lognormal distribution, sqrt(exp(sigma^2) - 1), and `burst` is .01 + .1 cv^2, for nothing on the emulated
    machine is uneven but the items; the buffer is 1, the batch the model holds.

    Args:
        case: the pipeline.
    """
    machine = sample(1, np.random.default_rng(0), stages=len(case.stage_s), cpus=case.cpus, plain=True)
    cv = _row([math.sqrt(math.expm1(case.sigma**2))], case.odd)
    return replace(
        machine,
        work_s=_row(case.stage_s),
        lock=_row([case.lock], case.odd),
        cv=cv,
        burst=QUIET + UNEVEN * cv.max(1) ** 2,
        demand=np.array([1.0 / case.model_s if case.model_s else UNLIMITED]),
        io_rate=np.array([UNLIMITED]),
    )


def simulate(case: Drawn, factor: float = 1.0) -> float:
    """Return the batches per second the simulator expects.

    Args:
        case: the pipeline.
        factor: mean cost factor of the irregular stage in the stretch to compare with: the luck of the draw is given to
            the simulator, because it only matters where that stage is the slowest.
    """
    machine = simulated(case)
    work_s, workers, windows = machine.work_s.copy(), _row(case.workers), _row(case.windows)
    work_s[0, case.odd] *= factor
    found = flow(machine, work_s, workers[:, None], windows[:, None], np.array([[BUFFER]]), machine.cpus)
    return float(found.rate[0, 0])


def _row(values: Sequence[float], first: int = 0) -> Floats:
    row = np.zeros((1, MOST_WORKER_STAGES))
    row[0, first : first + len(values)] = values
    return row


def compare(case: Drawn, warm_s: float = WARM_S, seconds: float = MEASURED_S) -> dict[str, Any]:
    """Return the row of one pipeline; arguments and errors as for `measure`."""
    stretch = measure(case, warm_s, seconds)
    expected = simulate(case, stretch.factor)
    return {
        "cpus": case.cpus,
        "stages": len(case.stage_s),
        "sigma": round(case.sigma, 2),
        "measured": round(stretch.rate, 3),
        "simulated": round(expected, 3),
        "ratio": round(expected / stretch.rate, 4),
        "share_of_ideal": round(stretch.rate * case.slowest_s, 3),
        "factor": round(stretch.factor, 4),
        "lock": round(case.lock, 3),
        "model_s": round(case.model_s, 4),
        "sleep_inflation": round(stretch.sleep_inflation, 4),
        "workers": list(case.workers),
        "windows": list(case.windows),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("agreement", __doc__.split("\n")[0])
    parser.add_argument("--pipelines", type=int, default=10, help="random pipelines (default 10)")
    parser.add_argument("--jobs", type=int, default=5, help="machines emulated side by side (default 5)")
    given = parser.parse_args(argv)
    rng = np.random.default_rng(given.seed)
    count, times = (2, (0.5, 2.0)) if given.quick else (given.pipelines, (WARM_S, MEASURED_S))
    cases = [draw(rng, 1000 * given.seed + number) for number in range(count)]
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=1) as pool:
        rows = pool.starmap(compare, [(case, *times) for case in cases], chunksize=1)
    rows = [{"pipeline": number} | row for number, row in enumerate(rows)]
    result = write("agreement", rows, given.seed, given.json)
    within = sum(abs(row["ratio"] - 1.0) <= AGREE for row in rows)
    print(f"{within} of {count} within {AGREE:.0%}")
    return result


if __name__ == "__main__":
    main()
