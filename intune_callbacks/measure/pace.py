"""When a window opens and when a decision is due, counted in batches and in time without pauses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from intune_callbacks.config import TunerConfig
from intune_callbacks.measure.steady import NO_ROUND, Round
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.types import Probe

__all__ = ["Pace"]

SETTLE_BATCHES, SETTLE_S = 10, 0.3
"""Batches, at most, and seconds that are left out after a resize, for they were begun before it. A choice: what wider
windows still hold is told by `measure.steady`."""
SHORT_EPOCH = 5.0
"""Epochs of up to so many windows are measured whole: the first batches of an epoch are unlike the later ones. A
choice: of a longer one the first batches are few."""
FIRST_BATCHES, FIRST_S = 4, 1.0
"""The first window of a pipeline so slow ends sooner: until then nothing is tuned, and much is to be gained. A
choice: four batches are the fewest whose mean says something."""
WARM_BATCHES, WARM_S = 2, 0.05
"""So does the warm-up, after so many seconds for each of its batches: imports, compilation and cold caches are those of
the first two. A choice: a second by default."""
LONGEST_START_S = 10.0
"""Workers that are still being started are waited for at most so long. A choice: forks are over by then also on a
crowded machine."""
ROUNDS, LONGEST_ROUND_S = 1.25, 2.0
"""A round is not waited for any more when it takes so many times as long as expected, or so long, in seconds: measured,
see "Costs" in docs/adr/0018-a-window-holds-a-round.md."""


@dataclass(frozen=True, slots=True)
class _Gate:
    """Opens after `steps` and `active_s`, or after fewer steps and more seconds: any pair of `slow`."""

    steps: int
    active_s: float
    slow: tuple[tuple[int, float], ...]


class Pace:
    """Warm-up, then windows of at least `decide_every_s` and `decide_every_batches`, each resize left time to act.

    Args:
        config: `warmup_batches`, `decide_every_s`, `decide_every_batches` and `memory_soft_limit` are used.
        probe: asked for the memory while workers are being started, when nobody else asks.
    """

    def __init__(self, config: TunerConfig, probe: Probe) -> None:
        self._probe, self._soft_limit, self._ask_every_s = probe, config.memory_soft_limit, config.decide_every_s
        self._ask_at_s, self._is_short = 0.0, False
        steps, least_s, slow_s = config.decide_every_batches, config.decide_every_s, max(1.0, config.decide_every_s)
        self._settle_slow_s, self._longest_round_s = slow_s, LONGEST_ROUND_S * slow_s
        self._longest_start_s = LONGEST_START_S * slow_s
        self._decision = _Gate(steps, least_s, ((2, 10.0 * slow_s),))
        self._first = replace(self._decision, slow=((2, 10.0 * slow_s), (FIRST_BATCHES, FIRST_S * slow_s)))
        # A trial is looked at sooner: it may cost.
        self._trial = _Gate(max(1, steps // 2), least_s / 2, ((1, 5.0 * slow_s),))
        warm = config.warmup_batches
        self._gate = self._warm_up = _Gate(warm, 0.0, ((WARM_BATCHES, WARM_S * slow_s * warm),))
        self._steps, self._active_s = 0, 0.0
        self._round = NO_ROUND

    @property
    def is_measuring(self) -> bool:
        """True while a window is open; False during warm-up and while a resize settles."""
        return self._gate in (self._first, self._decision, self._trial)

    @property
    def is_warm(self) -> bool:
        """True once the warm-up is over."""
        return self._gate is not self._warm_up

    def is_due(self, totals: StepTotals, is_growing: bool = False) -> bool:
        """Return True when the present phase is over.

        Args:
            is_growing: workers that were asked for cannot compute yet: a resize goes on settling.
        """
        gate = self._gate
        steps = totals.steps - self._steps
        active_s = totals.wait_s + totals.model_s - self._active_s
        if is_growing and not self.is_measuring and active_s < self._longest_start_s and not self._is_full(totals):
            return False
        if steps < self._round.batches and active_s < min(ROUNDS * self._round.seconds, self._longest_round_s):
            return False
        regular = steps >= gate.steps and active_s >= gate.active_s
        if regular and self.is_measuring and totals.epochs > 1 and totals.epoch_batches > 0:
            regular = self._is_whole(steps, active_s, totals.epoch_batches)
        return regular or any(steps >= least and active_s >= least_s for least, least_s in gate.slow)

    def _is_full(self, totals: StepTotals) -> bool:
        """Return whether memory was above the soft limit when last asked for: then a decision must not wait."""
        if totals.wall_s >= self._ask_at_s:
            self._ask_at_s, seen = totals.wall_s + self._ask_every_s, self._probe.read()
            self._is_short = seen.memory_used_bytes > self._soft_limit * seen.memory_limit_bytes > 0.0
        return self._is_short

    def _is_whole(self, steps: int, active_s: float, epoch_batches: int) -> bool:
        """Return whether `steps` are as many as those of whole epochs, where epochs are short."""
        batch_s, gate = active_s / steps, self._gate
        if epoch_batches * batch_s > SHORT_EPOCH * max(self._decision.active_s, SETTLE_S):
            return True
        needed = max(gate.steps, gate.active_s / batch_s if batch_s > 0.0 else 0.0)
        return steps >= epoch_batches * math.ceil(needed / epoch_batches)

    def measure(self, totals: StepTotals, is_trial: bool = False, whole: Round = NO_ROUND) -> None:
        """Begin a window that holds the `whole` round, half as long for a trial: that may cost."""
        following = self._first if self._gate is self._warm_up else self._decision
        self._begin(self._trial if is_trial else following, totals, whole)

    def settle(self, totals: StepTotals, window: int, whole: Round = NO_ROUND) -> None:
        """Leave out the batches that were finished, or begun, before a resize.

        Args:
            window: results that may have been ready for the consumer.
            whole: the round that workers begun now take for their first items.
        """
        self._begin(_Gate(min(SETTLE_BATCHES, window), SETTLE_S, ((1, self._settle_slow_s),)), totals, whole)

    def _begin(self, gate: _Gate, totals: StepTotals, whole: Round) -> None:
        self._gate, self._round = gate, whole
        self._steps, self._active_s = totals.steps, totals.wait_s + totals.model_s
