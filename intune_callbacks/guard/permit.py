"""Which changes a policy may try: only what can pay, and nothing below the user's own numbers without need."""

from __future__ import annotations

import math

from intune_callbacks.measure.predict import WAITS
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.types import Allocation, Observation, Stage
from intune_callbacks.words import percent

__all__ = ["Permit"]

LEAVE_WAIT, LEAVE_FETCH_S = 0.10, 0.005
"""Share of the time, and seconds of a fetch, that the loop waits for its own work before that leaves it: a hand-off
costs half a ms of CPU, see docs/adr/0015-a-net-under-every-policy.md."""
MOST_FAILS = 2
"""After so many failures upwards a stage stays at the best value measured. A choice: all the way, and half of it."""
ACQUITTED_S = 10.0
"""Seconds after a failure was taken back before the next one of that allocation may be, then twice as long each time. A
choice: a few trials, and the stalls of a machine that has several."""
EARNED_BACK = 2.0
"""How often a trial has to be able to earn back the time it takes. A choice: one in two is expected to fail."""
SHORT_OF_CPUS = 0.8
"""Share of the CPUs in use from which on they are short, the same as in `measure.cause`. A choice: the rest is what the
training and the system take now and then."""


class Permit:
    """What is known of failed trials, and the rules for new ones.

    Args:
        trial_s: seconds a trial takes, besides the start of its workers; 0 where nothing is tried but only advised.

    Attributes:
        is_spent: trials have cost as much as they may.
        wall_s: length of the run so far, seconds.
        own: stage name -> the user's value.
    """

    def __init__(self, trial_s: float = 1.0) -> None:
        self._trial_s = trial_s
        self.is_spent, self.wall_s = False, 0.0
        self.own: Allocation = {}
        self._most_cpus = 0.0
        self._highest: Allocation = {}
        self._fails: dict[str, int] = {}
        # Allocation -> when its failure may be taken back again, and how long after that the next time.
        self._acquitted: dict[tuple[tuple[str, int], ...], tuple[float, float]] = {}

    def begin(self, stages: tuple[Stage, ...]) -> bool:
        """Take the values of `stages` for the user's own; False if these stages are known already."""
        own = {stage.name: stage.current for stage in stages}
        if own.keys() == self.own.keys():
            return False
        self.own = own
        return True

    def forget(self) -> None:
        """What failed on another machine may be tried again."""
        self._highest, self._fails = {}, {}

    def failed(self, allocation: Allocation, best: Allocation) -> None:
        """Note a trial that was worse: what was raised may be raised half as far once more, and then no more."""
        for name, value in allocation.items():
            if value > best.get(name, value):
                self._fails[name] = self._fails.get(name, 0) + 1
                half = math.isqrt(max(1, best[name]) * value)
                self._highest[name] = half if self._fails[name] < MOST_FAILS else best[name]

    def half_way(self, allocation: Allocation, best: Allocation) -> Allocation:
        """Return what may still be tried of what `allocation` raised; empty where it failed too often."""
        highest = {name: self._highest.get(name, value) for name, value in allocation.items()}
        return {name: min(value, highest[name]) for name, value in allocation.items() if highest[name] > best[name]}

    def acquitted(self, allocation: Allocation) -> bool:
        """Take a failure back, for the machine was slow and not the allocation; False where that comes too soon again.

        Where a model becomes slower all the time, each trial gives less than the best has given, and so does that then.
        """
        key = tuple(sorted(allocation.items()))
        again_s, pause_s = self._acquitted.get(key, (0.0, ACQUITTED_S))
        if self.wall_s < again_s:
            return False
        self._acquitted[key] = self.wall_s + pause_s, 2.0 * pause_s
        for name in allocation:
            if self._fails.get(name, 0):
                self._fails[name] -= 1
                self._highest.pop(name, None)
        return True

    def grant(self, wanted: Allocation, seen: Observation) -> tuple[Allocation, str]:
        """Return the part of a policy's wish that may be tried, and why the rest may not."""
        stages, wait = {stage.name: stage for stage in seen.stages}, _wait(seen)
        self._most_cpus = max(self._most_cpus, seen.resources.cpus)
        granted: Allocation = {}
        reasons = []
        is_short = self._is_short_of_cpus(wanted, seen)
        for name, value in wanted.items():
            stage = stages[name]
            low = min(self.own.get(name, stage.low), stage.current)
            most = max(self._most(stage, seen, wait), stage.current)
            if value < low and not (is_short and stage.kind != "memory"):
                if stage.kind != "memory":
                    reasons.append(f"{name} not below {low}, where it began: nobody else needs its CPUs")
                value = low
            elif value > most:
                reasons.append(f"{name} not above {most}")
                value = most
            if value != stage.current:
                granted[name] = value
        grown = {name for name, value in granted.items() if value > stages[name].current}
        start_s = sum(stages[name].startup_s * (granted[name] - stages[name].current) for name in grown)
        if grown and (why := self._why_no_growth(start_s, seen, wait)):
            # What was to be taken elsewhere was to pay for this growth.
            return {}, why
        return granted, "; ".join(reasons)

    def _most(self, stage: Stage, seen: Observation, wait: float) -> int:
        """Return the largest value a stage may be raised to."""
        most = min(stage.high, self._highest.get(stage.name, stage.high))
        if stage.kind == "memory":
            return most
        if stage.current == 0 and (wait < LEAVE_WAIT or seen.latency_s < LEAVE_FETCH_S):
            return 0
        rates = seen.rates.get(stage.name)
        if stage.startup_s > 0.0 and seen.epoch_batches is not None and rates is not None:
            # An epoch of s worker seconds takes s / n + f n seconds with n workers that each take f to start.
            work_s = seen.epoch_batches * rates.items_per_batch * rates.service_s
            most = min(most, max(1, round(math.sqrt(work_s / stage.startup_s))))
        return most

    def why_too_short(self, seen: Observation, start_s: float = 0.0) -> str:
        """Return why no change can be earned back any more, or not yet; empty where one can.

        Args:
            start_s: seconds the start of the change's workers takes.
        """
        # Of a run of unknown length as much is expected to come as has passed.
        left_s = self.wall_s if seen.remaining_s is None else seen.remaining_s
        wait = _wait(seen)
        if wait < WAITS or not self._trial_s or wait * left_s >= EARNED_BACK * (self._trial_s + start_s):
            return ""
        return f"about {left_s:.0f} s are left, with {percent(wait)} of waiting: too few to earn a change back"

    def _why_no_growth(self, start_s: float, seen: Observation, wait: float) -> str:
        if wait < WAITS:
            return f"the training waits {percent(wait)} of the time: nothing to gain"
        # While the training waits, its own CPU is free.
        if _used_cpus(seen) >= seen.resources.cpus + seen.resources.remote_cpus + wait:
            return "the pipeline has all CPUs in use: more workers would share them"
        if start_s > 0.0:
            # Workers that are started with each epoch make its start no shorter.
            wait = max(0.0, wait - seen.seam_s / seen.elapsed_s) if seen.elapsed_s > 0.0 else wait
            if wait < WAITS:
                return f"the training waits {percent(wait)} of the time, starts of epochs left out: nothing to gain"
        if self.is_spent:
            return "trials have cost as much of the run as they may: no more of them for now"
        return self.why_too_short(seen, start_s)

    def _is_short_of_cpus(self, wanted: Allocation, seen: Observation) -> bool:
        """CPUs are short where they are in use, or where `wanted` needs them with nobody below the user's number."""
        cpus, rates = seen.cpus, seen.rates
        if seen.resources.cpus >= self._most_cpus and sum(stage.unit == "workers" for stage in seen.stages) == 1:
            # There is no other stage that would get them; the user's number was chosen for this machine.
            return False
        if _used_cpus(seen) > SHORT_OF_CPUS * cpus:
            return True
        workers = [stage for stage in seen.stages if stage.kind != "memory"]
        busy = 0.0
        for stage in workers:
            r = rates.get(stage.name)
            share = 1.0 if r is None or r.service_s <= 0.0 else min(1.0, r.service_cpu_s / r.service_s)
            busy += share * max(wanted.get(stage.name, stage.current), self.own.get(stage.name, 0))
        return busy > busy_limit(cpus, len(workers))


def _wait(seen: Observation) -> float:
    """Return the share of the time the training lost for want of data: on a GPU that is what the GPU stood idle."""
    return seen.wait_frac if seen.exposed_wait_frac is None else seen.exposed_wait_frac


def _used_cpus(seen: Observation) -> float:
    """Return how many CPUs the stages used on average."""
    used_s = sum(r.items * r.service_cpu_s for r in seen.rates.values())
    return used_s / seen.elapsed_s if seen.elapsed_s > 0.0 else 0.0
