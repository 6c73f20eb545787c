"""Split the wall time of a loop of which only the beginnings of its steps are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.types import Clock

__all__ = ["LoopReading", "LoopTimer"]

# Below this share of data wait a step's time is taken to be the model's. A choice: it is off by no more than that.
FED_FRAC = 0.1


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

    It begins paused. Who fetches counts; this only says which part of the counters belongs to the loop.

    With ``steps_per_execution`` above 1 a compiled loop asks for batches while it computes, so part of the fetch costs
    nothing. How much is known from the time of steps that were well fed. Before there was one it follows from this: of
    N steps that fetch for f seconds and compute for c each, the first fetch and the last computation have nothing
    beside them, so the loop takes N f + c seconds if f >= c, and f + N c if not.

    Args:
        read: the counters now.
        clock: its `wall` is read once per call.
        together: steps of one compiled loop that asks for batches while it computes; 1 where each waits for its own.

    Attributes:
        samples: samples of the steps counted so far.
        is_starting: an epoch has begun and its first batch was not seen yet.
        untimed: steps and samples among them whose time is a pause: those of the first call, which compiles the model.
    """

    def __init__(self, read: Callable[[], LoopReading], clock: Clock, together: int = 1) -> None:
        self._now, self._reading = clock.wall, read
        self._together = together
        self._step_s: float | None = None
        self._running = False
        self._start_s: float | None = None
        self._last_s = 0.0
        self._last = LoopReading(0, 0.0, 0)
        self._totals = StepTotals()
        self._is_new = False
        self._begin_s = 0.0
        self._steps_before = 0
        self.is_starting = False
        self.samples = 0
        self.untimed = (0, 0)

    def epoch_begin(self) -> None:
        """An epoch begins; the first one starts clock and program, and the loop stays paused."""
        self._advance()
        if self._totals.epochs:
            self.resume()
        self.is_starting = self._is_new = True
        self._begin_s = 0.0

    def resume(self) -> None:
        """The loop goes on; without a pause nothing happens."""
        if not self._running:
            self._advance()
            self._running = True

    def pause(self) -> None:
        """What follows belongs to no step."""
        self._advance()
        self._running = False

    def read(self) -> StepTotals:
        """Return the totals up to this moment."""
        self._advance()
        return self._totals

    def _advance(self) -> None:
        now_s, reading = self._now(), self._reading()
        if self._start_s is None:
            self._start_s = self._last_s = now_s
        spent_s, before, totals = now_s - self._last_s, self._last, self._totals
        self._last_s, self._last = now_s, reading
        done = max(reading.delivered - before.delivered, 0)
        waited_s = min(max(reading.wait_s - before.wait_s, 0.0), spent_s)
        samples = max(reading.samples - before.samples, 0)
        self.samples += samples
        if not self._running:
            self.untimed = self.untimed[0] + done, self.untimed[1] + samples
        steps, wait_s, model_s, paused_s = totals.steps + done, totals.wait_s, totals.model_s, totals.paused_s
        seam_s = 0.0
        if self.is_starting:
            # Up to the first look at an epoch's first batch the loop has done nothing but start it.
            seam_s = spent_s if self._is_new and self._running else waited_s
            self._is_new = False
        if self._running:
            waited_s = seam_s if self.is_starting else self._blocked(waited_s, spent_s, done)
            wait_s, model_s = wait_s + waited_s, model_s + spent_s - waited_s
        else:
            paused_s += spent_s
        self._totals = replace(
            totals,
            steps=steps,
            wait_s=wait_s,
            model_s=model_s,
            paused_s=paused_s,
            wall_s=now_s - self._start_s,
            seam_s=totals.seam_s + (seam_s if self._running else 0.0),
        )
        self._begin_s += seam_s
        if self.is_starting and done:
            self._started(totals.steps)

    def _started(self, steps: int) -> None:
        """Take note of what the start of this epoch took, and of how many batches the one before had."""
        self.is_starting, totals = False, self._totals
        if totals.epochs:
            start = {"epoch_start_s": self._begin_s, "epoch_batches": steps - self._steps_before}
            self._totals = replace(totals, epochs=totals.epochs + 1, **start)  # type: ignore[arg-type]
        else:
            self._totals = replace(totals, epochs=1, first_batch_s=self._begin_s)
        self._steps_before = steps

    def _blocked(self, waited_s: float, spent_s: float, steps: int) -> float:
        """Return the part of the fetch in which the loop did nothing else."""
        if self._together == 1 or steps == 0:
            return waited_s
        if waited_s < FED_FRAC * spent_s:
            step_s = spent_s / steps
            self._step_s = step_s if self._step_s is None else 0.8 * self._step_s + 0.2 * step_s
            return waited_s
        step_s = _step_s(waited_s, spent_s, steps, self._together) if self._step_s is None else self._step_s
        return min(waited_s, max(spent_s - steps * step_s, 0.0))


def _step_s(waited_s: float, spent_s: float, steps: int, together: int) -> float:
    """Return how long one step computes, from loops of `together` steps that are alike."""
    loops, fetch_s = steps / together, waited_s / steps
    alone_s = (spent_s - waited_s) / loops
    return alone_s if alone_s <= fetch_s else (spent_s - loops * fetch_s) / steps
