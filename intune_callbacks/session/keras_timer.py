"""Split the wall time of a loop of which only the beginnings of its steps are seen."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from intune_callbacks.measure.wait import StepTimer, StepTotals
from intune_callbacks.types import Clock

__all__ = ["LoopReading", "LoopTimer"]

# Below this share of data wait a step's time is taken to be the model's. A choice: it is off by no more than that.
FED_FRAC = 0.1
# Of so many looks the one with the quickest step is believed. A choice: a machine with other work on it delays most
# loops and not all, while a model that becomes slower is noticed within seconds.
LOOKS = 8


@dataclass(frozen=True, slots=True)
class LoopReading:
    """Monotonic counters of the fetches of a loop.

    Args:
        delivered: batches the loop was given.
        wait_s: seconds it was blocked for them.
        samples: samples in these batches.
    """

    delivered: int
    wait_s: float
    samples: int


class LoopTimer:
    """Adds up wall time, data wait, batches and samples while the loop runs, and leaves out its pauses.

    It begins paused. Who fetches counts; this says which part of the counters belongs to the loop, and tells a
    `StepTimer` of it as if each look at the counters had been one fetch and what came behind it.

    With ``steps_per_execution`` above 1 a compiled loop asks for batches while it computes, so part of the fetch costs
    nothing. How much is known from the time of steps that were well fed. It also follows from this: of N steps that
    fetch for f seconds and compute for c each, the first fetch and the last computation have nothing beside them, so
    the loop takes N f + c seconds if f >= c, and f + N c if not. Whatever else delays a loop, and loops that differ,
    only make c look longer, N times over: the least that a step was seen to take is believed.

    Args:
        read: the counters now.
        clock: its `wall` is read once per call.
        together: steps of one compiled loop that asks for batches while it computes; 1 where each waits for its own.
        begin_s: when the run began, by the clock; with its first epoch if not given.

    Attributes:
        samples: samples of the steps counted so far.
        is_starting: an epoch has begun and its first batch was not seen yet.
        untimed: steps and samples among them whose time is a pause: those of the first call, which compiles the model.
    """

    def __init__(
        self, read: Callable[[], LoopReading], clock: Clock, together: int = 1, begin_s: float | None = None
    ) -> None:
        self._now, self._reading = clock.wall, read
        self._together = together
        self._fed_step_s = math.inf
        self._starved_step_s: deque[float] = deque(maxlen=LOOKS)
        self._at_s = clock.wall() if begin_s is None else begin_s
        self._steps = StepTimer(Clock(wall=lambda: self._at_s))
        if begin_s is not None:
            # What comes before the first epoch, our own start among it, is of the run and of no step.
            self._steps.epoch_begin()
            self._steps.pause()
        self._last = LoopReading(0, 0.0, 0)
        self._delivered = self._untold = 0
        self._first_batch_s = 0.0
        self._running = self._is_new = False
        self.is_starting = False
        self.samples = 0
        self.untimed = (0, 0)

    def epoch_begin(self) -> None:
        """An epoch begins; the first one starts clock and program, and the loop stays paused."""
        self._advance()
        if self._untold:
            self._tell(0, 0.0)  # of the epoch before
        self._steps.epoch_begin()
        self._running = self._delivered > 0
        if not self._running:
            self._steps.pause()
        self.is_starting = self._is_new = True

    def resume(self) -> None:
        """The loop goes on; without a pause nothing happens."""
        if not self._running:
            self._advance()
            self._running = True
            self._tell(0, 0.0)

    def pause(self) -> None:
        """What follows belongs to no step."""
        self._advance()
        if self._running:
            self._running = False
            self._steps.pause()

    def read(self) -> StepTotals:
        """Return the totals up to this moment."""
        self._advance()
        totals = self._steps.read()
        if not self._delivered:  # where no batch is ever seen, nobody knows that it waits
            totals = replace(totals, wait_s=0.0, seam_s=0.0, model_s=totals.model_s + totals.wait_s)
        return replace(totals, steps=self._delivered, first_batch_s=self._first_batch_s)

    def _advance(self) -> None:
        now_s, reading, before = self._now(), self._reading(), self._last
        spent_s, self._last = now_s - self._at_s, reading
        done, samples = max(reading.delivered - before.delivered, 0), max(reading.samples - before.samples, 0)
        waited_s = min(max(reading.wait_s - before.wait_s, 0.0), spent_s)
        if not self._delivered:
            self._first_batch_s += waited_s
        if not self._running:
            self._untold += done
            self.untimed = self.untimed[0] + done, self.untimed[1] + samples
        elif self.is_starting:
            # Up to the first look at an epoch's first batch the loop has done nothing but start it.
            self._tell(done, spent_s if self._is_new else waited_s)
        else:
            self._tell(done, self._blocked(waited_s, spent_s, done))
        self._at_s = now_s
        self._delivered, self.samples = self._delivered + done, self.samples + samples
        self._is_new, self.is_starting = False, self.is_starting and not done

    def _tell(self, done: int, blocked_s: float) -> None:
        """Tell of the steps since the last look, and of the seconds in which the loop did nothing but fetch."""
        steps, self._untold = done + self._untold, 0
        self._steps.fetch_begin()
        self._at_s += blocked_s
        self._steps.fetch_end(is_step=steps > 0)
        self._steps.batches += max(steps - 1, 0)

    def _blocked(self, waited_s: float, spent_s: float, steps: int) -> float:
        """Return the part of the fetch in which the loop did nothing else."""
        if self._together == 1 or steps == 0:
            return waited_s
        if waited_s < FED_FRAC * spent_s:
            step_s = spent_s / steps
            self._fed_step_s = step_s if math.isinf(self._fed_step_s) else 0.8 * self._fed_step_s + 0.2 * step_s
            return waited_s
        self._starved_step_s.append(_step_s(waited_s, spent_s, steps, self._together))
        return min(waited_s, max(spent_s - steps * min(self._fed_step_s, *self._starved_step_s), 0.0))


def _step_s(waited_s: float, spent_s: float, steps: int, together: int) -> float:
    """Return how long one step computes, from loops of `together` steps that are alike."""
    loops, fetch_s = steps / together, waited_s / steps
    alone_s = (spent_s - waited_s) / loops
    return alone_s if alone_s <= fetch_s else (spent_s - loops * fetch_s) / steps
