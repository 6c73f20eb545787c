"""Remember every decision: what was seen, done and why, and what it brought; one JSON line each."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from intune_callbacks.errors import warn
from intune_callbacks.monitor.measured import measured
from intune_callbacks.monitor.verdict import settle
from intune_callbacks.monitor.wait import StepTotals
from intune_callbacks.types import Allocation, Observation

__all__ = ["Course", "Decision", "History", "Mark", "describe", "figures"]

KEPT = 1000
"""Of each kind of decision so many are remembered besides the first ones."""
FIRST = 500
"""The first decisions in which something happened: there most of a run is decided."""
WRITTEN = 5000
"""So many decisions are written one by one; from then on, each time so many were, half as often."""
KEPT_WINDOWS = 50


@dataclass(frozen=True, slots=True)
class Decision:
    """One turn of the loop.

    Args:
        observation: what was seen.
        before: the allocation then.
        after: the allocation from then on.
        proposed: the changes the policy wanted, before the guard.
        granted: the changes the guard left of it; in mode ``advise`` that is the advice.
        reason: why, in one sentence.
        vetoes: what the guard refused, and why.
        applied: True if the pipeline was resized.
        settled: True while the policy holds what it found.
        resize_s: seconds the resize took.
        effect: samples/s of the next observation / samples/s of this one; None until it is known.
    """

    observation: Observation
    before: Allocation
    after: Allocation
    proposed: Allocation = field(default_factory=dict)
    granted: Allocation = field(default_factory=dict)
    reason: str = ""
    vetoes: tuple[str, ...] = ()
    applied: bool = False
    settled: bool = False
    resize_s: float = 0.0
    effect: float | None = None

    @property
    def is_eventful(self) -> bool:
        """True if something was proposed, changed or refused."""
        return self.applied or bool(self.proposed) or bool(self.vetoes)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain JSON types, numbers with six digits."""
        seen, machine = self.observation, self.observation.resources
        rates = {
            name: {key: _number(getattr(r, key)) for key in r.__dataclass_fields__} for name, r in seen.rates.items()
        }
        return {
            "step": seen.step,
            # Of a clock that counts since the machine was started: six digits would be seconds.
            "at_s": round(seen.at_s, 3) if math.isfinite(seen.at_s) else None,
            "observation": {
                "elapsed_s": _number(seen.elapsed_s),
                "batches_per_s": _number(seen.batches_per_s),
                "samples_per_s": _number(seen.samples_per_s),
                "wait_frac": _number(seen.wait_frac),
                "exposed_wait_frac": _number(seen.exposed_wait_frac),
                "model_s": _number(seen.model_s),
                "seam_s": _number(seen.seam_s),
                "cpus": _number(machine.cpus),
                "memory_used_bytes": machine.memory_used_bytes,
                "memory_limit_bytes": machine.memory_limit_bytes,
                "gpu_utilisation": _number(machine.gpu_utilisation),
                "rates": rates,
            },
            "before": self.before,
            "proposed": self.proposed,
            "granted": self.granted,
            "after": self.after,
            "reason": self.reason,
            "vetoes": list(self.vetoes),
            "applied": self.applied,
            "settled": self.settled,
            "resize_s": _number(self.resize_s),
            "effect": _number(self.effect),
        }


class History:
    """Keeps eventful decisions, the first 500 and the last thousand, and the last thousand others; writes to a file.

    The file holds each of the first 5,000 decisions, every second one until it holds 5,000 more, every fourth one
    after that, and so on, and each one that changed something: some 50,000 lines after a month at one a second.

    Args:
        path: the file, appended to; its folder is made at the first line. None writes nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._first: list[Decision] = []
        self._events: deque[Decision] = deque(maxlen=KEPT)
        self._others: deque[Decision] = deque(maxlen=KEPT)
        self._added = self._lines = 0

    def add(self, decision: Decision) -> None:
        """Remember one decision whose effect is known, or never will be; a line that cannot be written is the last."""
        if not decision.is_eventful:
            self._others.append(decision)
        elif len(self._first) < FIRST:
            self._first.append(decision)
        else:
            self._events.append(decision)
        number, self._added = self._added, self._added + 1
        if self.path is None or not (decision.applied or number % (1 << self._lines // WRITTEN) == 0):
            return
        self._lines += 1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Opened anew for each line: nothing is lost when the process is killed, and no file is left open.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(decision.to_json(), allow_nan=False) + "\n")
        except OSError as error:
            warn(f"InTune writes no more decisions to {self.path}: {error}. Training goes on and is tuned all the same")
            self.path = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What is remembered, oldest first."""
        return tuple(sorted((*self.events, *self._others), key=lambda decision: decision.observation.step))

    @property
    def events(self) -> tuple[Decision, ...]:
        """The decisions in which something was proposed, changed or refused."""
        return (*self._first, *self._events)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a run was at one moment.

    Args:
        totals: of the training loop.
        samples: it had trained on.
    """

    totals: StepTotals = field(default_factory=StepTotals)
    samples: int = 0


def figures(begin: Mark, end: Mark) -> dict[str, Any]:
    """Return what happened between two moments, by the wall clock, in plain JSON types.

    Args:
        begin: of the span.
        end: of the span.

    Returns:
        ``samples``, ``steps``, ``wall_s``, ``paused_s`` (validation, checkpoints), ``seam_s`` and ``epochs`` (starts of
        epochs), ``throughput_samples_per_s`` and ``throughput_batches_per_s`` over the wall less pauses,
        ``running_samples_per_s`` (starts of epochs left out as well) and ``wait_frac``; a rate is None where nothing
        was measured.
    """
    first, last, samples = begin.totals, end.totals, end.samples - begin.samples
    wait_s, model_s = last.wait_s - first.wait_s, last.model_s - first.model_s
    active_s, seam_s = wait_s + model_s, last.seam_s - first.seam_s
    return {
        "samples": samples,
        "steps": last.steps - first.steps,
        "wall_s": _number(last.wall_s - first.wall_s),
        "paused_s": _number(last.paused_s - first.paused_s),
        "seam_s": _number(seam_s),
        "epochs": last.epochs - first.epochs,
        "throughput_samples_per_s": _rate(samples, active_s),
        "throughput_batches_per_s": _rate(last.steps - first.steps, active_s),
        "running_samples_per_s": _rate(samples, active_s - seam_s),
        "wait_frac": _rate(wait_s, active_s),
    }


class Course:
    """Which part of a run came before the first change, which after the last one, and when the allocation settled."""

    def __init__(self) -> None:
        self.before: deque[Observation] = deque(maxlen=KEPT_WINDOWS)
        self.changes = 0
        self.settled_after_s: float | None = None
        self.now = Mark()
        self._after: deque[Observation] = deque(maxlen=KEPT_WINDOWS)
        self._earlier: tuple[Observation, ...] = ()
        self._begun: Mark | None = None
        self._first_change = self._last_change = self._change_before = Mark()

    @property
    def after(self) -> tuple[Observation, ...]:
        """The windows since the last change that was measured, none if no change was; all where nothing was changed.

        A run may end just after a change: what it was like until then says more than nothing.
        """
        return (tuple(self._after) or self._earlier) if self.changes else tuple(self.before)

    def begin(self) -> None:
        """The warm-up is over."""
        self._begun = self._begun or self.now

    def observed(self, observation: Observation) -> None:
        """Take one window."""
        (self._after if self.changes else self.before).append(observation)

    def changed(self) -> None:
        """The pipeline was resized."""
        self.changes += 1
        self.settled_after_s = None
        if self.changes == 1:
            self._first_change = self.now
        elif self._after:
            self._change_before = self._last_change
        self._last_change = self.now
        self._earlier = tuple(self._after) or self._earlier
        self._after.clear()

    def settled(self, wall_s: float) -> None:
        """The policy holds what it found; the first time since the last change counts."""
        if self.changes and self.settled_after_s is None:
            self.settled_after_s = wall_s

    def describe_before(self) -> dict[str, Any]:
        """Return `describe` of the time from the warm-up to the first change."""
        return describe(self.before, (self._begun or Mark(), self._first_change if self.changes else self.now))

    def describe_after(self) -> dict[str, Any]:
        """Return `describe` of the time since the last change that was measured."""
        if not self.changes:
            return self.describe_before()
        if self._after:
            return describe(self.after, (self._last_change, self.now))
        return describe(self.after, (self._change_before, self._last_change))

    def whole(self) -> dict[str, Any]:
        """Return `figures` of the whole run, all rates over the whole wall, and ``first_batch_s``."""
        run, wall_s = figures(Mark(), self.now), self.now.totals.wall_s
        return run | {
            "throughput_samples_per_s": _rate(self.now.samples, wall_s),
            "throughput_batches_per_s": _rate(self.now.totals.steps, wall_s),
            "wait_frac": _rate(self.now.totals.wait_s, wall_s),
            "first_batch_s": _number(self.now.totals.first_batch_s),
        }


def describe(observations: Sequence[Observation], span: tuple[Mark, Mark] | None = None) -> dict[str, Any]:
    """Return the figures and the verdict of some windows in plain JSON types, and what causes are computed from.

    Args:
        observations: windows of one allocation, oldest first; without any every number is None.
        span: from where to where: then throughput and wait are those of the whole span, what lies between the windows
            included; else medians of the windows.
    """
    judged, common = settle(observations), measured(observations)
    last = observations[-1] if observations else None
    known = {
        "throughput_samples_per_s": _middle([o.samples_per_s for o in observations]),
        "throughput_batches_per_s": _middle([o.batches_per_s for o in observations]),
        "wait_frac": _middle([o.wait_frac for o in observations]),
    }
    if span is not None and observations:
        known |= {key: value for key, value in figures(*span).items() if value is not None}
    return known | {
        "exposed_wait_frac": _middle([o.exposed_wait_frac for o in observations if o.exposed_wait_frac is not None]),
        "model_s": _middle([o.model_s for o in observations]),
        "allocation": last.allocation if last else {},
        "memory_used_bytes": last.resources.memory_used_bytes if last else None,
        "memory_limit_bytes": last.resources.memory_limit_bytes if last else None,
        "cpus": _number(last.resources.cpus) if last else None,
        "windows": len(observations),
        "verdict": judged.kind,
        "stage": judged.stage,
        "headroom": _number(judged.headroom),
        "why": judged.why,
        "measured": _plain(common.to_json()) if common is not None else None,
    }


def _rate(part: float, seconds: float) -> float | None:
    return _number(part / seconds) if seconds > 0.0 else None


def _plain(value: Any) -> Any:
    """Numbers with six digits, lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return _number(value) if isinstance(value, float) else value


def _middle(values: Sequence[float]) -> float | None:
    return _number(median(values)) if values else None


def _number(value: float | None) -> float | None:
    """Six digits are more than was measured, and JSON knows no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
