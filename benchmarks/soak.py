"""A long run in short: a month of decisions on a virtual clock, and a real training whose numbers change all the time.

Memory, threads, descriptors and files must be as flat at the end as after the first tenth. The first part is the whole
tuner with the default policy on a pipeline that lives in virtual time and changes its costs; the second trains in real
time on real loaders, whose workers and windows are set at random every few batches.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.output import arguments, write

__all__ = ["Reading", "grown", "main", "month", "training"]

MONTH_S = 30 * 86_400.0
MB = 1e6
ALLOWED = {"rss_mb": 12.0, "threads": 3, "descriptors": 6, "children": 4, "files_mb": 12.0}
"""How much more the last third may hold than the second: of memory what an allocator keeps, of the others a resize."""


class Reading:
    """What this process and its children hold now.

    Args:
        folder: whose files are counted, too.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._process, self._folder = psutil.Process(), folder

    def __call__(self) -> dict[str, float]:
        gc.collect()
        files = self._folder.rglob("*") if self._folder is not None else ()
        return {
            "rss_mb": self._process.memory_info().rss / MB,
            "threads": self._process.num_threads(),
            "descriptors": self._process.num_fds(),
            "children": len(self._process.children(recursive=True)),
            "files_mb": sum(file.stat().st_size for file in files if file.is_file()) / MB,
        }


def grown(readings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return by how much the median of the last third is above that of the second, for each quantity."""
    third = len(readings) // 3
    second, last = readings[third : 2 * third], readings[2 * third :]
    return {
        name: statistics.median(r[name] for r in last) - statistics.median(r[name] for r in second)
        for name in readings[0]
    }


# -- a month in virtual time -------------------------------------------------------------------------------------------


class Costs:
    """A pipeline of two stages whose costs wander; it delivers at the rate of its slower stage."""

    def __init__(self, seed: int) -> None:
        self.now_s, self._random = 0.0, random.Random(seed)
        self._values = {"decode": 1, "decode.window": 4, "augment": 1, "augment.window": 4}
        self._service_s = {"decode": 0.2, "augment": 0.1}
        self._totals = {name: [0, 0.0, 0.0] for name in self._service_s}
        self._delivered = 0

    def stages(self) -> tuple[Any, ...]:
        from intune_callbacks.types import Stage

        made = []
        for name in self._service_s:
            made.append(Stage(name, "cpu", "workers", 1, 32, self._values[name]))
            made.append(
                Stage(f"{name}.window", "memory", "items", 1, 512, self._values[f"{name}.window"], window_of=name)
            )
        return tuple(made)

    def stats(self) -> Any:
        from intune_callbacks.types import PipelineStats, StageStats

        return PipelineStats(
            self.now_s,
            self._delivered,
            {
                name: StageStats(items, busy_s, busy_s2, busy_s, 0.0, 0.0, 1, self._values[f"{name}.window"], 1e5)
                for name, (items, busy_s, busy_s2) in self._totals.items()
            },
        )

    def resize(self, allocation: Any) -> dict[str, int]:
        self._values |= {name: value for name, value in allocation.items() if name in self._values}
        return dict(self._values)

    def close(self) -> None:
        """Nothing to end."""

    def batch(self) -> float:
        """Deliver one batch; return the seconds it took."""
        if self._random.random() < 1e-4:
            name = self._random.choice(list(self._service_s))
            self._service_s[name] = self._random.uniform(0.02, 0.5)
        period_s = max(0.05, *(cost_s / self._values[name] for name, cost_s in self._service_s.items()))
        period_s *= self._random.lognormvariate(0.0, 0.05)
        self.now_s += period_s
        for name, total in self._totals.items():
            cost_s = self._service_s[name] * self._random.lognormvariate(0.0, 0.2)
            total[0], total[1], total[2] = total[0] + 1, total[1] + cost_s, total[2] + cost_s**2
        self._delivered += 1
        return period_s


def month(seconds: float, seed: int, mode: str = "tune", looks: int = 30) -> dict[str, Any]:
    """Return the row of a run of `seconds` of virtual time.

    Args:
        seconds: of virtual time.
        seed: of the pipeline.
        mode: ``observe``, ``advise`` or ``tune``.
        looks: readings taken.
    """
    from intune_callbacks.config import TunerConfig
    from intune_callbacks.measure.wait import StepTotals
    from intune_callbacks.record.findings import build_report
    from intune_callbacks.record.history import History
    from intune_callbacks.record.report import write_report
    from intune_callbacks.session.tuner import Tuner
    from intune_callbacks.types import Clock, Resources

    class Machine:
        def read(self) -> Resources:
            return Resources(16.0, 64 << 30, 8 << 30)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pipeline, read, readings, decisions = Costs(seed), Reading(Path(folder)), [], 0
        clock = Clock(wall=lambda: pipeline.now_s, cpu=lambda: 0.0)
        history = History(Path(folder) / "history.jsonl")
        tuner = Tuner(pipeline, TunerConfig(mode=mode), probe=Machine(), clock=clock, history=history)
        steps, wait_s = 0, 0.0
        for end_s in (seconds * (look + 1) / looks for look in range(looks)):
            while pipeline.now_s < end_s:
                steps, wait_s = steps + 1, wait_s + max(0.0, pipeline.batch() - 0.05)
                totals = StepTotals(steps, wait_s, 0.05 * steps, 0.0, pipeline.now_s)
                decisions += tuner.batch(totals, 32) is not None
            write_report(Path(folder), build_report(tuner.summary(), mode_source="default", note=None, settings={}))
            readings.append(read())
        frozen = tuner.frozen
        tuner.close()
    return _row(f"month, {mode}", readings, begin) | {"decisions": decisions, "frozen": frozen or "", "wrong": 0}


# -- real time ---------------------------------------------------------------------------------------------------------


def _torch(workers_kind: str, seed: int) -> tuple[Callable[[], Iterator[Any]], Any, int]:
    from benchmarks.exactness_loaders import map_style
    from intune_callbacks.pipelines.find import find

    loader = map_style(4_000, seed, num_workers=2, multiprocessing_context="fork")
    pipeline: Any = find(loader, workers_kind=workers_kind).pipeline
    pipeline.prepare()
    return lambda: pipeline.adopt(iter(loader)), pipeline, 4_000


def _nodes(method: str) -> tuple[Callable[[], Iterator[Any]], Any, int]:
    from benchmarks.exactness_loaders import nodes
    from intune_callbacks.pipelines.find import find

    context = {"multiprocessing_context": "fork"} if method == "process" else {}
    loader = nodes(4_000, 2, method, **context)
    pipeline: Any = find(loader).pipeline
    pipeline.prepare()
    return lambda: pipeline.adopt(iter(loader)), pipeline, 4_000


def _tfdata() -> tuple[Callable[[], Iterator[Any]], Any, int]:
    import tensorflow as tf

    from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline
    from intune_callbacks.types import Clock

    numbers = tf.data.Dataset.range(4_000).map(lambda i: i * 2, num_parallel_calls=2).prefetch(2)
    pipeline = DatasetPipeline(numbers, clock=Clock())
    return lambda: iter(pipeline.dataset), pipeline, 4_000


KINDS: dict[str, Callable[[int], tuple[Callable[[], Iterator[Any]], Any, int]]] = {
    "DataLoader process": lambda seed: _torch("process", seed),
    "DataLoader thread": lambda seed: _torch("thread", seed),
    "torchdata thread": lambda seed: _nodes("thread"),
    "torchdata process": lambda seed: _nodes("process"),
    "tf.data": lambda seed: _tfdata(),
}
"""What is trained on: name -> (seed) -> (begin an epoch, what is resized, items of an epoch)."""


def training(kind: str, seconds: float, seed: int, looks: int = 60) -> dict[str, Any]:
    """Return the row of epochs after epochs for so long; all numbers are set at random every few batches.

    Args:
        kind: of `KINDS`.
        seconds: real ones.
        seed: of the order and of all choices.
        looks: readings taken.
    """
    choices, begin = random.Random(seed), time.perf_counter()
    start, pipeline, items = KINDS[kind](seed)
    read, readings, resizes, epochs, wrong = Reading(), [], 0, 0, 0
    # Two epochs before the first reading: they open what stays open.
    for epoch in itertools.count(-2):
        number = 0
        for batch in start():
            number += len(batch) if getattr(batch, "ndim", 0) > 1 else 1
            if choices.random() < 0.1:
                stages = pipeline.stages()
                pipeline.resize({s.name: choices.randint(max(1, s.low), min(6, s.high)) for s in stages})
                resizes += 1
            due_s = seconds * (len(readings) + 1) / looks
            if epoch >= 0 and len(readings) < looks and time.perf_counter() - begin > due_s:
                readings.append(read())
        epochs, wrong = epochs + 1, wrong + (number != items)
        if epoch < 0:
            begin = time.perf_counter()
        elif len(readings) >= looks:
            break
    pipeline.close()
    row = _row(f"training, {kind}", readings, begin)
    return row | {"decisions": resizes, "epochs": epochs, "wrong": wrong, "frozen": ""}


def _row(what: str, readings: Sequence[dict[str, float]], begin: float) -> dict[str, Any]:
    more = grown(readings)
    row: dict[str, Any] = {"what": what, "seconds": round(time.perf_counter() - begin, 1)}
    row |= {name: round(readings[-1][name], 1) for name in readings[-1]}
    row |= {f"{name}_more": round(value, 2) for name, value in more.items()}
    return row | {"flat": all(more[name] <= most for name, most in ALLOWED.items())}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line; the exit code is 1 if anything grew or an epoch was not whole."""
    parser = arguments("soak", __doc__.split("\n")[0])
    parser.add_argument("--days", type=float, default=30.0, help="of virtual time, in each mode (default 30)")
    parser.add_argument("--minutes", type=float, default=30.0, help="real ones, shared among the loaders (default 30)")
    given = parser.parse_args(argv)
    days, minutes = (0.2, 0.5) if given.quick else (given.days, given.minutes)
    rows = []
    for mode in ("tune", "advise", "observe"):
        rows.append(month(days * 86_400.0, given.seed, mode))
        print(rows[-1], flush=True)
    for kind in KINDS:
        rows.append(training(kind, 60.0 * minutes / len(KINDS), given.seed))
        print(rows[-1], flush=True)
    return write("soak", rows, given.seed, given.json)


if __name__ == "__main__":
    done = main()["rows"]
    raise SystemExit(0 if all(row["flat"] and not row["wrong"] and not row["frozen"] for row in done) else 1)
