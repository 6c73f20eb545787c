"""Split the training loop's wall time into data wait, model time and pauses that add up to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from intune_callbacks.types import Clock

__all__ = ["STOP_S", "Apart", "StepTimer", "StepTotals"]

_WAIT, _MODEL, _PAUSED, _SEAM = range(4)

# An open step that took so many times the mean of those before was over before it was asked about. A choice: steps
# differ, and an evaluation behind a loop takes longer.
OVER = 2.0
# Seconds of one fetch beyond which its process may have been stopped, or its machine asleep. A choice.
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Monotonic totals of one training loop; take differences.

    Args:
        steps: finished steps; a step goes from one delivered batch to the next, or to the end of its epoch.
        wait_s: seconds the loop was blocked in the fetch, starts of epochs included.
        model_s: seconds of the steps outside the fetch.
        paused_s: seconds that belong to no step: validation, checkpoints.
        wall_s: seconds since the first epoch began; ``wait_s + model_s + paused_s == wall_s`` up to rounding.
        seam_s: seconds of `wait_s` spent at starts of epochs: making the iterator, starting workers, first fetch.
        epochs: epochs whose first batch was delivered.
        first_batch_s: seconds until the first batch of all; 0.0 while there is none.
        epoch_start_s: seconds the last start of an epoch took; 0.0 in the first one, which also starts the program.
        epoch_batches: batches of the last whole epoch, 0 in the first one.
        epoch_steps: finished steps of this epoch.
        stops: fetches of more than `STOP_S`, starts of epochs left out.
        stops_s: seconds of `wait_s` that these took.
    """

    steps: int = 0
    wait_s: float = 0.0
    model_s: float = 0.0
    paused_s: float = 0.0
    wall_s: float = 0.0
    seam_s: float = 0.0
    epochs: int = 0
    first_batch_s: float = 0.0
    epoch_start_s: float = 0.0
    epoch_batches: int = 0
    epoch_steps: int = 0
    stops: int = 0
    stops_s: float = 0.0


class StepTimer:
    """Times the fetches of one training loop, called by the thread that trains.

    The wait is the time inside the fetch and never the gap between two batch hooks: the gap also holds GPU work and
    collectives and reads up to twice too high (https://github.com/lightly-ai/lightly-train/pull/749).

    What comes before an epoch's first batch is that epoch's start: making the iterator, starting workers, filling
    buffers. A fetch ends any pause, so a lost `resume` costs one step's accuracy and not the rest of the run.

    Args:
        clock: its `wall` is read once per call; the real one by default.

    Attributes:
        batches: delivered so far.
        last_s: when the loop last asked for a batch, had one, or paused, by the clock; 0.0 before.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or Clock()).wall
        self._spent = [0.0, 0.0, 0.0, 0.0]
        self._state = self._state_below_pause = _SEAM
        self._pauses = 0
        self.batches = self._epochs = 0
        self._is_starting = True
        self._start: float | None = None
        self.last_s = self._first_batch_s = 0.0
        self._seams_before_s = self._epoch_start_s = 0.0
        self._stops, self._stops_s = 0, 0.0
        self._batches_before = self._epoch_batches = 0

    def epoch_begin(self) -> None:
        """An epoch begins; up to its first batch the loop waits for it to start."""
        self._pauses = 0
        self._is_starting = True
        self._enter(_SEAM)

    def fetch_begin(self) -> None:
        """The loop asks for the next batch."""
        self._pauses = 0
        self._enter(_SEAM if self._is_starting else _WAIT)

    def fetch_end(self, delivered: bool = True, is_step: bool = True) -> None:
        """The loop has its batch, or learned that there is none.

        Args:
            delivered: False when the fetch raised (StopIteration, an error): its wait counts, but no step ended.
            is_step: False for one more batch of the same step, from another loader.
        """
        self._pauses = 0
        if not is_step:
            self._enter(_SEAM if self._is_starting else _MODEL)
            return
        # A fetch whose begin was missed (the timer came late) has no wait to count: it starts the measurement.
        self.batches += delivered
        self._enter(_MODEL if self.batches else _SEAM)
        if delivered and self._is_starting:
            self._started()
        # What comes after the end is the start of another epoch.
        self._is_starting = self._is_starting or not delivered

    def count(self, batches: int, wait_s: float, now_s: float | None = None) -> None:
        """Count fetches nobody told of: of a compiled function, when it is called and has ended, or some together.

        Args:
            batches: taken since the last call.
            wait_s: seconds the loop was blocked for these batches.
            now_s: when the last of them came, by the clock; now if not given.
        """
        before_s, was_model = self._spent[_MODEL], self._state == _MODEL
        self._pauses = 0
        self.batches += batches
        self._enter(_MODEL if self.batches else _SEAM, now_s)
        if batches and self._is_starting:
            self._started()
        elif was_model:
            blocked_s = min(wait_s, self._spent[_MODEL] - before_s)
            self._spent[_MODEL] -= blocked_s
            self._spent[_WAIT] += blocked_s
            if blocked_s > STOP_S:
                self._stops, self._stops_s = self._stops + max(1, batches), self._stops_s + blocked_s

    def pause(self) -> None:
        """What follows belongs to no step; pauses may be nested."""
        if self._start is None:
            return
        self._pauses += 1
        if self._pauses == 1:
            self._state_below_pause = self._state
            self._enter(_PAUSED)

    def left(self) -> StepTotals:
        """Return the totals at the end of a loop that was left behind a batch; what follows belongs to no step.

        Nobody tells when the last step was over: one that seems far longer than the others counts as their mean.
        """
        beyond_s, steps = 0.0, self.batches - 1
        if self._state == _MODEL and steps > 0:
            open_s, mean_s = self._now() - self.last_s, self._spent[_MODEL] / steps
            beyond_s = open_s - mean_s if open_s > OVER * mean_s else 0.0
        self.pause()
        self._spent[_MODEL] -= beyond_s
        self._spent[_PAUSED] += beyond_s
        totals = self.read()
        return replace(totals, paused_s=totals.paused_s - beyond_s, wall_s=totals.wall_s - beyond_s)

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
        spent[self._state] += now - self.last_s
        # Where an epoch has ended, or the next one begins, no batch is being trained on.
        steps = max(self.batches - (not self._is_starting), 0)
        return StepTotals(
            steps=steps,
            wait_s=spent[_WAIT] + spent[_SEAM],
            model_s=spent[_MODEL],
            paused_s=spent[_PAUSED],
            wall_s=now - self._start,
            seam_s=spent[_SEAM],
            epochs=self._epochs,
            first_batch_s=self._first_batch_s,
            epoch_start_s=self._epoch_start_s,
            epoch_batches=self._epoch_batches,
            epoch_steps=max(steps - self._batches_before, 0),
            stops=self._stops,
            stops_s=self._stops_s,
        )

    def _started(self) -> None:
        """Take note of what the start of this epoch took, and of how many batches the one before had."""
        self._is_starting, seams_s, batches = False, self._spent[_SEAM], self.batches - 1
        if self._epochs:
            self._epoch_start_s = seams_s - self._seams_before_s
            self._epoch_batches = batches - self._batches_before
        elif self._start is not None:
            self._first_batch_s = self.last_s - self._start
        self._epochs += 1
        self._seams_before_s, self._batches_before = seams_s, batches

    def _enter(self, state: int, now_s: float | None = None) -> None:
        now = self._now() if now_s is None else now_s
        if self._start is None:
            self._start = self.last_s = now
        spent_s = now - self.last_s
        self._spent[self._state] += spent_s
        if spent_s > STOP_S and self._state == _WAIT:
            self._stops, self._stops_s = self._stops + 1, self._stops_s + spent_s
        self.last_s = now
        self._state = state


class Apart:
    """Adds up what lies between a begin and an end, such as the validations of a run.

    Args:
        now: seconds, by any clock.

    Attributes:
        total_s: of all that have ended; one that an error has left open is none of them.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since_s: float | None = None
        self.total_s = 0.0

    def begin(self) -> None:
        self._since_s = self._now()

    def end(self) -> None:
        """Without a begin nothing happens."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self.total_s += self._now() - since_s
