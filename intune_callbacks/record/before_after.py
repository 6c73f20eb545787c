"""What a run was like before its first change, after its last one and as a whole: throughput, wait and verdict."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from intune_callbacks.measure.measured import measured
from intune_callbacks.measure.verdict import STEPS, Waited, settle
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.record.report import Side, Span
from intune_callbacks.types import Observation
from intune_callbacks.words import six_digits

__all__ = ["BeforeAfter", "Mark", "describe"]

LAST_WINDOWS = 50
"""Windows before the first and after the last change that are described. A choice: enough for medians."""
AT_A_CHANGE = 3
"""Windows just before and just after a change whose medians tell what it brought. A choice: so many that no single one
decides, so few that work or a machine that changed, and led to the change, is that of both."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a run was at one moment."""

    totals: StepTotals = field(default_factory=StepTotals)
    samples: int = 0


def _figures(begin: Mark, end: Mark) -> Span:
    """Return what happened between two moments."""
    first, last, samples = begin.totals, end.totals, end.samples - begin.samples
    wait_s, model_s = last.wait_s - first.wait_s, last.model_s - first.model_s
    active_s, seam_s = wait_s + model_s, last.seam_s - first.seam_s
    return Span(
        samples=samples,
        steps=last.steps - first.steps,
        wall_s=six_digits(last.wall_s - first.wall_s),
        paused_s=six_digits(last.paused_s - first.paused_s),
        seam_s=six_digits(seam_s),
        epochs=last.epochs - first.epochs,
        throughput_samples_per_s=_rate(samples, active_s),
        throughput_batches_per_s=_rate(last.steps - first.steps, active_s),
        running_samples_per_s=_rate(samples, active_s - seam_s),
        wait_frac=_rate(wait_s, active_s),
    )


class BeforeAfter:
    """Which part of a run came before the first change, which after the last one, and when the allocation settled."""

    def __init__(self) -> None:
        self.before: deque[Observation] = deque(maxlen=LAST_WINDOWS)
        self.changes = 0
        self.settled_after_s: float | None = None
        self.now = Mark()
        self._begin_at_s: float | None = None
        self._after: deque[Observation] = deque(maxlen=LAST_WINDOWS)
        self._earlier: tuple[Observation, ...] = ()
        # Of all windows, not only of those that are remembered.
        self._waited_before, self._waited, self._waited_earlier = Waited(), Waited(), Waited()
        self._begun: Mark | None = None
        # Samples/s of this allocation's first windows, of the last ones before it, and what earlier changes brought.
        self._first_rates: list[float] = []
        self._rate_before: float | None = None
        self._brought: float | None = None
        self._first_change = self._last_change = self._change_before = Mark()

    @property
    def after(self) -> tuple[Observation, ...]:
        """The windows since the last change that was measured, none if no change was; all where nothing was changed.

        A run may end just after a change: what it was like until then says more than nothing.
        """
        return (tuple(self._after) or self._earlier) if self.changes else tuple(self.before)

    @property
    def brought(self) -> float | None:
        """The throughput just after each change over that just before, multiplied; None while no change was measured.

        Unlike the throughput after the last change over that before the first one, it holds nothing of what became
        slower or faster by itself: a model that is given longer sequences, a machine that is throttled.
        """
        if self._rate_before is None or not self._first_rates:
            return self._brought
        return (self._brought or 1.0) * median(self._first_rates) / self._rate_before

    @property
    def _windows(self) -> deque[Observation]:
        return self._after if self.changes else self.before

    def passed(self, totals: StepTotals, samples: int) -> None:
        """The run has come so far, and trained on so many samples since the last call."""
        self.now = Mark(totals, self.now.samples + samples)

    def begin(self) -> None:
        """The warm-up is over."""
        self._begun = self._begun or self.now

    def observed(self, observation: Observation) -> None:
        """Take one window."""
        self._windows.append(observation)
        if self._begin_at_s is None and math.isfinite(observation.at_s):
            self._begin_at_s = round(observation.at_s - self.now.totals.wall_s, 3)
        (self._waited if self.changes else self._waited_before).add(observation)
        if len(self._first_rates) < AT_A_CHANGE and observation.samples_per_s > 0.0:
            self._first_rates.append(observation.samples_per_s)

    def changed(self) -> None:
        """The pipeline was resized."""
        self._brought = self.brought
        last = [o.samples_per_s for o in list(self._windows)[-AT_A_CHANGE:] if o.samples_per_s > 0.0]
        self._rate_before = median(last) if last else self._rate_before
        self._first_rates = []
        self.changes += 1
        self.settled_after_s = None
        if self.changes == 1:
            self._first_change = self.now
        elif self._after:
            self._change_before = self._last_change
        self._last_change = self.now
        if self._after:
            self._earlier, self._waited_earlier = tuple(self._after), self._waited
        self._waited = Waited()
        self._after.clear()

    def settled(self) -> None:
        """The policy holds what it found; the first time since the last change counts."""
        if self.changes and self.settled_after_s is None:
            self.settled_after_s = self.now.totals.wall_s

    def describe_before(self) -> Side:
        """Return `describe` of the time from the warm-up to the first change."""
        span = self._begun or Mark(), self._first_change if self.changes else self.now
        return describe(self.before, span, self._waited_before.share, is_ground=self.changes > 0)

    def describe_after(self) -> Side:
        """Return `describe` of the time since the last change that was measured."""
        if not self.changes:
            return self.describe_before()
        span = (self._last_change, self.now) if self._after else (self._change_before, self._last_change)
        waited = self._waited if self._after else self._waited_earlier
        # One change after another, and none gets as many steps as a verdict needs: together they are enough.
        is_ground = self.changes > 1 and self.now.totals.steps - self._first_change.totals.steps >= STEPS
        return replace(describe(self.after, span, waited.share, is_ground), brought=six_digits(self.brought))

    def whole(self) -> Span:
        """Return `_figures` of the whole run, all rates over the whole wall; none where no step was seen."""
        totals = self.now.totals
        wall_s = totals.wall_s if totals.steps else 0.0  # a strategy's loop is out of sight, and not slow for that
        rates: dict[str, Any] = {
            "throughput_samples_per_s": _rate(self.now.samples, wall_s),
            "throughput_batches_per_s": _rate(totals.steps, wall_s),
            "wait_frac": _rate(totals.wait_s, wall_s),
        }
        rates |= {"first_batch_s": six_digits(totals.first_batch_s), "begin_at_s": self._begin_at_s}
        return replace(_figures(Mark(), self.now), **rates)


def describe(
    observations: Sequence[Observation],
    span: tuple[Mark, Mark] | None = None,
    waited: float | None = None,
    is_ground: bool = False,
) -> Side:
    """Return the figures and the verdict of some windows, and what causes are computed from.

    Args:
        observations: windows of one allocation, oldest first; without any every number is None.
        span: from where to where: then throughput and wait are those of the whole span, what lies between the windows
            included; else medians of the windows.
        waited: as for `settle`.
        is_ground: as for `settle`.
    """
    last = observations[-1] if observations else None
    known: dict[str, Any] = {
        "throughput_samples_per_s": _middle([o.samples_per_s for o in observations]),
        "throughput_batches_per_s": _middle([o.batches_per_s for o in observations]),
        "wait_frac": _middle([o.wait_frac for o in observations]),
    }
    if span is not None and observations:
        known |= {key: value for key, value in asdict(_figures(*span)).items() if value is not None}
    judged = settle(observations, waited, is_ground, known["wait_frac"])
    return Side(
        **known,
        exposed_wait_frac=_idle_frac([o for o in observations if o.exposed_wait_frac is not None]),
        model_s=_middle([o.model_s for o in observations]),
        allocation=last.allocation if last else {},
        memory_used_bytes=last.resources.memory_used_bytes if last else None,
        memory_limit_bytes=last.resources.memory_limit_bytes if last else None,
        cpus=six_digits(last.resources.cpus) if last else None,
        windows=len(observations),
        verdict=judged.kind,
        stage=judged.stage,
        headroom=six_digits(judged.headroom),
        why=judged.why,
        measured=measured(observations, waited),
    )


def _rate(part: float, seconds: float) -> float | None:
    return six_digits(part / seconds) if seconds > 0.0 else None


def _idle_frac(observations: Sequence[Observation]) -> float | None:
    """Return the GPU's share of all these windows: workers that deliver all at once let it wait in few of them."""
    idle_s = sum((o.exposed_wait_frac or 0.0) * o.elapsed_s for o in observations)
    return _rate(idle_s, sum(o.elapsed_s for o in observations))


def _middle(values: Sequence[float]) -> float | None:
    return six_digits(median(values)) if values else None
