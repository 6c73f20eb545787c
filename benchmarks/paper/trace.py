"""One system on an emulated machine that changes under way: what was delivered, second by second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.live_loop import Case, Loop, decisions_to, seconds_to

__all__ = ["Event", "build", "mean", "trace"]

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Event:
    """What happens to the machine.

    Args:
        at_s: when, in seconds.
        kind: ``cpus``: it has so many; ``taken``: a neighbour takes so many, unseen by the probe; ``cost STAGE``: the
            stage takes so many times as much CPU; ``wait STAGE``: it waits so many times its work without a CPU.
        value: how much.
    """

    at_s: float
    kind: str
    value: float

    def happen(self, live: Any) -> None:
        """Change the machine that `live` runs on."""
        machine, (kind, _, stage) = live.machine, self.kind.partition(" ")
        if kind == "cpus":
            live.change_cpus(int(self.value))
        elif kind == "taken":
            free = machine.cpus + machine.hidden
            machine.hidden = int(self.value)
            machine.resize(free - machine.hidden)
        else:
            getattr(machine, kind)[stage] = self.value


def build(framework: str, name: str, case: Case) -> Any:
    """Return a running pipeline.

    Args:
        framework: ``tf.data`` or ``torch``.
        name: of the system.
        case: pipeline and machine.
    """
    if framework == "torch":
        from benchmarks.live_cases import SYSTEMS, LiveNodes

        return LiveNodes(case, SYSTEMS[name])
    from benchmarks.tfdata_cases import SYSTEMS as TF_SYSTEMS
    from benchmarks.tfdata_cases import LiveData

    return LiveData(case, TF_SYSTEMS[name])


def trace(
    framework: str, name: str, case: Case, settle_s: float, seconds: float, events: Sequence[Event] = ()
) -> dict[str, Any]:
    """Run one system and return what it did in each second.

    Args:
        framework: ``tf.data`` or ``torch``.
        name: of the system.
        case: pipeline and machine.
        settle_s: before the first second that counts; nothing happens in it.
        seconds: how long.
        events: what happens to the machine; 0 s is the first second that counts.

    Returns:
        ``at_s``; ``batches_per_s`` delivered, of mean work; ``computed_per_s``, what the stages did; ``limit``, what
        every CPU that is there could do if it were busy all the time; ``utilisation`` of the CPUs; ``cpus``;
        ``seconds_to`` and ``decisions_to`` 90, 95 and 99 % of the limit from the very start, None if never; ``changes``
        and ``frozen`` of the tuner.
    """
    live, waiting = build(framework, name, case), sorted(events, key=lambda event: event.at_s)
    names = ("at_s", "batches_per_s", "computed_per_s", "limit", "utilisation", "cpus")
    series: dict[str, list[float]] = {name: [] for name in names}
    try:
        live.train(settle_s, live.tuner)
        begin_s = time.perf_counter()
        while (now_s := time.perf_counter() - begin_s) < seconds:
            while waiting and waiting[0].at_s <= now_s:
                waiting.pop(0).happen(live)
            _second(live, series, begin_s)
        return {**series, **_speed(live, case), **_decided(live)}
    finally:
        live.close()


def _second(live: Loop, series: dict[str, list[float]], begin_s: float) -> None:
    before, first, machine = live.machine.usage(), len(live.deliveries), live.machine
    live.train(EVERY_S, live.tuner)  # type: ignore[attr-defined]
    used, case = machine.usage().since(before), live.case
    work_s = sum(share * machine.cost.get(stage, 1.0) for stage, share in case.shares.items()) * case.work_s
    delivered = sum(delivery.work_s for delivery in live.deliveries[first:]) / case.work_s
    series["at_s"].append(round(time.perf_counter() - begin_s, 2))
    series["batches_per_s"].append(round(delivered / used.at_s, 3))
    series["computed_per_s"].append(round(used.asked_s / work_s / used.at_s, 3))
    series["limit"].append(round(machine.cpus / work_s, 3))
    series["utilisation"].append(round(used.utilisation, 3))
    series["cpus"].append(machine.cpus)


def _speed(live: Loop, case: Case) -> dict[str, Any]:
    decided = [d.observation.step for d in live.tuner.history.decisions] if live.tuner is not None else []  # type: ignore[attr-defined]
    window_s = max(5.0, 40.0 / case.fluid_limit)
    found: dict[str, Any] = {"seconds_to": {}, "decisions_to": {}}
    for part in (90, 95, 99):
        given = (part / 100 * case.fluid_limit, live.deliveries)
        reached = seconds_to(*given, 0.0, case.work_s, window_s)
        found["seconds_to"][str(part)] = None if reached is None else round(reached, 1)
        found["decisions_to"][str(part)] = decisions_to(*given, decided, 0.0, case.work_s, window_s)
    return found


def _decided(live: Any) -> dict[str, Any]:
    if live.tuner is None:
        return {}
    return {"changes": sum(d.applied for d in live.tuner.history.decisions), "frozen": live.tuner.frozen}


def mean(run: dict[str, Any], begin_s: float = 0.0, end_s: float = float("inf"), of: str = "fraction") -> float:
    """Return the mean of a run's seconds in a stretch.

    Args:
        run: what `trace` returned.
        begin_s, end_s: the stretch.
        of: one of its series; ``rate`` is the smaller of what was delivered and computed, so that neither filling nor
            draining buffers count as speed; ``fraction`` is that of the limit.
    """
    edges = np.clip([0.0, *run["at_s"]], begin_s, end_s)
    spans = np.diff(edges)
    if of not in ("rate", "fraction"):
        return float(spans @ run[of] / spans.sum())
    done = min(spans @ run["batches_per_s"], spans @ run["computed_per_s"])
    return float(done / (spans @ run["limit"] if of == "fraction" else spans.sum()))
