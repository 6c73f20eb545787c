"""Say in one word and one sentence whether the input pipeline holds the training back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from intune_callbacks.types import Observation, StageRates
from intune_callbacks.words import percent

__all__ = [
    "COMPUTE_BOUND",
    "FED",
    "INPUT_BOUND",
    "STEPS",
    "Verdict",
    "VerdictKind",
    "Waited",
    "is_held_up",
    "is_starved",
    "settle",
]

VerdictKind = Literal["input-bound", "compute-bound", "balanced", "too short", "not measured", "slower than before"]
"""The last one is said of a whole run only, see `intune_callbacks.record.findings`."""

FED = ("compute-bound", "balanced")
"""Verdicts of which none asks for a faster input."""
STEPS, LONG_STEPS, LONG_S = 20, 8, 15.0
"""Fewest steps a verdict rests on, and where they took so many seconds together: in a step of seconds no noise hides a
wait. 20 is the value of TraceML (https://github.com/traceopt-ai/traceml); SPDL also discards about 20 steps."""
INPUT_BOUND, COMPUTE_BOUND, COMPUTE_BOUND_WITHOUT_QUEUE = 0.20, 0.10, 0.05
"""Share of waiting from which on the input is the bottleneck, and below which the model is, if the last queue stands
full or, more carefully, where no queue can be looked at. The first two are TraceML's critical and warning values."""
FULL_QUEUE, BUSY_TIE = 0.5, 0.05
"""From this fill on a queue stands full; stages whose busy shares differ by less are told apart by their queues."""
IDLE = 0.4
"""Workers that are busy for less than this share have too little to do. A choice: less than half, with a margin."""
IN_LINE, REGULAR = 0.05, 0.8
"""Share of the time in which finished results wait for a slower one, and variation of the items, up to which the order
is not what fills a window: 32 ordered workers are busy for 65 % of the time with items of that variation."""
UNEVEN = 2.0
"""Waits are uneven where their share of the whole time is larger by this factor than in most windows. A choice: the
windows of steady work differ by less."""
MOST_WAIT = 0.999
"""Waits above it count as this much, so that the headroom stays finite."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds the training back.

    Args:
        kind: the word.
        stage: the worker stage that limits the input; None when unknown or when the input is not the bottleneck.
        headroom: how much faster training would be if input were free: 0.5 = 50 % faster.
        why: one plain sentence.
        unevenly: share of the time waited, where that is far more than in most windows; else 0.
    """

    kind: VerdictKind
    stage: str | None
    headroom: float
    why: str
    unevenly: float = 0.0


class Waited:
    """The share of all windows' time, but for that with the longest wait, in which GPU or loop waited for data.

    Args:
        observations: to begin with.
    """

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        self._wait_s = self._elapsed_s = 0.0
        self._longest_s = 0.0, 0.0
        for seen in observations:
            self.add(seen)

    def add(self, seen: Observation) -> None:
        """Take one window."""
        share = seen.wait_frac if seen.exposed_wait_frac is None else seen.exposed_wait_frac
        waited_s = share * seen.elapsed_s
        self._wait_s, self._elapsed_s = self._wait_s + waited_s, self._elapsed_s + seen.elapsed_s
        self._longest_s = max(self._longest_s, (waited_s, seen.elapsed_s))

    @property
    def share(self) -> float:
        """0..1; 0 of a single window."""
        waited_s, elapsed_s = self._wait_s - self._longest_s[0], self._elapsed_s - self._longest_s[1]
        return waited_s / elapsed_s if elapsed_s > 1e-6 * self._elapsed_s else 0.0


OTHERWISE = 0.05
"""Difference of two shares of wait from which on both are told. A choice: less is not taken for a contradiction."""


def settle(
    observations: Sequence[Observation],
    waited: float | None = None,
    is_ground: bool = False,
    in_all: float | None = None,
) -> Verdict:
    """Judge several windows by their medians, so that one odd window does not decide.

    The GPU's idle share is judged where it is known, else the share the training loop was blocked: a blocked loop does
    no harm while the GPU still has queued work. Waits that are few and long, as of storage that stalls or of workers
    that deliver all at once, are in no median: where they are much of the time, their share of it is judged.

    Args:
        observations: the windows, oldest first; the stages of the last one are judged.
        waited: as `Waited` has it of all windows, where these are only the last of them.
        is_ground: changes were made on what such windows showed: that the training waits is said of fewer steps too.
        in_all: share of wait in all the time they are of, which is told beside it: said where the windows have another.
    """
    measured = sum(o.batches for o in observations)
    needed = LONG_STEPS if sum(o.elapsed_s for o in observations) >= LONG_S else STEPS
    if is_ground and 0 < measured < needed:
        judged = _judge(observations, waited, in_all)
        if judged.kind == "input-bound":
            return judged
    if not observations or measured < needed:
        noun = "step was" if measured == 1 else "steps were"
        # The reader counts all steps of his run: those of the warm-up, and behind the last whole window, are in none.
        why = f"behind the warm-up {measured} {noun} measured in whole windows, a verdict needs {needed}"
        return Verdict("too short", None, 0.0, why)
    return _judge(observations, waited, in_all)


def _judge(observations: Sequence[Observation], waited: float | None, in_all: float | None) -> Verdict:
    exposed = [o.exposed_wait_frac for o in observations if o.exposed_wait_frac is not None]
    on_gpu = len(exposed) == len(observations)
    wait_frac = median(exposed) if on_gpu else median(o.wait_frac for o in observations)
    all_frac = Waited(observations).share if waited is None else waited
    waits = "the GPU stood idle" if on_gpu else "the trainer waited"
    if all_frac >= COMPUTE_BOUND and all_frac > UNEVEN * wait_frac:
        kind: VerdictKind = "input-bound" if all_frac >= INPUT_BOUND else "balanced"
        why = f"{waits} {percent(all_frac)} of the time for data, but unevenly"
        return Verdict(kind, None, _headroom(all_frac), f"{why}: {percent(wait_frac)} in most windows", all_frac)
    headroom = _headroom(wait_frac)
    who = f"{waits} {percent(wait_frac)} of each step"
    meets = f"{who};"
    if in_all is not None and not on_gpu and abs(in_all - wait_frac) > OTHERWISE:
        who = f"{waits} {percent(in_all)} of the time ({percent(wait_frac)} in most windows)"
        # Of the windows alone the verdict is true: a long wait may have been in a single one.
        meets = f"{waits} {percent(in_all)} of the time, but {percent(wait_frac)} in most windows: there"

    if wait_frac >= INPUT_BOUND:
        stage = _guilty(observations)
        link = "waiting for" if on_gpu else "on"
        why = f"{who} {link} {stage!r}" if stage else f"{who} {'waiting ' if on_gpu else ''}for data"
        return Verdict("input-bound", stage, headroom, why)
    judged = _judged(observations)
    fill = _fill(observations, judged[-1]) if judged else None
    # What a stage without a window of its own has in hand is little: it may be empty, and the stage fast enough.
    has_window = bool(judged) and any(stage.window_of == judged[-1] for stage in observations[-1].stages)
    compute_bound = wait_frac < COMPUTE_BOUND_WITHOUT_QUEUE and (not has_window or on_gpu)
    if fill is not None and not on_gpu:  # a loop that runs ahead of the GPU empties every queue
        compute_bound = compute_bound or (wait_frac < COMPUTE_BOUND and fill >= FULL_QUEUE)
    if compute_bound:
        return Verdict("compute-bound", None, headroom, f"{meets} the input pipeline is not the bottleneck")
    return Verdict("balanced", None, headroom, f"{meets} input and model are about equally fast")


def _headroom(wait_frac: float) -> float:
    return wait_frac / (1.0 - min(wait_frac, MOST_WAIT))


def _guilty(observations: Sequence[Observation]) -> str | None:
    """Name the worker stage that is busy most: those before it are blocked, those behind it starved."""
    busy = {
        name: median(o.rates[name].busy_frac for o in observations if name in o.rates) for name in _judged(observations)
    }
    most = max(busy.values(), default=0.0)
    if most <= 0.0:
        return None
    tied = [name for name in busy if busy[name] >= most - BUSY_TIE]
    found = min(tied, key=lambda name: (_fill(observations, name), -busy[name]))
    seen = [is_held_up(rate) or is_starved(rate) for o in observations if (rate := o.rates.get(found)) is not None]
    return None if 2 * sum(seen) > len(seen) else found


def is_starved(rate: StageRates) -> bool:
    """Return whether workers have too little to do: what limits feeds them.

    Args:
        rate: of their stage in a window.
    """
    return rate.busy_frac < IDLE and rate.starved_frac > max(rate.busy_frac, rate.blocked_frac)


def is_held_up(rate: StageRates) -> bool:
    """Return whether workers have made all they may and wait until it is taken: what limits comes behind them.

    Args:
        rate: of their stage in a window.
    """
    waits = rate.busy_frac < IDLE and rate.blocked_frac > max(rate.busy_frac, rate.starved_frac)
    return waits and rate.queue_fill >= FULL_QUEUE and rate.held_frac <= IN_LINE and rate.service_cv <= REGULAR


def _fill(observations: Sequence[Observation], name: str) -> float:
    return median(o.rates[name].queue_fill for o in observations if name in o.rates)


def _judged(observations: Sequence[Observation]) -> list[str]:
    """The worker stages of the last window that did something, in pipeline order."""
    last = observations[-1]
    return [stage.name for stage in last.stages if stage.name in last.rates and stage.kind != "memory"]
