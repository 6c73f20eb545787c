"""The last word before every resize: no allocation leaves the CPU budget or the memory that is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from intune_callbacks.config import TunerConfig
from intune_callbacks.measure.counts import CpuShares
from intune_callbacks.pipelines.base import busy_limit, clamp
from intune_callbacks.types import Allocation, Observation, Stage

__all__ = ["ALARM", "RESTORED", "Guard", "Ruling"]

GB = 1e9
ALARM, RESTORED = "memory alarm", "memory is there again"
"""How the reason of a decision begins that an alarm made, or its end."""
WORTH_FREEING = 0.005
"""An alarm does not touch a pipeline that holds less than this share of the memory: something else fills it, and its
windows would become narrow for nothing. A choice."""
CALM_S, LONGEST_CALM_S = 10.0, 600.0
"""Seconds after an alarm before what it took of the user's own numbers is given back, and at most; each time twice as
long, for memory that comes and goes must not lead the workers to and fro. A choice."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What may be done.

    Args:
        allocation: the whole allocation, every stage, as permitted.
        vetoes: one sentence with numbers for each limit that was reached.
    """

    allocation: Allocation
    vetoes: tuple[str, ...] = ()


class Guard:
    """Clips allocations to what the machine has; independent of any policy.

    CPUs: all workers busy at once may occupy no more than `busy_limit` of the budget. A worker counts with
    the largest share of a CPU seen in recent windows (`CpuShares`): on a crowded machine the present share is too low.

    Memory: with every window full and every new worker started, usage stays below the soft limit. While the size of a
    result is unknown a window at most doubles.

    Args:
        config: `memory_soft_limit` and `max_workers` are used.
    """

    def __init__(self, config: TunerConfig) -> None:
        self._soft_limit = config.memory_soft_limit
        self._max_workers = config.max_workers
        self._shares = CpuShares()
        self._item_bytes: dict[str, float] = {}
        self._worker_bytes: dict[str, float] = {}
        self._seen_at_s: float | None = None
        self._alarm_s, self._calm_s, self._taken = math.inf, CALM_S, set[str]()

    @property
    def largest_item_bytes(self) -> float:
        """The largest known size of an item of any stage, 0 while none is known."""
        return max(self._item_bytes.values(), default=0.0)

    @property
    def worker_bytes(self) -> float | None:
        """The most that one worker process of any stage is known to hold of its own, None while none is known."""
        return max(self._worker_bytes.values(), default=0.0) or None

    def watch(self, observation: Observation) -> None:
        """Remember CPU shares and sizes of a window; `check` and `alarm` do it by themselves."""
        if observation.at_s == self._seen_at_s:
            return
        self._seen_at_s = observation.at_s
        self._shares.learn(observation)
        for name, rates in observation.rates.items():
            self._item_bytes[name] = rates.item_bytes or self._item_bytes.get(name, 0.0)
            self._worker_bytes[name] = rates.worker_bytes or self._worker_bytes.get(name, 0.0)

    def check(self, proposed: Mapping[str, int], observation: Observation, has_run: bool = False) -> Ruling:
        """Return the part of `proposed` that fits.

        Args:
            proposed: stage name -> wanted value; stages left out stay as they are.
            observation: the stages, rates and resources now.
            has_run: it was measured on these CPUs, so that no plan of them forbids it.
        """
        self.watch(observation)
        vetoes: list[str] = []
        allocation = observation.allocation | clamp(proposed, observation.stages)
        if not has_run:
            self._limit_workers(allocation, observation, vetoes)
            self._limit_cpus(allocation, proposed, observation, vetoes)
            self._limit_unknown_windows(allocation, observation, vetoes)
        return Ruling(self._limit_memory(allocation, observation, vetoes), tuple(vetoes))

    def again(self, observation: Observation, own: Mapping[str, int]) -> Ruling | None:
        """Return what to take back of windows granted before, if they do not fit any more once they are full.

        Args:
            observation: the stages, rates and resources now.
            own: the user's numbers; below them nothing is taken before there is an alarm.
        """
        self.watch(observation)
        now, soft_bytes = observation.allocation, self._soft_limit * observation.resources.memory_limit_bytes
        least = now | {
            s.name: min(s.current, own.get(s.name, s.current)) for s in observation.stages if s.kind == "memory"
        }
        needed = self.needed_bytes(now, observation)
        # Up to the limit itself: between the two it would be taken back and granted again at every decision.
        if soft_bytes <= 0.0 or least == now or needed <= observation.resources.memory_limit_bytes:
            return None
        why = f"{needed / GB:.2f} GB needed with full windows, soft limit {soft_bytes / GB:.2f} GB: taken back"
        return Ruling(self._largest_between(least, now, observation, soft_bytes), (why,))

    def alarm(self, observation: Observation) -> Ruling | None:
        """Return what to shrink at once because memory is above the soft limit now; None when all is well.

        Windows go first, at once to the number of their workers: their limit may be far above what they hold yet, so
        half of it need not stop anything, and the next look comes a window later. When they are that narrow, workers
        are halved.
        """
        self.watch(observation)
        resources = observation.resources
        used, soft_bytes = resources.memory_used_bytes, self._soft_limit * resources.memory_limit_bytes
        if resources.memory_limit_bytes <= 0 or used <= soft_bytes:
            return None
        now = observation.allocation
        smaller = now | {
            s.name: min(s.current, max(s.low, now.get(s.window_of or "", 1)))
            for s in observation.stages
            if s.kind == "memory"
        }
        if smaller == now:
            halved = {s.name: min(s.current, max(s.low, (s.current + 1) // 2)) for s in _workers(observation)}
            smaller = now | halved
            smaller |= {
                s.name: min(s.current, max(s.low, smaller[s.window_of]))
                for s in observation.stages
                if s.window_of in smaller
            }
        if smaller == now or self._freed_bytes(smaller, observation) < WORTH_FREEING * resources.memory_limit_bytes:
            return None
        self._alarm_s = observation.at_s
        self._taken |= {name for name, value in smaller.items() if value < now[name]}
        why = f"{ALARM}: {used / GB:.2f} of {resources.memory_limit_bytes / GB:.2f} GB used, "
        return Ruling(smaller, (f"{why}soft limit {soft_bytes / GB:.2f} GB: the pipeline has to shrink",))

    def restored(self, observation: Observation, own: Mapping[str, int]) -> Ruling | None:
        """Return what to give back of the user's `own` numbers, all that alarms took, once it fits for a while."""
        if observation.at_s - self._alarm_s < self._calm_s:
            return None
        now, limit_bytes = observation.allocation, observation.resources.memory_limit_bytes
        # The CPUs are not asked: these numbers were the user's on them.
        taken = self._taken & now.keys() & own.keys()
        whole = now | {name: max(now[name], own[name]) for name in taken}
        if self.needed_bytes(whole, observation) > self._soft_limit * limit_bytes:
            return None
        self._alarm_s, self._taken = math.inf, set()
        if whole == now:
            return None
        self._calm_s = min(2.0 * self._calm_s, LONGEST_CALM_S)
        return Ruling(whole, (f"{RESTORED}: back to the numbers of the start",))

    def needed_bytes(self, allocation: Allocation, observation: Observation) -> float:
        """Return the memory in use once all windows are full, in each rank; workers that leave give nothing back.

        Args:
            allocation: the whole of it.
            observation: the stages, rates and resources now.
        """
        needed = 0.0
        for stage in observation.stages:
            rates = observation.rates.get(stage.window_of or stage.name)
            if stage.kind == "memory" and stage.unit == "items":
                held = rates.queue_fill * stage.current if rates is not None else 0.0
                needed += max(0.0, allocation[stage.name] - held) * self._size(stage)
            else:
                size = 2.0**20 if stage.unit == "MiB" else self._worker_bytes.get(stage.name, 0.0)
                needed += max(0, allocation[stage.name] - stage.current) * size
        return observation.resources.memory_used_bytes + observation.resources.local_ranks * needed

    def state_dict(self) -> dict[str, Any]:
        """Return the CPU shares and sizes seen, and what alarms took."""
        return {
            "taken": sorted(self._taken),
            "shares": self._shares.state_dict(),
            "item_bytes": dict(self._item_bytes),
            "worker_bytes": dict(self._worker_bytes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._shares.load_state_dict(state["shares"])
        self._taken = {str(name) for name in state.get("taken", ())}
        self._alarm_s = -math.inf if self._taken else math.inf
        self._item_bytes = {name: float(size) for name, size in state["item_bytes"].items()}
        self._worker_bytes = {name: float(size) for name, size in state["worker_bytes"].items()}

    def _size(self, buffer: Stage) -> float:
        """Bytes of one buffered item; a buffer nobody measured is taken to hold the largest items of the pipeline."""
        known = self._item_bytes.get(buffer.window_of or buffer.name)
        return self.largest_item_bytes if known is None else known

    def _limit_workers(self, allocation: Allocation, observation: Observation, vetoes: list[str]) -> None:
        for stage in _workers(observation):
            most = max(stage.low, self._max_workers or stage.high)
            if allocation[stage.name] > most:
                vetoes.append(f"{stage.name}: {allocation[stage.name]} workers asked, max_workers={most}")
                allocation[stage.name] = most

    def _limit_cpus(
        self, allocation: Allocation, proposed: Mapping[str, int], observation: Observation, vetoes: list[str]
    ) -> None:
        workers = _workers(observation)
        shares = {stage.name: self._shares.of(stage.name) for stage in workers}
        budget = busy_limit(observation.cpus, len(workers)) + 1e-9

        def busy(values: Mapping[str, int]) -> float:
            return sum(values[name] * share for name, share in shares.items())

        asked = busy(allocation)
        if asked <= budget:
            return
        # In proportion, so that a balanced proposal stays balanced; stages nobody spoke of only if that is not enough.
        wanted = dict(allocation)
        for names in ([s for s in workers if s.name in proposed], workers):
            able = {s.name: s.low for s in names if shares[s.name] > 0.0}
            while busy(allocation) > budget and (able := {n: low for n, low in able.items() if allocation[n] > low}):
                loser = max(able, key=lambda name: (allocation[name] - 1) / wanted[name])
                allocation[loser] -= 1
        if (granted := busy(allocation)) < asked:
            allowed = f"{budget:.1f} allowed on {observation.cpus:.3g}"
            vetoes.append(f"{asked:.1f} busy CPUs asked, {allowed}: {granted:.1f} granted")

    def _limit_unknown_windows(self, allocation: Allocation, observation: Observation, vetoes: list[str]) -> None:
        for stage in observation.stages:
            most = max(2 * stage.current, stage.low)
            grows = stage.unit == "items" and stage.kind == "memory" and allocation[stage.name] > most
            if grows and self._size(stage) <= 0.0:
                asked, allocation[stage.name] = allocation[stage.name], most
                vetoes.append(f"{stage.name}: {asked} asked, {most} until the size of an item is known")

    def _limit_memory(self, target: Allocation, observation: Observation, vetoes: list[str]) -> Allocation:
        resources = observation.resources
        soft_bytes = self._soft_limit * resources.memory_limit_bytes
        if resources.memory_limit_bytes <= 0 or target == observation.allocation:
            return target
        asked = self.needed_bytes(target, observation)
        if asked <= soft_bytes:
            return target
        memory = {stage.name for stage in observation.stages if stage.kind == "memory"}
        least = {name: min(value, observation.allocation[name]) for name, value in target.items()}
        buffers = [stage for stage in observation.stages if stage.name in memory]
        lowest = {s.name: min(least[s.name], max(s.low, least.get(s.window_of or "", 1))) for s in buffers}
        # Give up, in this order: growth of windows, growth of workers, windows that are there now.
        steps = (target, target | {name: least[name] for name in memory}, least, least | lowest)
        granted = steps[-1]
        for larger, smaller in pairwise(steps):
            if self.needed_bytes(smaller, observation) <= soft_bytes:
                granted = self._largest_between(smaller, larger, observation, soft_bytes)
                break
        needed = self.needed_bytes(granted, observation)
        vetoes.append(
            f"{asked / GB:.2f} GB needed with full windows, soft limit {soft_bytes / GB:.2f} of "
            f"{resources.memory_limit_bytes / GB:.2f} GB: clipped to {needed / GB:.2f} GB"
        )
        return granted

    def _largest_between(
        self, smaller: Allocation, larger: Allocation, observation: Observation, soft_bytes: float
    ) -> Allocation:
        low, high, best = 0, 64, smaller
        while low < high:
            middle = (low + high + 1) // 2
            mixed = {name: n + (larger[name] - n) * middle // 64 for name, n in smaller.items()}
            if self.needed_bytes(mixed, observation) <= soft_bytes:
                low, best = middle, mixed
            else:
                high = middle - 1
        return best

    def _freed_bytes(self, smaller: Allocation, observation: Observation) -> float:
        freed = 0.0
        for stage in observation.stages:
            fewer = stage.current - smaller[stage.name]
            size = self._worker_bytes.get(stage.name, 0.0)
            if stage.kind == "memory" and fewer:  # where nothing is known of its results, they may fill the memory
                size = (2.0**20 if stage.unit == "MiB" else self._size(stage)) or math.inf
            freed += fewer * size
        return freed


def _workers(observation: Observation) -> list[Stage]:
    return [stage for stage in observation.stages if stage.kind != "memory"]
