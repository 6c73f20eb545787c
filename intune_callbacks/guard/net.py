"""The net under every policy: what was measured to be best, the start included, is gone back to.

A policy may be wrong, and so may its readings: a knob that does not act, a machine that stalls, workers whose start-up
nobody charged. The net does not ask why. It compares the wall time of a batch under the present allocation, its share
of the epoch's start included, with the best one measured in this run, and leaves what is clearly worse.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from intune_callbacks.guard.permit import Permit
from intune_callbacks.measure.steady import Steadiness, luck
from intune_callbacks.measure.wait import STOP_S, StepTotals
from intune_callbacks.types import Allocation, Observation, Stage
from intune_callbacks.words import percent

__all__ = ["MOST_HARM", "Net", "Return"]

MOST_HARM, OF_SAVED = 0.02, 0.1
"""Shares of a run's wall time, anew from a change of the machine on, and of the time it has saved against its start,
that all trials which turn out worse may cost together. A choice, see docs/adr/0015-a-net-under-every-policy.md."""
WINDOWS = 20
"""Windows of an allocation that count, a choice: older ones may belong to another state of the machine."""
ENOUGH = 2
"""Windows in a row that have to be worse, and after which an allocation may be the best: one alone may be a stall."""
IDLE = 6
"""Windows after which an allocation as good as the best one is the best, or left if it takes more workers. A choice."""
LEAST_MARGIN = 0.015
"""ln(seconds per batch) by which allocations have to differ at least, a choice: less is not worth a change."""
LEAST_NOISE, MOST_NOISE = 0.01, 0.3
"""Bounds of the relative error of a window: a few equal ones are luck, and with more nothing could be compared."""
SPREADS = 2.0
"""Standard errors by which an allocation has to differ to be better or worse: of normal errors 5 % are larger."""
SAME_CPUS = 0.01
"""Share by which the CPUs of the same machine may differ: they are read from quotas and affinities, and rounded."""
SHIFT, SHIFT_SPREADS = 0.1, 2.5
"""A change of ln(seconds per batch), and in spreads of it, in two windows of one allocation: by chance 1 in 13,000."""
STALL = 10.0  # a choice: beyond so many times the best's, and a stop, it waited for a stopped process
LONG = 3.0  # a choice: a step of more times the best's evaluates or saves, for workers slow a model down by less


@dataclass(frozen=True, slots=True)
class Return:
    """Where to go back to.

    Args:
        allocation: the best measured.
        failed: the allocation that is left.
        ratio: its throughput / the best one's.
        reason: one sentence.
    """

    allocation: Allocation
    failed: Allocation
    ratio: float
    reason: str


@dataclass(slots=True)
class _Trial:
    """What was measured of one allocation.

    Args:
        allocation: in force meanwhile.
        logs: ln(seconds per batch, starts of epochs left out) of its windows.
        start_s: seconds an epoch takes to start with it; expected until one was seen.
        epoch_batches: that share this start.
        harm_s: what it has cost so far.
    """

    allocation: Allocation
    logs: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    start_s: float = 0.0
    epoch_batches: float = math.inf
    harm_s: float = 0.0

    @property
    def batch_s(self) -> float:
        return math.exp(median(self.logs)) + self.start_s / self.epoch_batches


class Net:
    """Watches every window and has a say before each change; knows no policy and no framework.

    Attributes:
        permit: what may be tried.
        harm_s: seconds that allocations which were worse than the best have cost so far.
    """

    def __init__(self, trial_s: float = 1.0) -> None:
        self.permit, self.harm_s = Permit(trial_s), 0.0
        self._trials: dict[tuple[tuple[str, int], ...], _Trial] = {}
        self._now: _Trial | None = None
        self._best: _Trial | None = None
        self._noise, self._low = 0.05, 0
        self._start: _Trial | None = None
        self._workers: frozenset[str] = frozenset()
        self._most_harm_s = self._saved_s = self._cpus = 0.0
        # Harm and wall clock when the machine became another one, and how long the one before had lasted.
        self._forgotten_s, self._begin_s, self._lasted_s = 0.0, 0.0, math.inf
        self._totals = StepTotals()
        # What was left last: the windows since are compared with it, for the machine may have been slow meanwhile.
        self._suspect: _Trial | None = None
        self._since: deque[float] = deque(maxlen=WINDOWS)
        self._again: tuple[Allocation, str] | None = None
        self._steadiness = Steadiness()

    @property
    def best(self) -> Allocation:
        """The best allocation measured, the start included, or the present one if it is as good; empty at first."""
        now, best = self._now, self._best
        if now is None or best is None:
            return {}
        return dict((now if len(now.logs) >= ENOUGH and self._gain(now, best) >= -LEAST_MARGIN else best).allocation)

    def begin(self, stages: tuple[Stage, ...]) -> None:
        """Take the values of `stages` for the user's own, unless they are known already."""
        if self.permit.begin(stages):
            self.forget()

    def forget(self) -> None:
        """The machine or the pipeline is another one: what was measured no longer counts."""
        self._trials, self._low = {}, 0
        self._now = self._best = self._start = self._suspect = self._again = None
        self.permit.forget()

    def changed(self, allocation: Allocation) -> None:
        """The pipeline runs with another allocation from now on."""
        self._now = self._trials.setdefault(tuple(sorted(allocation.items())), _Trial(dict(allocation)))
        self._since.clear()
        self._steadiness.changed()

    def watch(self, seen: Observation, totals: StepTotals) -> None:
        """Take one window.

        Args:
            totals: of the training loop at its end; what passed since the last window is charged, settling included.
        """
        cpus = seen.resources.cpus + seen.resources.remote_cpus
        before, self._cpus = self._cpus or cpus, cpus
        running_s = seen.elapsed_s - seen.seam_s
        if before <= 0.0 or abs(self._cpus / before - 1.0) > SAME_CPUS:
            self.forget()
            # What trials cost on another machine is no reason to stay where this one leaves the run.
            self._forgotten_s, self._lasted_s = self.harm_s, totals.wall_s - self._begin_s
            self._totals, self._begin_s = totals, totals.wall_s
            return  # this window belongs to neither machine
        if seen.batches < 1 or running_s <= 0.0:
            return
        self._workers = frozenset(stage.name for stage in seen.stages if stage.unit == "workers")
        if not self._steadiness.watch(seen):
            self._charge(totals)
            return
        if self._now is None:
            self.changed(seen.allocation)
        assert self._now is not None
        now, log = self._now, math.log(running_s / seen.batches)
        # Numbers that nobody of ours moves, such as those tf.data's own tuner sets, are followed.
        now.allocation = seen.allocation
        self._learn_start(now, seen, totals)
        if now.logs:
            # The mean difference of two normal numbers is 1.128 standard deviations.
            spread = abs(log - now.logs[-1]) / 1.128
            self._noise = min(max(0.8 * self._noise + 0.2 * spread, LEAST_NOISE), MOST_NOISE)
        if len(now.logs) < IDLE:  # later its own spread is known
            self._noise = max(self._noise, min(luck(seen), MOST_NOISE))
        now.logs.append(log)
        self._since.append(log)
        self._follow(now)
        self._acquit(now)
        self._charge(totals)
        # A machine that changed once may do so again: it is expected to stay as long as the one before.
        stays_s = totals.wall_s - self._begin_s + min(seen.remaining_s or 0.0, self._lasted_s)
        self._most_harm_s = self._forgotten_s + MOST_HARM * max(0.0, stays_s) + OF_SAVED * self._saved_s
        self.permit.is_spent, self.permit.wall_s = self.harm_s > self._most_harm_s, totals.wall_s
        self._rank()
        best = self._best
        is_low = best is not None and now is not best and self._gain(now, best) < -self._margin(now, best)
        self._low = self._low + 1 if is_low else 0

    def back(self) -> Return | None:
        """Return where to go back to, None while the present allocation is not clearly worse than the best.

        It is left, too, when it takes more workers than the best one and has not been better for some windows.
        """
        now, best = self._now, self._best
        if now is None or best is None or now is best or not now.logs:
            return None
        gain = self._gain(now, best)
        # Once the trials have cost enough, one window has to do.
        is_worse = self._low >= ENOUGH or (self._low > 0 and self.harm_s > self._most_harm_s)
        is_idle = len(now.logs) >= IDLE and gain < LEAST_MARGIN and self._takes_more(now, best)
        if not is_worse and not is_idle:
            return None
        self.permit.failed(now.allocation, best.allocation)
        self._suspect, self._low = now if is_worse else None, 0
        ratio, more = math.exp(gain), "" if is_worse else " with more workers"
        why = f"back to the best allocation measured: this one gave {percent(ratio)} of its throughput{more}"
        return Return(dict(best.allocation), dict(now.allocation), ratio, why)

    def again(self) -> tuple[Allocation, str] | None:
        """Return what to try once more after a failure, and why; None where there is nothing.

        The same where the machine was slow meanwhile, else half as far: policies overshoot more often than they err.
        """
        again, self._again = self._again, None
        return again if self._now is self._best else None

    @property
    def is_trying(self) -> bool:
        """True while the present allocation is not the best measured."""
        return self._now is not None and self._now is not self._best

    @staticmethod
    def _gain(one: _Trial, other: _Trial) -> float:
        """ln(throughput of one / throughput of the other)."""
        return math.log(other.batch_s / one.batch_s)

    def _margin(self, one: _Trial, other: _Trial) -> float:
        errors = [self._noise / math.sqrt(max(1, len(trial.logs))) for trial in (one, other)]
        return max(LEAST_MARGIN, SPREADS * math.hypot(*errors))

    def _takes_more(self, one: _Trial, other: _Trial) -> bool:
        """Return whether one allocation has more workers in some stage than the other, and fewer in none."""
        more = [one.allocation.get(name, 0) - other.allocation.get(name, 0) for name in self._workers]
        return bool(more) and min(more) >= 0 and max(more) > 0

    def _rank(self) -> None:
        """Find the best: what was measured often enough and is clearly better than the best so far."""
        known = [trial for trial in self._trials.values() if len(trial.logs) >= ENOUGH]
        if self._best is None:
            self._best = self._start = self._now
        elif known:
            first = min(known, key=lambda trial: trial.batch_s)
            if first is not self._best and self._gain(first, self._best) > self._margin(first, self._best):
                self._best = first
                # What turned out better was no harm, whatever its first windows gave.
                self.harm_s, first.harm_s = max(0.0, self.harm_s - max(0.0, first.harm_s)), 0.0
        now, best = self._now, self._best
        if now is None or best is None or len(now.logs) < IDLE or self._takes_more(now, best):
            return
        if self._gain(now, best) > -LEAST_MARGIN:
            self._best = now

    def _learn_start(self, now: _Trial, seen: Observation, totals: StepTotals) -> None:
        now.epoch_batches = float(seen.epoch_batches or math.inf)
        if totals.epochs > max(1, self._totals.epochs):
            now.start_s = totals.epoch_start_s
        elif not now.logs:
            now.start_s = sum(stage.startup_s * stage.current for stage in seen.stages)

    def _follow(self, now: _Trial) -> None:
        """Where the same allocation lastingly gives something else, the machine or the work is another one."""
        if len(now.logs) <= ENOUGH:
            return
        earlier, last = list(now.logs)[:-ENOUGH], list(now.logs)[-ENOUGH:]
        shifts = [log - median(earlier) for log in last]
        least = max(SHIFT, SHIFT_SPREADS * self._noise)
        if min(shifts) > least or max(shifts) < -least:
            now.logs.clear()
            now.logs.extend(last)
            if now is self._best:
                self._trials = {key: trial for key, trial in self._trials.items() if trial is now}
                self.permit.forget()

    def _acquit(self, now: _Trial) -> None:
        """See whether what was left last was slow only because the machine was: then the best is as slow as it now."""
        suspect = self._suspect
        if suspect is None or now is not self._best or len(self._since) < ENOUGH:
            return
        self._suspect = None
        if suspect is now:  # tried again, and now it is the best
            self.permit.acquitted(suspect.allocation)
        elif math.exp(median(self._since)) + now.start_s / now.epoch_batches > suspect.batch_s / (1.0 + LEAST_MARGIN):
            if self.permit.acquitted(suspect.allocation):
                suspect.logs.clear()
                self._again = suspect.allocation, "tried again: the machine was slow meanwhile"
        elif half := self.permit.half_way(suspect.allocation, now.allocation):
            self._again = half, "half as far as what failed"

    def _charge(self, totals: StepTotals) -> None:
        """Add what the batches since the last window took longer than under the best allocation."""
        before, self._totals = self._totals, totals
        steps, best, start, now = totals.steps - before.steps, self._best, self._start, self._now
        if start is not None and start.logs and now is not None and now.logs and now is not start:
            self._saved_s += max(0.0, steps * (start.batch_s - now.batch_s))
        if best is not None and now is not None and now is not best and steps >= 0 and best.logs:
            best_s, model_s = steps * best.batch_s, totals.model_s - before.model_s
            stops, stops_s = totals.stops - before.stops, totals.stops_s - before.stops_s
            stopped_s = max(0.0, stops_s - stops * max(STOP_S, STALL * best.batch_s))
            wait_s = min(totals.wait_s - before.wait_s - stopped_s, max(STOP_S, STALL * best_s))
            harm_s = max(wait_s + min(model_s, LONG * best_s) - best_s, -self.harm_s)
            self.harm_s += harm_s
            now.harm_s += harm_s
