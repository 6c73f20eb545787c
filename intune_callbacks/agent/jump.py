"""ModelJump: jump to the fitted allocation, confirm it by measurement, hold it, wake when something changed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from intune_callbacks.agent.fitter import Fitter
from intune_callbacks.agent.live import awake
from intune_callbacks.agent.measured import Measured
from intune_callbacks.agent.model import (
    DEMAND_MARGIN,
    Plan,
    demand_batches_per_s,
    is_input_bound,
    over_budget,
    plan,
    predict,
    waiting,
)
from intune_callbacks.agent.ordering import window_for
from intune_callbacks.spelling import percent
from intune_callbacks.types import Allocation, Observation, Proposal

__all__ = ["WORTH", "ModelJump", "changed_cpus"]

WORTH = 1.04
"""Smallest predicted gain that is worth a change."""
LOST = 0.97
"""A change that leaves less than this share of the throughput is taken back."""
WAIT_FOR_ITEMS = 3
"""Windows to wait for a stage that has not made enough items yet."""
SURE_WINDOWS, DOUBTFUL_WINDOWS = 4, 6
LONG_S = 5.0
"""What was measured for so long needs no second window."""
FIRST_TIMER_S, LAST_TIMER_S = 10.0, 1800.0
IDLE_WINDOWS = 30
DROP, DROP_WINDOWS = 0.85, 3


def changed_cpus(before: float | None, now: float) -> bool:
    """Return True when the machine was resized since the last decision."""
    return before is not None and abs(now - before) > max(0.5, 0.05 * before)


class ModelJump:
    """Jumps to the allocation of the fitted model instead of walking there.

    measure -> jump -> confirm -> (jump again while it gains) -> hold -> wake. Bottlenecks hide behind each other and
    serial parts show only at another number of workers, so up to `jumps` jumps follow each other; each is compared
    with the best allocation measured and taken back if throughput fell. A training loop that does not wait for data
    is left alone, except that idle *process* workers, which hold memory, are slowly given back.

    While it holds, windows still follow the irregularity that shows. Holding ends on a drop of more than 15 % or a new
    wait over three windows, a resized machine (a jump on that same decision), and a timer that doubles each time it
    finds nothing.

    Args:
        jumps: most jumps in one go.
        windows: windows an allocation is measured before it is judged.
    """

    name = "model-jump"

    def __init__(self, jumps: int = 4, windows: int = 2) -> None:
        self._most_jumps, self._windows = jumps, windows
        self._fitter = Fitter()
        self._cpus: float | None = None
        self._now: Measured | None = None
        self._best: Measured | None = None
        self._asked: Allocation = {}
        self._phase = "measure"
        self._jumps = 0
        self._starved_windows = self._idle_windows = 0
        self._held_wait = 0.0
        self._recent: deque[Observation] = deque()
        self._may_shed = self._may_trim = True
        self._widened: Allocation = {}
        self._timer_s, self._timer_at_s = FIRST_TIMER_S, 0.0
        self._held: Allocation = {}
        self._failed: Allocation = {}
        self._last_at_s = 0.0

    def decide(self, observation: Observation) -> Proposal:
        """Return where to go from here; an empty allocation means stay."""
        observation = awake(observation)
        self._fitter.learn(observation)
        self._last_at_s = observation.at_s
        before, self._cpus = self._cpus, observation.resources.cpus
        if changed_cpus(before, self._cpus):
            self._failed = {}
            self._wake(observation)
            why = f"the machine changed from {before:g} to {self._cpus:g} CPUs"
            return self._jump(observation, why) if self._fitter.is_reliable(observation) else self._measure(observation)
        if self._now is None or self._now.allocation != observation.allocation:
            # The guard, a new epoch or somebody else moved it: what was measured belongs to another allocation.
            self._now = Measured(observation.allocation)
            self._recent.clear()
        held, self._held = self._held, {}
        if held and held == observation.allocation:
            return self._hold(observation, "what the run before held")
        if self._phase == "hold":
            return self._watch(observation, self._now)
        self._now.add(observation)
        return self._confirm(observation, self._now) if self._phase == "confirm" else self._measure(observation)

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        """Hold what was gone back to; the next look comes after twice the time, and not for `failed`.

        Args:
            failed: the allocation that was left.
            ratio: its throughput / the best one's.
        """
        self._failed = {**failed, **self._asked}
        self._phase, self._best, self._now = "hold", None, None
        # How long the training waits here is seen in the next windows: no wait is a new one.
        self._held_wait, self._may_shed, self._may_trim = 1.0, False, False
        self._recent.clear()
        self._starved_windows = self._idle_windows = 0
        self._timer_s = min(2.0 * self._timer_s, LAST_TIMER_S)
        self._timer_at_s = self._last_at_s + self._timer_s

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted readings, the timer and what is held; what was measured is measured anew."""
        held = dict(self._now.allocation) if self._phase == "hold" and self._now is not None else self._held
        return {"fitter": self._fitter.state_dict(), "timer_s": self._timer_s, "cpus": self._cpus, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._fitter.load_state_dict(state["fitter"])
        self._timer_s = float(state["timer_s"])
        self._cpus = None if state["cpus"] is None else float(state["cpus"])
        self._held = {str(name): int(value) for name, value in state["held"].items()}

    def _wake(self, observation: Observation) -> None:
        self._phase, self._jumps, self._best, self._asked = "measure", 0, None, {}
        self._held = {}
        self._recent.clear()
        self._starved_windows = self._idle_windows = 0
        self._may_shed, self._may_trim, self._timer_s = True, True, FIRST_TIMER_S
        self._now = Measured(observation.allocation)

    def _measure(self, observation: Observation) -> Proposal:
        now = self._now or Measured(observation.allocation)
        if self._is_short(now):
            return Proposal(reason=f"measuring, window {len(now)} of {self._windows}")
        if not self._fitter.is_reliable(observation) and len(now) < self._windows + WAIT_FOR_ITEMS:
            return Proposal(reason="measuring: some stage has made too few items to be judged")
        if not is_input_bound(observation):
            return self._hold(observation, "the input pipeline is not the bottleneck")
        return self._jump(observation, "")

    def _is_short(self, now: Measured) -> bool:
        return len(now) < self._windows and now.elapsed_s < LONG_S

    def _jump(self, observation: Observation, why: str) -> Proposal:
        target, gain = self._target(observation)
        fits = self._fitter.fits()
        # Once confirmed, an allocation is left in peace: a share of CPU that is guessed too high is no reason to cut.
        must = self._best is None and over_budget(fits, observation.stages, observation.resources.cpus)
        trim = self._may_trim and self._jumps > 0 and gain >= 0.99 and self._is_leaner(target, observation)
        worth = gain >= WORTH or trim
        if not must and not (worth and is_input_bound(observation)):
            return self._hold(observation, f"no allocation promises {percent(WORTH - 1)} more")
        if target.allocation == self._asked:
            return self._hold(observation, "more was asked for and not granted")
        if target.allocation.items() <= self._failed.items():
            return self._hold(observation, "what promises more was tried and gave less")
        self._asked = target.allocation
        self._may_trim = self._may_trim and not trim
        self._jumps += 1
        self._phase = "confirm"
        if self._best is None and self._now is not None and len(self._now):
            self._best = self._now
        head, now = f"{why}: " if why else "", target.rate / gain
        expected = f"{target.rate:.3g} batches/s expected instead of {now:.3g}, limited by {target.limit}"
        return Proposal(target.allocation, head + expected)

    def _target(self, observation: Observation) -> tuple[Plan, float]:
        fits, cpus, demand = self._fitter.fits(), observation.resources.cpus, demand_batches_per_s(observation)
        target = plan(fits, observation.stages, cpus, demand)
        # What is measured is a fact: a model that expects less of the present allocation overrates every change.
        now = max(predict(fits, observation.stages, {}, cpus, demand), self._now.rate if self._now else 0.0, 1e-12)
        return target, target.rate / now

    def _is_leaner(self, target: Plan, observation: Observation) -> bool:
        """True when a stage turned out to be serial and the same rate needs a fifth fewer workers in all."""
        fits, current = self._fitter.fits(), observation.allocation
        names = [name for name in fits if name in target.allocation and name in current]
        now = sum(current[name] for name in names)
        serial = any(fits[name].serial > 0.0 and target.allocation[name] < current[name] for name in names)
        return serial and sum(target.allocation[name] for name in names) <= 0.8 * now

    def _confirm(self, observation: Observation, now: Measured) -> Proposal:
        if self._is_short(now):
            return Proposal(reason=f"confirming, window {len(now)} of {self._windows}")
        best = self._best
        if best is not None and best.allocation != now.allocation:
            ratio, noise = now.ratio_to(best)
            if ratio < LOST:
                sure = ratio < LOST - 2.0 * noise and (len(now) >= SURE_WINDOWS or ratio < 0.5)
                if not sure and len(now) < DOUBTFUL_WINDOWS:
                    return Proposal(reason=f"confirming: {ratio:.2f} x the best so far, not sure yet")
                return self._undo(observation, best, ratio)
        if best is None or now.rate > best.rate:
            self._best = now
        if self._jumps < self._most_jumps and is_input_bound(observation):
            return self._jump(observation, "")
        return self._hold(observation, "confirmed")

    def _undo(self, observation: Observation, best: Measured, ratio: float) -> Proposal:
        self._may_shed = self._may_trim = False
        # The best is measured again: if it is no longer that fast, it was not our change that made it slow.
        self._best = None
        held = self._hold(observation, f"undone: throughput fell to {ratio:.2f} x the best measured")
        return Proposal(best.allocation, held.reason)

    def _hold(self, observation: Observation, reason: str) -> Proposal:
        self._phase, self._best = "hold", None
        self._recent.clear()
        self._starved_windows = self._idle_windows = 0
        self._held_wait = waiting(observation)
        self._timer_at_s = observation.at_s + self._timer_s
        return Proposal(reason=f"holding: {reason}", settled=True)

    def _watch(self, observation: Observation, now: Measured) -> Proposal:
        lost = waiting(observation)
        slower = self._has_dropped(observation, now)
        self._starved_windows = self._starved_windows + 1 if lost > self._held_wait + 0.1 else 0
        if is_input_bound(observation) and (slower or self._starved_windows >= DROP_WINDOWS):
            self._wake(observation)
            return Proposal(
                reason=f"woken: {observation.batches_per_s:.3g} batches/s, {percent(lost)} waiting: measuring"
            )
        self._idle_windows = 0 if is_input_bound(observation) else self._idle_windows + 1
        if self._idle_windows >= IDLE_WINDOWS and self._may_shed:
            return self._shed(observation, now)
        wider = self._wider_windows(observation) if is_input_bound(observation) and not self._failed else {}
        if wider and wider != self._widened:
            self._widened = wider
            return Proposal(
                wider, "windows widened: the service times are more irregular than they looked", settled=True
            )
        if observation.at_s >= self._timer_at_s:
            self._timer_s = min(2.0 * self._timer_s, LAST_TIMER_S)
            self._timer_at_s = observation.at_s + self._timer_s
            if is_input_bound(observation):
                self._jumps, self._best, self._asked = self._most_jumps - 1, now, {}
                return self._jump(observation, "looked again")
        return Proposal(reason="holding", settled=True)

    def _wider_windows(self, observation: Observation) -> Allocation:
        """Windows that rare long items have shown to be a fifth too narrow; wider ones cost memory only."""
        fits, current = self._fitter.fits(), observation.allocation
        wanted = {
            stage.name: min(stage.high, window_for(current[stage.window_of], fits[stage.window_of].cv))
            for stage in observation.stages
            if stage.window_of in fits and stage.window_of in current
        }
        return {name: window for name, window in wanted.items() if window >= 1.2 * current[name]}

    def _has_dropped(self, observation: Observation, now: Measured) -> bool:
        # The last windows stand apart until they are judged: a drop must not become the measure of itself.
        self._recent.append(observation)
        if len(self._recent) > DROP_WINDOWS:
            now.add(self._recent.popleft())
        recent = Measured(now.allocation)
        for seen in self._recent:
            recent.add(seen)
        if len(recent) < DROP_WINDOWS or len(now) < DROP_WINDOWS:
            return False
        # One long stall is not a drop that lasts: the middle window has to be slow as well.
        middle = median(seen.batches_per_s for seen in self._recent) / max(now.rate, 1e-12)
        noise = math.hypot(now.noise, now.window_noise / math.sqrt(DROP_WINDOWS))
        return max(middle, recent.ratio_to(now)[0]) < min(DROP, 1.0 - 2.0 * noise)

    def _shed(self, observation: Observation, now: Measured) -> Proposal:
        self._idle_windows = 0
        enough = self._target(observation)[0].allocation
        fewer = {
            stage.name: max(enough[stage.name], stage.current * 3 // 4)
            for stage in observation.stages
            if stage.name in observation.rates
            and observation.rates[stage.name].worker_bytes > 0.0
            and stage.current >= max(enough.get(stage.name, stage.current), 2) * 2
        }
        if not fewer:
            return Proposal(reason="holding", settled=True)
        self._best, self._phase = now, "confirm"
        names = ", ".join(sorted(fewer))
        return Proposal(fewer, f"idle workers given back: {names} feeds {DEMAND_MARGIN:g} x the model with fewer")
