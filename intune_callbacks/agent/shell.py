"""The shell around the agent: jump, burst, confirm, hold, wake. Decides for N pipelines at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from intune_callbacks.agent.burst import gain_of_one, moves_of_one, windows_of_one
from intune_callbacks.agent.features import features
from intune_callbacks.agent.moves import MOVES, STAY, allowed, at, best_moves
from intune_callbacks.agent.phases import BURST, CONFIRM, HOLD, JUMP, Moved, ShellConfig, Values
from intune_callbacks.agent.target import expected_gain, fit_budget, fit_memory, target, target_of_one, windows_for
from intune_callbacks.agent.track import NOBODY, Track
from intune_callbacks.agent.view import Bools, Floats, Ints, View

__all__ = ["Shell"]

SETTLED = 6
"""Decisions an allocation is held before a drop wakes the shell."""
SAME_CPUS = 0.01
"""What was learned goes on where the CPUs differ by no more than this share."""
INPUT_BOUND = 0.97
"""Share of the model's demand from which on there is nothing worth a change."""


class Shell:
    """Decides where N pipelines go next.

    Args:
        values: the agent's network; None makes no moves of its own: model jumps and hold.
        config: lengths of the phases.
        explore: share of decisions in which some slots move at random, for learning.
        rng: of those.
        quanta: see `best_moves`.
    """

    def __init__(
        self,
        values: Values | None,
        config: ShellConfig | None = None,
        *,
        explore: float = 0.0,
        rng: np.random.Generator | None = None,
        quanta: int = 4,
    ) -> None:
        self.values, self.config, self.explore, self.quanta = values, config or ShellConfig(), explore, quanta
        self.rng = rng or np.random.default_rng(0)
        self.track: Track | None = None
        self.moved: Moved | None = None
        self.phase: Ints = np.zeros(0, int)
        self.kept: Mapping[str, Floats] | None = None
        """Where to go on with one pipeline: what `state_dict` gave, as arrays."""
        self._jumps = np.array(self.config.jumps)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the only pipeline, in plain numbers; empty before the first decision."""
        if self.track is None or len(self.phase) != 1:
            return {}
        own = {"phase": self.phase, "left": self._left, "idle": self._idle, "held": self._held, "wait": self._wait}
        return self.track.state_dict() | {
            **{name: int(array[0]) for name, array in own.items()},
            "trusted": int(self._trusted[0]),
            "cpus": float(self.track.view.cpus[0]),
        }

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return values and windows, [N, S], for the next decision."""
        if self.track is None:
            self._start(view)
        else:
            self.track.update(view)
        assert self.track is not None
        if view.is_one and (decided := self._act_of_one(view)) is not None:
            return decided
        track, c = self.track, self.config
        self._early = np.zeros(len(view.cpus), bool)
        # A training loop that does not wait for data is left alone.
        self._bound = np.log(np.maximum(INPUT_BOUND * view.demand, 1e-12)) > track.smooth
        self._wake(view)
        value = self._probe(view, view.value)
        want = self._wants_target(view)
        aimed = target(view, track.curves, c.usable) if want.any() else view.value
        self._look(view, aimed)
        jump = self._jump | self._look_jump | self._again_jump
        if jump.any():
            value = np.where(jump[:, None] & view.workers, aimed, value)
            buffer = np.minimum(np.maximum(float(c.buffer), view.low), view.high)
            value = np.where(jump[:, None] & view.mask & view.is_buffer, buffer, value)
        value = self._burst(view, value, aimed)
        value = self._confirm(value)
        return self._guarded(view, value)

    def _act_of_one(self, view: View) -> tuple[Floats, Floats] | None:
        """Do what `act` does for one pipeline in the midst of a burst or of holding, in plain numbers; else None."""
        assert self.track is not None
        track, c, one, phase = self.track, self.config, view.one, int(self.phase[0])
        bound, held = math.log(max(INPUT_BOUND * one.demand, 1e-12)) > float(track.smooth[0]), int(self._held[0])
        if not one.alive or track.resized[0] or phase not in (BURST, HOLD):
            return None
        if phase == HOLD:
            if held + 1 >= self._wait[0] or (held >= SETTLED and track.low[0] >= 4):
                return None
            self._held[0], self.moved, value = held + 1, None, one.value
        else:
            left = int(self._left[0])
            if not bound or left <= 0 or self._idle[0] >= c.patience or self.explore > 0.0:
                return None
            aimed = target_of_one(one, track.curves.one, c.usable)
            if left % c.review == 0 and gain_of_one(one, track.curves, aimed) > c.worth:
                return None
            assert self.values is not None
            value, self.moved = moves_of_one(view, track, aimed, self.values, c, self.quanta)
            still = value == one.value and bool(self.moved.followed[0])
            self._held[0], self._left[0], self._idle[0] = 0, left - 1, self._idle[0] + 1 if still else 0
        window = windows_of_one(one, track.curves.one.cv, value, bound, c.memory_limit)
        if window is None:
            self._bound = np.array([bound])
            return self._guarded(view, np.array([value]))
        return np.array([value]), np.array([window])

    def _probe(self, view: View, value: Floats) -> Floats:
        assert self.track is not None
        if self.track.decisions != self.config.probe_at or self.config.probe >= 1.0:
            return value
        fewer = np.where(view.workers, np.maximum(np.round(view.value * self.config.probe), view.low), value)
        rows = (self.phase == JUMP) & (fewer != view.value).any(1)
        # Where there is nothing to take away the first jump need not wait.
        self._early = (self.phase == JUMP) & ~rows
        return np.where(rows[:, None], fewer, value)

    def _start(self, view: View) -> None:
        n = len(view.cpus)
        self.track = Track(view)
        self.phase, self._left, self._idle = np.zeros(n, int), np.zeros(n, int), np.zeros(n, int)
        self._held, self._wait = np.zeros(n, int), np.full(n, self.config.look)
        self._trusted = np.zeros(n, bool)
        self._look_jump = np.zeros(n, bool)
        self._is_taken_up = False
        kept, self.kept = self.kept, None
        if kept is not None and n == 1 and abs(view.cpus[0] / kept["cpus"] - 1.0) <= SAME_CPUS:
            self._go_on(kept, view)

    def _go_on(self, kept: Mapping[str, Floats], view: View) -> None:
        """Take up the phase of another run: what was held is held, and looked at again after a full wait."""
        assert self.track is not None
        self._is_taken_up = True
        self.track.go_on(kept, view)
        self.phase, self._wait = np.array([int(kept["phase"])]), np.array([int(kept["wait"])])
        self._left, self._idle = np.array([int(kept["left"])]), np.array([int(kept["idle"])])
        self._trusted = kept["trusted"][None] > 0.0
        elsewhere = (view.value != kept["value"][:1]).any(1)
        # Not where it was: the best known is measured again before it is held.
        self.phase[(self.phase == HOLD) & elsewhere] = CONFIRM
        if self.values is None:
            self.phase[self.phase == BURST] = CONFIRM

    def _wake(self, view: View) -> None:
        assert self.track is not None
        track, c = self.track, self.config
        # The slump of a burst's last moves is not one of the allocation that is held now.
        fallen = (self.phase == HOLD) & (self._held >= SETTLED) & (track.low >= 4)
        if fallen.any():
            track.forget(fallen)
            track.age[fallen] = 1
            if self._is_taken_up:
                # What another run found does not hold here: nor does what it learned.
                track.curves.restart(view, fallen)
                self._is_taken_up = False
        new = track.resized | fallen | ~view.alive
        self.phase[new] = JUMP
        self._wait[new] = c.look
        self.phase[~self._bound & (self.phase < CONFIRM)] = CONFIRM
        self._begin_burst((self.phase == JUMP) & (track.age > c.jumps[-1]), c.burst)
        self._held = (self._held + 1) * (self.phase == HOLD)

    def _begin_burst(self, rows: Bools, length: int) -> None:
        if not rows.any():
            return
        self.phase[rows] = BURST if self.values is not None else CONFIRM
        self._left[rows], self._idle[rows] = length, 0
        self._trusted[rows] = self.values is not None

    def _wants_target(self, view: View) -> Bools:
        assert self.track is not None
        track, at_jump = self.track, self.phase == JUMP
        self._look_jump, self._again_jump = np.zeros((2, len(view.cpus)), bool)
        self._looking = (self.phase == HOLD) & (self._held >= self._wait)
        at = (track.age[:, None] == self._jumps).any(1) | (track.resized & (track.decisions > 1))
        self._jump = self._early | (at & at_jump)
        return np.asarray(self._jump | (self.phase == BURST) | self._looking)

    def _look(self, view: View, aimed: Floats) -> None:
        """Jump where the curves promise clearly more: in the middle of a burst, and, while holding, now and then.

        Where holding has nothing to jump for, it tries a short burst.
        """
        assert self.track is not None
        track, c = self.track, self.config
        again = self._bound & (self.phase == BURST) & (self._left > 0) & (self._left % c.review == 0)
        if not (self._looking | again).any():
            return
        gain = expected_gain(view, track.curves, aimed)
        self._again_jump = again & (gain > c.worth)
        # The next look comes later, unless this one finds something.
        self._held[self._looking] = 0
        self._wait[self._looking] = np.minimum(2 * self._wait[self._looking], c.longest)
        self._look_jump = self._looking & (gain > c.worth)
        self.phase[self._look_jump] = CONFIRM
        self._wait[self._look_jump] = self.config.look
        if self.values is not None:
            self._begin_burst(self._looking & ~self._look_jump & self._bound, self.config.again)

    def _burst(self, view: View, value: Floats, aimed: Floats) -> Floats:
        assert self.track is not None
        self.moved = None
        rows = self.phase == BURST
        if not rows.any() or self.values is None:
            return value
        track, c = self.track, self.config
        best = track.best[0]
        over = rows & ((self._left <= 0) | (self._idle >= c.patience))
        self.phase[over] = CONFIRM
        self._left -= rows
        rows = rows & ~over & ~self._again_jump
        self._idle[self._again_jump] = 0
        if not rows.any():
            return value
        ratio = np.where(view.value > 0.0, view.window / np.maximum(view.value, 1.0), 0.0)
        slots, pipeline = features(view, track, aimed, ratio)
        q = self.values(slots, pipeline, view.mask).astype(float)
        fine = allowed(view, ratio, c.memory_limit)
        if self.explore > 0.0:
            some = (self.rng.random(len(q)) < self.explore)[:, None] & (self.rng.random(q.shape[:2]) < 0.35)
            q = np.where(some[..., None], self.rng.normal(0.0, 10.0, q.shape), q)
        room = view.room
        moves = best_moves(q, fine, view.worker_weight, room, self.quanta)
        # Slots that do not exist may only stay.
        gain = (at(q, moves) - q[..., STAY]).sum(1)
        weak = (gain / np.maximum(view.mask.sum(1), 1) < c.gate) & (room >= 0.0)
        moves = np.where(weak[:, None], STAY, moves)
        next_ = view.value + MOVES[moves]
        # What is clearly worse than the best known is left, not walked out of.
        back = rows & (track.low >= 3)
        value = np.where(back[:, None], best, np.where(rows[:, None], next_, value))
        still = (moves == STAY).all(1) & ~back
        self._idle = np.where(rows, (self._idle + 1) * still, self._idle)
        self.moved = Moved(slots, pipeline, view.mask, moves, fine, view.weight, room, rows & ~back)
        return value

    def _confirm(self, value: Floats) -> Floats:
        """Measure what may be the best until it is sure; then hold."""
        assert self.track is not None
        track = self.track
        rows = (self.phase == CONFIRM) & ~self._look_jump
        if not rows.any():
            return value
        score, n = track.score, np.arange(len(value))
        hope = track.mean + track.noise[:, None] / np.sqrt(np.maximum(track.count, 1.0))
        # Where the agent stopped is believed until the measurements speak against it.
        trusted = self._trusted & (hope[:, 0] >= score[:, 1:].max(1))
        hope = np.where(trusted[:, None], np.where(np.arange(hope.shape[1]) == 0, np.inf, NOBODY), hope)
        score = np.where(trusted[:, None] & (np.arange(hope.shape[1]) > 0), NOBODY, score)
        open_ = (track.count > 0.0) & (track.count < self.config.measured) & (hope >= score.max(1, keepdims=True))
        choice = np.where(open_, hope, -np.inf).argmax(1)
        sure = ~open_.any(1)
        choice = np.where(sure, score.argmax(1), choice)
        self.phase[rows & sure] = HOLD
        self._held[rows & sure] = 0
        self._trusted[rows & sure] = False
        return np.where(rows[:, None], track.value[n, choice], value)

    def _guarded(self, view: View, value: Floats) -> tuple[Floats, Floats]:
        assert self.track is not None
        c = self.config
        value = fit_budget(view, value)
        moved = (value != view.value).any(1)
        wide = windows_for(value, self.track.curves.cv, view)
        # A window that is cut holds up the stages before it until it has drained: only far too wide ones are.
        wider = (wide > np.where(moved, 1.0, 1.2)[:, None] * view.window) & (moved | self._bound)[:, None]
        window = np.where(wider | (moved[:, None] & (wide < 0.5 * view.window)), wide, view.window)
        changed = moved | (window != view.window).any(1)
        limit = np.where(changed | (view.full_memory > c.memory_limit + 0.03), c.memory_limit, 9.0)
        return fit_memory(view, value, window, limit)
