"""What one decision of the agent costs: CPU time by phase and by part, for pipelines of 2 to 32 worker stages.

Measured on synthetic observations that follow what was decided, with the clock of the whole process, so threads count.
A pipeline of S worker stages has a window per stage and a prefetcher: S + 1 slots for the network.

A network of F slot features, G pipeline features and width H costs on n slots, a multiplication with an addition
counted as two operations::

    FLOPs   = 2 (n F H + G H + n H H + 2 H H + 5 n H)
    weights = (F + G) H + H + 3 H H + H + 5 H + 5, of 4 bytes each
    moved   = 4 (weights + n F + G + 2 n H + 3 H + 5 n) bytes: weights, inputs, both hidden layers, mean, max, outputs

Layer one multiplies the pipeline's features, and layer two mean and maximum, once for all slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from benchmarks.decision_pipeline import Synthetic
from benchmarks.output import arguments, numbers, write
from intune_callbacks.config import TunerConfig
from intune_callbacks.decide.dqn import Dqn
from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT, features
from intune_callbacks.decide.live import view_of
from intune_callbacks.decide.moves import allowed, best_moves
from intune_callbacks.decide.network import PARAMETERS, Network, Values, shipped
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.decide.shell import USABLE
from intune_callbacks.decide.target import target
from intune_callbacks.decide.track import Track
from intune_callbacks.decide.view import Floats, Ints, View
from intune_callbacks.guard.guard import Guard
from intune_callbacks.measure.counts import StageCounts

__all__ = ["PHASES", "cost", "decisions", "main", "parts", "run"]

Result = TypeVar("Result")

STAGES = (2, 5, 8, 16, 32)
DECISIONS, QUICK_DECISIONS = 600, 30
SETTLING = 20
"""First decisions that are not counted: jumps, caches, the CPU's clock."""
PIPELINES = 4
"""Synthetic pipelines of each number of stages: in some of them moves are rare, in some every decision is close."""
FOREVER = 10**6
PHASES = {
    "burst": ShellConfig(burst=FOREVER, patience=FOREVER),
    "hold": ShellConfig(burst=0, measured=1, look=FOREVER),
}


def cost(network: Network, slots: int) -> dict[str, int]:
    """Return FLOPs, bytes of the weights and bytes moved of one evaluation; the formulas stand above.

    Args:
        network: for its shapes.
        slots: of the pipeline.
    """
    n, h, f, g = slots, network.w1.shape[1], len(OF_SLOT), len(OF_PIPELINE)
    weights = sum(getattr(network, name).size for name in PARAMETERS)
    return {
        "flops": 2 * (n * f * h + g * h + n * h * h + 2 * h * h + 5 * n * h),
        "weight_bytes": 4 * weights,
        "moved_bytes": 4 * (weights + n * f + g + 2 * n * h + 3 * h + 5 * n),
    }


class _Clock:
    """CPU seconds of single calls, by name."""

    def __init__(self) -> None:
        self.taken_s: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], Result]) -> Result:
        begin = time.process_time()
        result = work()
        self.taken_s.setdefault(name, []).append(time.process_time() - begin)
        return result


def decisions(stages: int, phase: str, count: int, seed: int = 0) -> dict[str, float]:
    """Return the median CPU milliseconds of `Dqn.decide`, alone and with the guard's check, over `PIPELINES`.

    Args:
        stages: worker stages.
        phase: of `PHASES`.
        count: decisions that are counted, of all pipelines together.
        seed: of the observations.
    """
    taken_s = []
    for number in range(PIPELINES):
        pipeline, clock = Synthetic(stages, seed + number), _Clock()
        policy, guard = Dqn(config=PHASES[phase]), Guard(TunerConfig())
        counted: list[bool] = []
        while sum(counted) < max(1, count // PIPELINES):
            seen = pipeline.observe()
            proposal = clock("decide", partial(policy.decide, seen))
            ruling = clock("guard", partial(guard.check, proposal.allocation, seen))
            pipeline.allocation = ruling.allocation
            counted.append(len(counted) >= SETTLING and proposal.settled == (phase == "hold"))
        taken_s.append(np.array([clock.taken_s["decide"], clock.taken_s["guard"]])[:, counted])
    alone_s, guard_s = np.concatenate(taken_s, 1)
    return {
        "decide_ms": 1e3 * float(np.median(alone_s)),
        "with_guard_ms": 1e3 * float(np.median(alone_s + guard_s)),
        "p95_ms": 1e3 * float(np.percentile(alone_s + guard_s, 95)),
    }


def parts(stages: int, count: int, seed: int = 0) -> dict[str, float]:
    """Return the median CPU milliseconds of each part of a decision in a burst; the rest is the shell's.

    Args:
        stages: worker stages.
        count: decisions that are counted, of all pipelines together.
        seed: of the observations.
    """
    taken_s: dict[str, list[float]] = {}
    for number in range(PIPELINES):
        for name, taken in _parts(Synthetic(stages, seed + number), max(1, count // PIPELINES)).items():
            taken_s.setdefault(name, []).extend(taken[SETTLING:])
    return {f"{name}_ms": 1e3 * float(np.median(taken)) for name, taken in taken_s.items()}


def _parts(pipeline: Synthetic, count: int) -> dict[str, list[float]]:
    c = PHASES["burst"]
    policy, guard, clock = Dqn(config=c), Guard(TunerConfig()), _Clock()
    network: Values = shipped()
    known, track = StageCounts(), None
    for _ in range(SETTLING + count):
        seen = pipeline.observe()
        clock("learn", partial(known.learn, seen))
        counts = clock("counts", known.of_stages)
        view = clock("view", partial(view_of, seen, pipeline.cpu_share, counts, known.demand, {}))
        track = track or Track(view)
        clock("track", partial(track.update, view))
        ratio = view.window / np.maximum(view.value, 1.0)
        aimed = clock("target", partial(target, view, track.curves, USABLE))
        slots, whole = clock("features", partial(features, view, track, aimed, ratio))
        q = clock("network", partial(network, slots, whole, view.mask))
        clock("argmax", partial(_argmax, view, ratio, q, c))
        wanted = policy.decide(seen).allocation
        ruling = clock("guard", partial(guard.check, wanted, seen))
        pipeline.allocation = ruling.allocation
    return clock.taken_s


def _argmax(view: View, ratio: Floats, q: Floats, config: ShellConfig) -> Ints:
    return best_moves(q, allowed(view, ratio, config.memory_limit), view.worker_weight, view.free_cpus)


def run(stages: Sequence[int], count: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per number of stages and phase; the rows of the burst also say what its parts cost.

    Args:
        stages: numbers of worker stages.
        count: decisions per row.
        seed: of the observations.
    """
    rows: list[dict[str, Any]] = []
    for number in stages:
        for phase in PHASES:
            row: dict[str, Any] = {"stages": number, "phase": phase, **decisions(number, phase, count, seed)}
            if phase == "burst":
                row |= {**parts(number, count, seed), **cost(shipped(), number + 1)}
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("decision", __doc__.split("\n")[0])
    parser.add_argument("--stages", type=numbers, default=list(STAGES), help="worker stages (default 2,5,8,16,32)")
    parser.add_argument("--decisions", type=int, default=DECISIONS, help=f"decisions per row (default {DECISIONS})")
    given = parser.parse_args(argv)
    if given.decisions < 1:
        parser.error(f"--decisions {given.decisions}: expected 1 or more")
    count = QUICK_DECISIONS if given.quick else given.decisions
    return write("decision", run(given.stages, count, given.seed), given.seed, given.json)


if __name__ == "__main__":
    main()
