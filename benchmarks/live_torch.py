"""Tuned throughput of real torch pipelines on an emulated machine, against the best static allocation found by search.

Per pipeline and machine size, each in a fresh process: the search (many static allocations of workers *and* windows on
the same engine), the stock pipeline and the untouched start, then one run per policy from that start. A last run per
policy resizes the machine 32 -> 64 -> 32 under way. Nothing is restarted in a run.

With ``--warm`` each run of a policy is followed by another one: a fresh pipeline from the same poor start that is given
what the first one saved (`found.yaml`, `state.json`) at its first batch, as ``warm_start`` does. Its phase is ``warm
start``. ``decisions_to_95``: decisions before the first stretch of some seconds that reached 95 % of the final
throughput of the first run. ``changes``: decisions that changed something; ``first_change``: the number of the first.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.live_cases import PIPELINES, Live
from benchmarks.live_loop import FETCH_SAMPLES, Case, Delivery, Measured, decisions_to, seconds_to
from benchmarks.live_search import QUICK, Found, Plan, search
from benchmarks.output import arguments, numbers, words, write
from intune_callbacks.config import POLICIES, TunerConfig
from intune_callbacks.record.fingerprint import versions
from intune_callbacks.session.found import found_by, write_found
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.session.warm_start import WarmStart
from intune_callbacks.types import Allocation

__all__ = ["Tuned", "main", "run", "tune"]

WORK_S = {8: 0.5}
"""CPU seconds of a batch by machine size: 20 ms for the cheapest stage and well under 1000 calls a second."""
QUICK_WORK_S = 0.1
WARM_PART = 0.25
"""Of the time to settle: what the run after a warm start gets."""
PHASES = (64, 32)
RESIZED_FROM = 32
LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """One machine size in a run of a policy.

    Args:
        cpus: the machine.
        begin_s, end_s: when, on the clock of the deliveries; `measured` is its last part.
        measured: the tuned pipeline.
        allocation: at the end.
        decided: batches that had been delivered at each decision.
        changes: numbers of the decisions that changed something.
    """

    cpus: int
    begin_s: float
    end_s: float
    measured: Measured
    allocation: Allocation
    decided: list[int]
    changes: list[int]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one run of a policy gave: its stretches in turn, all deliveries, and why it froze if it did.

    `warm` is the run after it that started from what it saved, `not_warm` why that was not used.
    """

    policy: str
    stretches: list[Stretch]
    deliveries: list[Delivery]
    frozen: str | None
    warm: Tuned | None = None
    not_warm: str | None = None


def tune(case: Case, policy: str, plan: Plan, phases: Sequence[int] = (), warm: bool = False) -> Tuned:
    """Return what `policy` makes of the pipeline's start, and of the machine sizes in `phases` after it.

    Args:
        case: pipeline and first machine size.
        policy: name of the tuner's policy.
        plan: durations.
        phases: virtual CPUs to change to, one after the other, without restart.
        warm: start a fresh pipeline from what was found, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        tuned = _tune(case, policy, plan, phases, save_in=Path(folder))
        if not warm:
            return tuned
        start = WarmStart(folder)
        again = _tune(case, policy, replace(plan, settle_s=WARM_PART * plan.settle_s), start=start)
        entry = start.entry
        assert entry is not None
        return replace(tuned, warm=again, not_warm=None if entry["used"] else entry["why"])


def _tune(
    case: Case,
    policy: str,
    plan: Plan,
    phases: Sequence[int] = (),
    *,
    save_in: Path | None = None,
    start: WarmStart | None = None,
) -> Tuned:
    live = Live(case)
    assert live.pipeline is not None
    config = TunerConfig(policy=policy, decide_every_s=plan.decide_every_s)
    tuner = Tuner(live.pipeline, config, probe=live.machine.probe(), clock=live.machine.clock)
    stretches: list[Stretch] = []
    try:
        for number, cpus in enumerate((case.cpus, *phases)):
            if number:
                live.machine.resize(cpus)
            begin, first = live.elapsed_s, len(tuner.history.decisions)
            if start is not None:
                live.step(None)
                start.begin(tuner, FETCH_SAMPLES, versions())
            live.train(plan.settle_s, tuner)
            measured = live.measure(plan.final_s, tuner)
            allocation = {stage.name: stage.current for stage in live.pipeline.stages()}
            made = tuner.history.decisions[first:]
            decided = [decision.observation.step for decision in made]
            changes = [number for number, decision in enumerate(made, 1) if decision.applied]
            stretches.append(Stretch(cpus, begin, live.elapsed_s, measured, allocation, decided, changes))
        return Tuned(policy, stretches, live.deliveries, tuner.frozen)
    finally:
        tuner.close()
        live.close()
        if save_in is not None:
            found = found_by(tuner, batch_size=FETCH_SAMPLES, ranks=1, versions=versions())
            if found is not None:
                write_found(save_in, *found)


def run(
    cases: Sequence[Case], policies: Sequence[str], plan: Plan, jobs: int, warm: bool = False
) -> list[dict[str, Any]]:
    """Measure every case with every policy and return the rows.

    Args:
        cases: pipelines and machines.
        policies: names of tuner policies.
        plan: durations.
        jobs: processes side by side; emulated CPUs sleep, so several machines fit on one host. 0 stays in this process.
        warm: after each policy's run, another one that starts from what the first one saved.
    """
    resized = [case for case in cases if case.cpus == RESIZED_FROM and _resized(cases, case)]
    with _Jobs(jobs) as pool:
        # The searches are the longest: they go first.
        searched = {case: pool.submit(search, case, plan) for case in cases}
        tuned = [(case, pool.submit(tune, case, policy, plan, (), warm)) for policy in policies for case in cases]
        phased = [(case, pool.submit(tune, case, policy, plan, PHASES)) for policy in policies for case in resized]
        found = {case: result() for case, result in searched.items()}
        rows = [row for case in cases for row in _static_rows(case, found[case])]
        for case, result in (*tuned, *phased):
            rows += _tuned_rows(case, result(), found, plan)
    return sorted(rows, key=lambda row: (row["pipeline"], row["phase"].startswith("after"), row["cpus"]))


def _resized(cases: Iterable[Case], case: Case) -> bool:
    return all(replace(case, cpus=cpus) in cases for cpus in PHASES)


def _row(
    case: Case, policy: str, phase: str, measured: Measured, best: float, allocation: Allocation
) -> dict[str, Any]:
    return {
        "pipeline": case.pipeline,
        "cpus": case.cpus,
        "policy": policy,
        "phase": phase,
        "throughput": round(measured.throughput, 3),
        "best_static": round(best, 3),
        "fraction_of_best": round(measured.throughput / best, 4),
        "fraction_of_fluid": round(measured.throughput / case.fluid_limit, 4),
        "seconds_to_95": None,
        "decisions_to_95": None,
        "changes": None,
        "first_change": None,
        "delivered": round(measured.delivered, 3),
        "computed": round(measured.computed, 3),
        "utilisation": round(measured.utilisation, 4),
        "sleep_inflation": round(measured.sleep_inflation, 4),
        "sigma": case.sigma,
        "work_s": case.work_s,
        "allocation": allocation,
    }


def _static_rows(case: Case, found: Found) -> list[dict[str, Any]]:
    best = found.best.throughput
    rows = [_row(case, "best static", "static", found.best, best, found.best_allocation)]
    for name, (measured, allocation) in found.references.items():
        rows.append(_row(case, name, "static", measured, best, allocation))
    return rows


def _tuned_rows(case: Case, tuned: Tuned, found: Mapping[Case, Found], plan: Plan) -> list[dict[str, Any]]:
    rows, phase = [], "from the start"
    final = tuned.stretches[0].measured.throughput
    for stretch in tuned.stretches:
        now = replace(case, cpus=stretch.cpus)
        best = found[now].best.throughput
        row = _row(now, tuned.policy, phase, stretch.measured, best, stretch.allocation)
        deliveries = [delivery for delivery in tuned.deliveries if delivery.at_s < stretch.end_s]
        reached = seconds_to(0.95 * best, deliveries, stretch.begin_s, case.work_s, plan.window_s)
        row["seconds_to_95"] = None if reached is None else round(reached, 1)
        row |= _decisions(stretch, deliveries, final, case, plan)
        if tuned.frozen is not None:
            row["frozen"] = tuned.frozen
        rows.append(row)
        phase = f"after {stretch.cpus} CPUs"
    if tuned.warm is not None:
        stretch, deliveries = tuned.warm.stretches[0], tuned.warm.deliveries
        row = _row(case, tuned.policy, "warm start", stretch.measured, found[case].best.throughput, stretch.allocation)
        reached = seconds_to(0.95 * found[case].best.throughput, deliveries, 0.0, case.work_s, plan.window_s)
        row |= {"seconds_to_95": None if reached is None else round(reached, 1)}
        row |= _decisions(stretch, deliveries, final, case, plan)
        row |= {"not_warm": tuned.not_warm} if tuned.not_warm else {}
        return [*rows, row | ({"frozen": tuned.warm.frozen} if tuned.warm.frozen else {})]
    # The first stretch of a run with several is the run with one, measured a second time.
    return rows[1:] if len(rows) > 1 else rows


def _decisions(
    stretch: Stretch, deliveries: Sequence[Delivery], final: float, case: Case, plan: Plan
) -> dict[str, int | None]:
    made = decisions_to(0.95 * final, deliveries, stretch.decided, stretch.begin_s, case.work_s, plan.window_s)
    first = stretch.changes[0] if stretch.changes else None
    return {"decisions_to_95": made, "changes": len(stretch.changes), "first_change": first}


class _Jobs:
    """A fresh process per job, `jobs` at a time; 0 runs each job at once in this process."""

    def __init__(self, jobs: int) -> None:
        self._pool = multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) if jobs else None

    def submit(self, job: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Start a job and return the function that waits for its result."""
        if self._pool is not None:
            waiting = self._pool.apply_async(job, args)
            return lambda: waiting.get(LONGEST_S)
        done = job(*args)
        return lambda: done

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark from the command line."""
    parser = arguments("live_torch", __doc__.split("\n")[0])
    parser.add_argument("--cpus", type=numbers, default=[8, 32, 64], help="virtual CPUs (default 8,32,64)")
    parser.add_argument("--pipelines", type=words, default=list(PIPELINES), help=f"of {', '.join(PIPELINES)}")
    parser.add_argument("--policies", type=words, default=["model-jump"], help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--sigma", type=float, default=0.8, help="irregularity of the udf stage (default 0.8)")
    parser.add_argument("--work", type=float, help="CPU seconds of a batch (default 0.5 at 8 CPUs, else 1)")
    parser.add_argument("--jobs", type=int, default=6, help="machines emulated side by side (default 6)")
    parser.add_argument("--warm", action="store_true", help="start a fresh pipeline from what each run saved, too")
    given = parser.parse_args(argv)
    cases = [
        Case(
            pipeline,
            cpus,
            given.work or (QUICK_WORK_S if given.quick else WORK_S.get(cpus, 1.0)),
            given.sigma,
            given.seed,
        )
        for pipeline in given.pipelines
        for cpus in given.cpus
    ]
    plan = QUICK if given.quick else Plan()
    print(f"{len(cases)} cases, {len(given.policies)} policies, plan {asdict(plan)}", flush=True)
    return write("live_torch", run(cases, given.policies, plan, given.jobs, given.warm), given.seed, given.json)


if __name__ == "__main__":
    main()
