"""Which windows say something of an allocation, and how much: those that made what they delivered, of many items."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from intune_callbacks.types import Observation, PipelineStats

__all__ = ["MOST_UNSTEADY", "NO_ROUND", "Round", "Steadiness", "luck", "round_of"]

WINDOWS = 20
"""Windows whose median is what a stage usually makes for a batch. A choice: those in which buffers fill are fewer."""
STEADY, MOST_UNSTEADY = 2.0, 10
"""By what factor a stage may make more or fewer items per batch delivered than it usually does, and how many windows of
an allocation are not counted for that reason: they fill buffers, or deliver what another allocation had made. What it
brought: docs/adr/0015-a-net-under-every-policy.md."""


class Steadiness:
    """Knows what each stage usually makes for one batch delivered."""

    def __init__(self) -> None:
        # Items each stage made per batch delivered, window by window.
        self._made: dict[str, deque[float]] = {}
        self._unsteady = MOST_UNSTEADY

    def changed(self) -> None:
        """Another allocation is in force: for a while buffers may fill or drain."""
        self._unsteady = 0

    def watch(self, seen: Observation) -> bool:
        """Take a window of one batch or more; return whether its batches were made in it, or as good as: `STEADY`."""
        is_steady = True
        workers = {stage.name: stage.current for stage in seen.stages}
        for name, rate in seen.rates.items():
            made = self._made.setdefault(name, deque(maxlen=WINDOWS))
            expected = median(made) * seen.batches if made else 0.0
            # What the workers hold at both ends of a window makes a few items more or less.
            if expected and abs(rate.items - expected) > workers.get(name, 0):
                is_steady &= 1.0 / STEADY <= rate.items / expected <= STEADY
            made.append(rate.items / seen.batches)
        if is_steady or self._unsteady >= MOST_UNSTEADY:
            return True
        self._unsteady += 1
        return False


def luck(seen: Observation) -> float:
    """Return the relative error to expect of a window's throughput: its busy stages made few items of unequal cost."""
    return max([r.busy_frac * r.service_cv / math.sqrt(max(1, r.items)) for r in seen.rates.values()], default=0.0)


@dataclass(frozen=True, slots=True)
class Round:
    """The time in which each busy worker makes one item.

    Workers that began together also end together: n batches come at once, and then none for as long as one takes. A
    shorter window sees more or fewer of them by chance.

    Args:
        batches: delivered meanwhile.
        seconds: it takes while as many CPUs are free as were when it was measured.
    """

    batches: float = 0.0
    seconds: float = 0.0


NO_ROUND = Round()


def round_of(seen: Observation, now: PipelineStats) -> Round:
    """Return the longest round of any stage, with the workers it has now.

    Args:
        seen: the last window, with the stages as they are now.
        now: the counters, for the items of a batch: those of a short window are off by what the workers hold.
    """
    rounds = [NO_ROUND]
    for stage in seen.stages:
        rates, total = seen.rates.get(stage.name), now.stages.get(stage.name)
        if rates is not None and total is not None and total.items > 0 and now.delivered > 0:
            batches = stage.current * rates.busy_frac * now.delivered / total.items
            rounds.append(Round(batches, rates.service_s))
    return max(rounds, key=lambda one: one.batches)
