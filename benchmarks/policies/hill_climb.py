"""Hill climbing on measured throughput: one move at a time, kept only if it gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.policies.measured import Measured
from intune_callbacks.decide.live import awake
from intune_callbacks.decide.policies import with_windows
from intune_callbacks.types import Allocation, Observation, Proposal, Stage

__all__ = ["HillClimb"]

GAINED, NOT_LOST = 1.012, 0.997
"""Ratios of throughput from which on a growing and a shrinking move are kept."""
MOST_FAILS = 14
RETRY_EVERY = 10
INPUT_BOUND_WAIT = 0.03
"""Below this share of waiting there is nothing worth a change."""


class HillClimb:
    """Tries one move at a time and keeps it only if the measured throughput says so.

    Moves: more workers for the bottleneck, workers moved to it from the idlest stage, a window twice as wide, fewer
    workers for the idlest stage; one step or five. The move that failed least is tried next.

    Args:
        windows: windows each allocation is measured.
    """

    name = "hill-climb"

    def __init__(self, windows: int = 2) -> None:
        self._windows = windows
        self._cpus: float | None = None
        self._now: Measured | None = None
        self._base: Measured | None = None
        self._move = ""
        self._tries = 0
        self._fails = dict.fromkeys(("grow", "transfer", "widen", "shed"), 0)

    def decide(self, observation: Observation) -> Proposal:
        """Return the next trial, or the way back from a failed one."""
        observation = awake(observation)
        before, self._cpus = self._cpus, observation.resources.cpus
        if before is not None and abs(self._cpus - before) > max(0.5, 0.05 * before):
            self._reset()
            return Proposal(_scaled(observation, self._cpus / before), f"{before:g} -> {self._cpus:g} CPUs: rescaled")
        if self._now is None or self._now.allocation != observation.allocation:
            self._now = Measured(observation.allocation)
        self._now.add(observation)
        if len(self._now) < self._windows:
            return Proposal(reason=f"measuring, window {len(self._now)} of {self._windows}")
        if self._move and self._base is not None:
            # A move the guard did not grant failed too, or it would be asked for again and again.
            ratio, _ = self._now.ratio_to(self._base)
            move, self._move = self._move, ""
            if ratio < (NOT_LOST if move == "shed" else GAINED):
                self._fails[move] += 1
                back = {k: n for k, n in self._base.allocation.items() if n != observation.allocation[k]}
                return Proposal(back, f"{move} taken back: {ratio:.3f} x the throughput")
            self._fails = dict.fromkeys(self._fails, 0)
        self._base = self._now
        return self._try(observation)

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        """Count the present move as failed, and measure anew before the next one."""
        if self._move:
            self._fails[self._move] += 1
        self._now, self._base, self._move = None, None, ""

    def state_dict(self) -> dict[str, Any]:
        """Return which moves failed how often."""
        return {"fails": dict(self._fails), "tries": self._tries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._fails.update({name: int(n) for name, n in state["fails"].items() if name in self._fails})
        self._tries = int(state["tries"])

    def _reset(self) -> None:
        self._now = self._base = None
        self._move = ""
        self._fails = dict.fromkeys(self._fails, 0)

    def _try(self, observation: Observation) -> Proposal:
        self._tries += 1
        if _waiting(observation) < INPUT_BOUND_WAIT:
            return Proposal(reason="the input pipeline is not the bottleneck", settled=True)
        if sum(self._fails.values()) > MOST_FAILS and self._tries % RETRY_EVERY:
            return Proposal(reason="no move helps any more", settled=True)
        for move in sorted(self._fails, key=lambda name: self._fails[name]):
            trial = _moved(observation, move, 5 if self._tries % 2 == 0 else 1)
            if not trial.items() <= observation.allocation.items():
                self._move = move
                return Proposal(trial, f"trying to {move}: " + ", ".join(f"{k} {v}" for k, v in trial.items()))
            self._fails[move] += 1
        return Proposal(reason="no move is possible", settled=True)


def _waiting(observation: Observation) -> float:
    """Return the share of the window lost for want of data: the GPU's idle share if known, else the loop's wait."""
    exposed = observation.exposed_wait_frac
    return observation.wait_frac if exposed is None else min(exposed, observation.wait_frac)


def _worker_stages(observation: Observation) -> list[Stage]:
    return [stage for stage in observation.stages if stage.kind != "memory"]


def _scaled(observation: Observation, factor: float) -> Allocation:
    stages = [stage for stage in _worker_stages(observation) if stage.low < stage.high]
    workers = {s.name: min(max(round(s.current * factor), s.low), s.high) for s in stages}
    return with_windows(workers, observation)


def _moved(observation: Observation, move: str, step: int) -> Allocation:
    """Return the changes of one move; empty when it is not possible."""
    stages = {s.name: s for s in _worker_stages(observation) if s.name in observation.rates}
    # Worker seconds per batch and worker: the largest paces the pipeline, the smallest idles most.
    load = {
        name: r.items_per_batch * r.service_s / stages[name].current
        for name, r in observation.rates.items()
        if name in stages and stages[name].low < stages[name].high
    }
    if not load:
        return {}
    slow, idle = max(load, key=lambda name: load[name]), min(load, key=lambda name: load[name])
    more = min(stages[slow].current + step, stages[slow].high)
    fewer = max(stages[idle].current - step, stages[idle].low)
    if move == "widen":
        return {s.name: min(2 * s.current, s.high) for s in observation.stages if s.window_of == slow}
    if move == "shed":
        return {idle: fewer} if fewer < stages[idle].current else {}
    if move == "transfer":
        can = idle != slow and fewer < stages[idle].current
        return _widened({slow: more, idle: fewer}, observation) if can else {}
    return _widened({slow: more}, observation)


def _widened(workers: Allocation, observation: Observation) -> Allocation:
    """Add windows that are too narrow for the new workers."""
    wide = with_windows(workers, observation)
    now = observation.allocation
    return {name: max(value, now[name]) if name not in workers else value for name, value in wide.items()}
