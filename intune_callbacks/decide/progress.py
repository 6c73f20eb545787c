"""Where N pipelines are between jump, burst, confirm and hold, and what moves them on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from intune_callbacks.decide.curves import COEFFICIENTS, SAVED, TERMS
from intune_callbacks.decide.target import expected_gain
from intune_callbacks.decide.track import MOMENTS, REMEMBERED, Track
from intune_callbacks.decide.view import Bools, Floats, Ints, View

__all__ = ["BURST", "CONFIRM", "HOLD", "JUMP", "Progress", "ShellConfig", "checked_state"]

JUMP, BURST, CONFIRM, HOLD = range(4)
SETTLED = 6
"""Decisions an allocation is held before a drop wakes the shell. A choice: by then 5 % of the smoothed throughput are
from before, see `track.SMOOTH`."""
SAME_CPUS = 0.01
"""What was learned goes on where the CPUs differ by no more than this share: a quota is read with rounding."""
INPUT_BOUND = 0.97
"""Share of the model's demand from which on nothing is changed. A choice: what is left is within the
error of a window."""
FAILED = 4
"""Allocations remembered that were left because they were measured to be worse. A choice: each doubles the time to the
next look, so that the fifth comes minutes later."""
LOOK_BURST = 8
"""Most decisions of a burst that starts while holding: measured, see docs/adr/0014-no-experiment-first.md."""
LEAST_GAIN = 0.08
"""Expected gain in log throughput for which a jump is made later than the first ones. A choice: a change costs seconds,
and the curves are wrong by several percent."""
_SINGLE = ("phase", "left", "idle", "wait", "trusted", "cpus", "noise", "age", "decisions", "scale")


@dataclass(frozen=True, slots=True)
class ShellConfig:
    """How long each phase lasts, in decisions.

    Args:
        jumps: ages at which the allocation of the curves is taken over.
        burst: most decisions of moves in a row.
        patience: decisions in a row without a worthwhile move that end a burst.
        review: moves of a burst after which a jump is considered again.
        measured: decisions an allocation is measured before it is held.
        look: decisions of holding before the first look for something better.
        longest: most decisions between two looks; the time doubles while nothing is found.
        gate: gain in value below which a combination of moves is not made.
        memory_limit: share of the memory planned with.
    """

    jumps: tuple[int, ...] = (1, 3, 5)
    burst: int = 30
    patience: int = 3
    review: int = 6
    measured: int = 3
    look: int = 20
    longest: int = 240
    gate: float = 0.05
    memory_limit: float = 0.90


class Progress:
    """The phases of N pipelines, and what is remembered of them.

    Args:
        has_agent: there are bursts; else what is jumped to is confirmed and held.
    """

    def __init__(self, config: ShellConfig, *, has_agent: bool) -> None:
        self.config, self.has_agent = config, has_agent
        self.track: Track | None = None
        self.phase: Ints = np.zeros(0, int)
        self.saved: Mapping[str, Floats] | None = None
        """Where to go on with one pipeline: what `checked_state` gave."""
        self.asked: Floats | None = None
        """The allocation decided last, [N, S]."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the only pipeline, in plain numbers; empty before the first decision."""
        if self.track is None:
            return {}
        own = {"phase": self.phase, "left": self._left, "idle": self._idle, "wait": self._wait}
        return self.track.state_dict() | {
            **{name: int(array[0]) for name, array in own.items()},
            "trusted": int(self._trusted[0]),
            "failed": self._failed[0].tolist(),
            "cpus": float(self.track.view.cpus[0]),
        }

    def _measured(self, view: View) -> Track:
        """Return what is remembered, `view` included."""
        if self.track is None:
            self.track = self._started(view)
        else:
            self.track.update(view)
        return self.track

    def _started(self, view: View) -> Track:
        n = len(view.cpus)
        self.phase, self._left, self._idle = np.zeros(n, int), np.zeros(n, int), np.zeros(n, int)
        self._held, self._wait = np.zeros(n, int), np.full(n, self.config.look)
        self._trusted = np.zeros(n, bool)
        self._failed = np.zeros((n, FAILED, view.value.shape[1]))
        # After a failure windows stay as they are, too, until the hold ends.
        self._is_left_alone = np.zeros(n, bool)
        # Decisions until other work may end the hold again, and how many it will be the next time.
        self._calm, self._rest = np.zeros(n, int), np.full(n, self.config.look)
        self._denied = np.full(view.value.shape, np.nan)
        self._is_taken_up = False
        track, (saved, self.saved) = Track(view), (self.saved, None)
        if saved is not None and abs(view.cpus[0] / saved["cpus"] - 1.0) <= SAME_CPUS:
            self._go_on(saved, view, track)
        return track

    def _go_on(self, saved: Mapping[str, Floats], view: View, track: Track) -> None:
        """Take up the phase of another run: what was held is held, and looked at again after a full wait."""
        self._is_taken_up = True
        track.go_on(saved, view)
        self.phase, self._wait = np.array([int(saved["phase"])]), np.array([int(saved["wait"])])
        self._left, self._idle = np.array([int(saved["left"])]), np.array([int(saved["idle"])])
        self._trusted, self._failed = saved["trusted"][None] > 0.0, saved["failed"][None].copy()
        elsewhere = (view.value != saved["value"][:1]).any(1)
        # Not where it was: the best known is measured again before it is held.
        self.phase[(self.phase == HOLD) & elsewhere] = CONFIRM
        if not self.has_agent:
            self.phase[self.phase == BURST] = CONFIRM

    def taken_back(self, failed: Floats) -> None:
        """Hold what the only pipeline was brought back to, and take twice as long until the next look."""
        if self.track is None:
            return
        # The windows alone told another story: what they said of any allocation does not count.
        self.track.forget(np.ones(len(self.phase), bool), -1)
        self._failed = np.concatenate([failed[None, None], self._failed[:, :-1]], 1)
        self.phase[:], self._held[:], self._left[:], self._idle[:] = HOLD, 0, 0, 0
        self._trusted[:], self._is_left_alone[:] = False, True
        self._wait = np.minimum(2 * self._wait, self.config.longest)
        self.asked = None

    def _has_failed(self, now: Floats, then: Floats) -> Bools:
        """Where `then` is nearer to an allocation that failed than to the one of `now`, in log units, [N]."""
        if not self._failed.any():
            return np.zeros(len(now), bool)
        logs = [np.log(np.maximum(values, 1.0)) for values in (now, then, self._failed)]
        moved = np.abs(logs[1] - logs[0]).sum(1)
        beside = np.abs(logs[1][:, None] - logs[2]).sum(2)
        return np.asarray(((beside < moved[:, None]) & self._failed.any(2)).any(1))

    def _wake(self, view: View, track: Track) -> None:
        c = self.config
        # A training loop that does not wait for data is left alone.
        self._bound = np.log(np.maximum(INPUT_BOUND * view.demand, 1e-12)) > track.smooth
        self._refused = np.zeros(len(view.cpus), bool)
        if self.asked is not None:
            self._refused = (self.asked != view.value).any(1) & ~track.last_move.any(1)
            self._denied = np.where(self._refused[:, None], self.asked, self._denied)
        # What failed on other work may be right for this one: it is looked at now, but less and less often where the
        # work goes to and fro.
        self._calm = np.maximum(self._calm - 1, 0)
        other = track.curves.is_other & (self.phase == HOLD) & (self._calm == 0)
        self._failed[other], self._is_left_alone[other] = 0.0, False
        self._wait[other] = self._held[other] = c.look
        self._calm = np.where(other, self._rest, self._calm)
        self._rest = np.where(other, np.minimum(2 * self._rest, c.longest), self._rest)
        # The slump of a burst's last moves is not one of the allocation that is held now.
        fallen = (self.phase == HOLD) & (self._held >= SETTLED) & (track.low >= 4)
        if fallen.any():
            track.forget(fallen, 1)
            if self._is_taken_up:
                # What another run found does not hold here: nor does what it learned.
                track.curves.restart(fallen)
                self._is_taken_up = False
        new = track.resized | fallen | ~view.alive
        self.phase[new] = JUMP
        self._failed[track.resized] = 0.0
        self._wait[new & ~self._failed.any((1, 2))] = c.look
        self.phase[~self._bound & (self.phase < CONFIRM)] = CONFIRM
        self._begin_burst((self.phase == JUMP) & (track.age > c.jumps[-1]), c.burst)
        self._held = (self._held + 1) * (self.phase == HOLD)
        self._is_left_alone &= self.phase == HOLD

    def _begin_burst(self, rows: Bools, length: int) -> None:
        self.phase[rows] = BURST if self.has_agent else CONFIRM
        self._left[rows], self._idle[rows] = length, 0
        self._trusted[rows] = self.has_agent

    def _wants_target(self, track: Track) -> Bools:
        self._looking = (self.phase == HOLD) & (self._held >= self._wait)
        is_due = (track.age[:, None] == self.config.jumps).any(1) | (track.resized & (track.decisions > 1))
        self._jump = is_due & (self.phase == JUMP)
        return np.asarray(self._jump | (self.phase == BURST) | self._looking)

    def _look(self, view: View, track: Track, aimed: Floats) -> None:
        """Jump where the curves promise clearly more: in the middle of a burst, and, while holding, now and then.

        Where holding has nothing to jump for, it tries a short burst.
        """
        c = self.config
        again = self._bound & (self.phase == BURST) & (self._left > 0) & (self._left % c.review == 0)
        self._look_jump = self._again_jump = np.zeros(len(view.cpus), bool)
        if not (self._looking | again).any():
            return
        is_better = (expected_gain(view, track.curves, aimed) > LEAST_GAIN) & ~self._has_failed(view.value, aimed)
        self._again_jump = again & is_better
        # The next look comes later, unless this one finds something.
        self._held[self._looking] = 0
        self._wait[self._looking] = np.minimum(2 * self._wait[self._looking], c.longest)
        self._look_jump = self._looking & is_better
        self.phase[self._look_jump] = CONFIRM
        self._wait[self._look_jump & ~self._failed.any((1, 2))] = c.look
        if self.has_agent:
            self._begin_burst(self._looking & ~self._look_jump & self._bound, LOOK_BURST)
        self._is_left_alone &= ~self._looking


def checked_state(state: Mapping[str, Any], slots: int) -> dict[str, Floats]:
    """Return the arrays of what `Shell.state_dict` gave.

    Args:
        state: plain numbers, perhaps of another version of this package.

    Raises:
        KeyError: something is missing.
        ValueError: something has another shape, is no finite number, or is no phase.
    """
    allocations = REMEMBERED + 1
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(_SINGLE, ()),
        **dict.fromkeys(SAVED, (slots,)),
        "failed": (FAILED, slots),
        "value": (allocations, slots),
        "mean": (allocations,),
        "count": (allocations,),
        "moves": (MOMENTS, slots),
        "theta": (COEFFICIENTS, slots),
        "precision": (TERMS, slots),
    }
    found = {name: np.array(state[name], float) for name in shapes}
    for name, shape in shapes.items():
        if found[name].shape != shape or not np.isfinite(found[name]).all():
            raise ValueError(f"{name}: expected finite numbers of shape {shape}")
    if int(found["phase"]) not in (JUMP, BURST, CONFIRM, HOLD):
        raise ValueError(f"phase: {state['phase']} is none")
    return found
