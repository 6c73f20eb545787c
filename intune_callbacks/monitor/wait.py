"""Split the training loop's wall time into data wait, model time and pauses that add up to it."""

from __future__ import annotations

from dataclasses import dataclass

from intune_callbacks.types import Clock

__all__ = ["StepTimer", "StepTotals"]

_WAIT, _MODEL, _PAUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Monotonic totals of one training loop; take differences.

    Args:
        steps: finished steps; a step goes from one delivered batch to the next.
        wait_s: seconds the loop was blocked in the fetch.
        model_s: seconds of the steps outside the fetch.
        paused_s: seconds that belong to no step: validation, checkpoints, the start-up of the pipeline.
        wall_s: seconds since the first fetch began; ``wait_s + model_s + paused_s == wall_s`` up to rounding.
        seam_s: seconds of `wait_s` spent at starts of epochs: making the iterator, starting workers, first fetch.
        epochs: epochs begun.
    """

    steps: int = 0
    wait_s: float = 0.0
    model_s: float = 0.0
    paused_s: float = 0.0
    wall_s: float = 0.0
    seam_s: float = 0.0
    epochs: int = 0


class StepTimer:
    """Times the fetches of one training loop, called by the thread that trains.

    The wait is the time inside the fetch and never the gap between two batch hooks: the gap also holds GPU work and
    collectives and reads up to twice too high (https://github.com/lightly-ai/lightly-train/pull/749).

    The first batch ends the pipeline's start-up, not a step: everything before it counts as paused. A fetch ends any
    pause, so a lost `resume` costs one step's accuracy and not the rest of the run.

    Args:
        clock: its `wall` is read once per call; the real one by default.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or Clock()).wall
        self._spent = [0.0, 0.0, 0.0]
        self._state = self._state_below_pause = _PAUSED
        self._pauses = 0
        self._batches = 0
        self._start: float | None = None
        self._last = 0.0

    def fetch_begin(self) -> None:
        """The loop asks for the next batch."""
        self._pauses = 0
        self._enter(_WAIT if self._batches else _PAUSED)

    def fetch_end(self, delivered: bool = True) -> None:
        """The loop has its batch, or learned that there is none.

        Args:
            delivered: False when the fetch raised (StopIteration, an error): its wait counts, but no step ended.
        """
        self._pauses = 0
        # A fetch whose begin was missed (the timer came late) has no wait to count: it starts the measurement.
        self._batches += delivered
        self._enter(_MODEL if self._batches else _PAUSED)

    def pause(self) -> None:
        """What follows belongs to no step; pauses may be nested."""
        if self._start is None:
            return
        self._pauses += 1
        if self._pauses == 1:
            self._state_below_pause = self._state
            self._enter(_PAUSED)

    def resume(self) -> None:
        """The last pause is over; without a pause nothing happens."""
        if self._pauses == 0:
            return
        self._pauses -= 1
        if self._pauses == 0:
            self._enter(self._state_below_pause)

    def read(self) -> StepTotals:
        """Return the totals up to this moment."""
        if self._start is None:
            return StepTotals()
        now = self._now()
        spent = self._spent.copy()
        spent[self._state] += now - self._last
        return StepTotals(max(self._batches - 1, 0), spent[_WAIT], spent[_MODEL], spent[_PAUSED], now - self._start)

    def _enter(self, state: int) -> None:
        now = self._now()
        if self._start is None:
            self._start = self._last = now
        self._spent[self._state] += now - self._last
        self._last = now
        self._state = state
