"""A simulated machine as one `Observation`, so that the product's scalar policies run on simulated machines too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from intune_callbacks.config import TunerConfig
from intune_callbacks.decide.view import Floats, View
from intune_callbacks.guard.guard import Guard
from intune_callbacks.pipelines.base import busy_limit, clamp
from intune_callbacks.pretrain.env import MOST_WINDOW
from intune_callbacks.pretrain.machines import BUFFER
from intune_callbacks.types import Allocation, Observation, Policy, Resources, Stage, StageRates

__all__ = [
    "BUFFER_STAGE",
    "MEMORY_BYTES",
    "Scalar",
    "arrays",
    "name_of",
    "observe",
    "resources",
    "stages",
    "workers_in",
]

MEMORY_BYTES = 64 * 2**30
"""Memory of every simulated machine: a nominal size, for only shares of it matter."""
BUFFER_STAGE = "buffer"
BATCHES = 400
"""Batches of a window a policy is shown, about: enough digits, and no more certainty than a real window of a second."""


def name_of(slot: int) -> str:
    """Return the name of a worker slot's stage."""
    return f"s{slot}"


def workers_in(view: View, row: int) -> list[int]:
    """Return the slots of one machine that hold workers."""
    return [int(slot) for slot in np.flatnonzero(view.mask[row] & ~view.is_buffer[row])]


def stages(view: View, row: int) -> tuple[Stage, ...]:
    """Return the stages of one machine: ``s0``.. with a window each, and the prefetch buffer if it can be changed.

    Args:
        view: N machines.
        row: which of them.
    """
    found = []
    low, high, now, windows = view.low[row], view.high[row], view.value[row], view.window[row]
    for slot in workers_in(view, row):
        name = name_of(slot)
        found.append(Stage(name, "cpu", "workers", int(low[slot]), int(high[slot]), int(now[slot])))
        found.append(Stage(f"{name}.window", "memory", "items", 1, MOST_WINDOW, int(windows[slot]), window_of=name))
    if view.mask[row, BUFFER]:
        size = (int(low[BUFFER]), int(high[BUFFER]), int(now[BUFFER]))
        found.append(Stage(BUFFER_STAGE, "memory", "items", *size))
    return tuple(found)


def arrays(allocation: Mapping[str, int], view: View, row: int) -> tuple[Floats, Floats]:
    """Return values and windows of one machine with `allocation` in force, [SLOTS] each.

    Args:
        allocation: stage name -> value; what is left out stays as it is.
        view: N machines.
        row: which of them.
    """
    value, window = view.value[row].copy(), view.window[row].copy()
    for slot in workers_in(view, row):
        name = name_of(slot)
        value[slot] = allocation.get(name, value[slot])
        window[slot] = allocation.get(f"{name}.window", window[slot])
    value[BUFFER] = allocation.get(BUFFER_STAGE, value[BUFFER])
    return value, window


def resources(view: View, row: int) -> Resources:
    """Return CPUs and memory of one machine."""
    return Resources(float(view.cpus[row]), MEMORY_BYTES, int(view.memory[row] * MEMORY_BYTES))


def observe(view: View, row: int, decision: int = 0, parts: float = 1.0) -> Observation:
    """Return one machine of a view as an observation of about one second.

    Args:
        view: N machines.
        row: which of them.
        decision: number of the decision; the clock shows so many seconds.
        parts: what counts as a batch is so small a part of a simulated batch, which gives slow machines whole batches.
    """
    rate, demand = float(view.rate[row]) * parts, float(view.demand[row]) * parts
    batches = max(1, round(rate))
    elapsed_s, wait = batches / rate, max(0.0, 1.0 - rate / demand)
    return Observation(
        step=decision * BATCHES,
        at_s=float(decision),
        elapsed_s=elapsed_s,
        batches=batches,
        samples=batches,
        batches_per_s=rate,
        samples_per_s=rate,
        wait_frac=wait,
        model_s=1.0 / demand,
        stages=stages(view, row),
        rates={name_of(slot): _rates(view, row, slot, batches, parts) for slot in workers_in(view, row)},
        resources=resources(view, row),
        latency_s=wait * elapsed_s / batches,
    )


def _rates(view: View, row: int, slot: int, items: int, parts: float) -> StageRates:
    service_s, busy, fill = float(view.work_s[row, slot]) / parts, float(view.busy[row, slot]), view.fill[row, slot]
    return StageRates(
        items=items,
        items_per_batch=1.0,
        service_s=service_s,
        service_cpu_s=service_s * float(view.cpu_share[row, slot]),
        service_cv=float(view.cv[row, slot]),
        busy_frac=busy,
        starved_frac=(1.0 - busy) * (1.0 - float(fill)),
        blocked_frac=(1.0 - busy) * float(fill),
        queue_fill=float(fill),
        item_bytes=float(view.item_memory[row, slot]) * MEMORY_BYTES,
        worker_bytes=float(view.unit_memory[row, slot]) * MEMORY_BYTES,
    )


class Scalar:
    """Runs one scalar policy per simulated machine, behind the guard, as the tuner does.

    The guard counts every worker with its weight and grants the budget of the view, no more. On CPU *time*, as for real
    pipelines, workers that wait for each other go for free: the simulator's oracle may not do that either.

    Args:
        make: returns a new policy; called for each machine, and again for one that ran out of memory.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._machines: list[_Tuned | None] = []
        self._decision = 0

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return values and windows, [N, SLOTS]."""
        self._decision += 1
        self._machines = self._machines or [None] * len(view.cpus)
        value, window = view.value.copy(), view.window.copy()
        for row, alive in enumerate(view.alive):
            if not alive:
                self._machines[row] = None
                continue
            machine = self._machines[row]
            if machine is None:
                machine = self._machines[row] = _Tuned(self._make(), BATCHES / float(view.rate[row]))
            value[row], window[row] = arrays(machine.decide(view, row, self._decision), view, row)
        return value, window


class _Tuned:
    """One machine's policy and guard."""

    def __init__(self, policy: Policy, parts: float) -> None:
        self._policy, self._parts = policy, parts
        self._guard = Guard(TunerConfig())
        self._settling = False
        self._cpus = 0.0

    def decide(self, view: View, row: int, decision: int) -> Allocation:
        observation = observe(view, row, decision, self._parts)
        # The tuner leaves out what was begun before a change; a new machine size is worth a look at any time.
        settling, self._settling = self._settling and observation.resources.cpus == self._cpus, False
        self._cpus = observation.resources.cpus
        allocation = self._permitted(observation, _for_guard(observation, view, row), settling)
        self._settling = allocation != observation.allocation
        return allocation

    def _permitted(self, observation: Observation, measured: Observation, settling: bool) -> Allocation:
        alarm = self._guard.alarm(measured)
        if alarm is not None:
            return alarm.allocation
        if settling:
            return observation.allocation
        wanted = clamp(self._policy.decide(observation).allocation, observation.stages)
        if wanted.items() <= observation.allocation.items():
            return observation.allocation
        return self._guard.check(wanted, measured).allocation


def _for_guard(observation: Observation, view: View, row: int) -> Observation:
    """Return what the guard is shown: weights for CPU shares, the budget, and what a buffered batch takes."""
    rates = {}
    for slot in workers_in(view, row):
        name = name_of(slot)
        seen = observation.rates[name]
        rates[name] = replace(seen, service_cpu_s=seen.service_s * float(view.weight[row, slot]))
    if view.mask[row, BUFFER]:
        # Policies know only stages that work: for them a buffer has no rates.
        size, fill = float(view.unit_memory[row, BUFFER]) * MEMORY_BYTES, float(view.fill[row, BUFFER])
        rates[BUFFER_STAGE] = StageRates(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, fill, size, 0.0)
    idle = busy_limit(0.0, len(observation.rates))
    cpus = (float(view.budget[row]) - idle) / (busy_limit(1.0, len(observation.rates)) - idle)
    return replace(observation, rates=rates, resources=replace(observation.resources, cpus=cpus))
