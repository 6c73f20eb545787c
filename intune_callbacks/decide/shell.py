"""The shell around the agent: jump, burst, confirm, hold, wake. Decides for N pipelines at once."""

from __future__ import annotations

import numpy as np

from intune_callbacks.decide.features import features
from intune_callbacks.decide.moves import MOVES, STAY, allowed, at, best_moves
from intune_callbacks.decide.phases import BURST, CONFIRM, HOLD, Moved, ShellConfig, Values
from intune_callbacks.decide.progress import Progress
from intune_callbacks.decide.target import fit_budget, fit_memory, target, windows_for
from intune_callbacks.decide.track import NOBODY
from intune_callbacks.decide.view import Floats, View

__all__ = ["Shell"]


class Shell(Progress):
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
        super().__init__(config or ShellConfig(), has_agent=values is not None)
        self.values, self.explore, self.quanta = values, explore, quanta
        self.rng = rng or np.random.default_rng(0)
        self.moved: Moved | None = None
        """What the network decided last, for the learner; None when it was not asked."""

    @property
    def is_jumping(self) -> bool:
        """True where the only pipeline goes to the fitted allocation now."""
        return bool(self._jumped[0])

    @property
    def is_moving(self) -> bool:
        """True while the network decides for the only pipeline."""
        return self.moved is not None and bool(self.moved.followed[0])

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return values and windows, [N, S], for the next decision."""
        self._take(view)
        self.moved = None
        assert self.track is not None
        track, c = self.track, self.config
        self._wake(view)
        value = view.value
        want = self._wants_target(view)
        aimed = view.value
        if want.any():
            buffer = np.minimum(np.maximum(float(c.buffer), view.low), view.high)
            aimed = np.where(view.is_buffer & view.mask, buffer, target(view, track.curves, c.usable))
        self._look(view, aimed)
        # Beside workers that have just started for the first jump the model is slow, and seems to need fewer.
        is_correction = (track.age > c.jumps[0]) & (track.age == track.decisions)
        is_fewer = ~((aimed > view.value) & view.mask).any(1) & (view.room >= -1e-6)
        self._jump &= ~(is_correction & is_fewer)
        jump = self._jump | self._look_jump | self._again_jump
        # What failed is left alone also where a jump is due.
        jump &= ~self._has_failed(view.value, np.where(view.mask, aimed, view.value))
        self._jumped = jump
        if jump.any():
            value = np.where(jump[:, None] & view.mask, aimed, value)
        value = self._burst(view, value, aimed)
        value = self._confirm(view, value)
        value, window = self._guarded(view, value)
        self.asked = value
        return value, window

    def _burst(self, view: View, value: Floats, aimed: Floats) -> Floats:
        assert self.track is not None
        rows = self.phase == BURST
        if not rows.any() or self.values is None:
            return value
        track, c = self.track, self.config
        best = track.best[0]
        # A move that was not granted is none.
        self._idle[track.last_move.any(1)] = 0
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
        moves = np.where(self._has_failed(view.value, view.value + MOVES[moves])[:, None], STAY, moves)
        next_ = view.value + MOVES[moves]
        # What is clearly worse than the best known is left, not walked out of.
        back = rows & (track.low >= 3)
        value = np.where(back[:, None], best, np.where(rows[:, None], next_, value))
        # Slower than it was, though where it was best: that is the work, not a lack of moves.
        slump = back & (best == view.value).all(1)
        self._idle = np.where(slump, 0, self._idle + rows)
        self.moved = Moved(slots, pipeline, view.mask, moves, fine, view.weight, room, rows & ~back)
        return value

    def _confirm(self, view: View, value: Floats) -> Floats:
        """Measure what may be the best until it is sure; then hold. What is asked for and not granted ends it, too."""
        assert self.track is not None
        track = self.track
        rows = (self.phase == CONFIRM) & ~self._look_jump
        if not rows.any():
            return value
        refused = rows & self._refused
        self.phase[refused] = HOLD
        self._held[refused], self._trusted[refused] = 0, False
        rows &= ~refused
        n = np.arange(len(value))
        # What would be cut to the budget is another allocation, maybe the present one: it would be measured for ever.
        fits = (track.value * view.worker_weight[:, None]).sum(2) <= view.budget[:, None] + 1e-6
        fits[:, 0] = True
        score = np.where(fits, track.score, NOBODY)
        hope = track.mean + track.noise[:, None] / np.sqrt(np.maximum(track.count, 1.0))
        hope = np.where(fits, hope, NOBODY)
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
        # What was not granted is not asked for again and again.
        still = self._is_left_alone | ((self.phase == HOLD) & (value == self._denied).all(1))
        value = np.where(still[:, None], view.value, value)
        moved = (value != view.value).any(1)
        wide = windows_for(value, self.track.curves.cv, view)
        # A window that is cut holds up the stages before it until it has drained: only far too wide ones are.
        may = moved | (self._bound & ~self._is_left_alone)
        wider = (wide > np.where(moved, 1.0, 1.2)[:, None] * view.window) & may[:, None]
        window = np.where(wider | (moved[:, None] & (wide < 0.5 * view.window)), wide, view.window)
        changed = moved | (window != view.window).any(1)
        limit = np.where(changed | (view.full_memory > c.memory_limit + 0.03), c.memory_limit, 9.0)
        return fit_memory(view, value, window, limit)
