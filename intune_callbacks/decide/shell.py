"""The shell around the agent: jump, burst, confirm, hold, wake. Decides for N pipelines at once."""

from __future__ import annotations

import numpy as np

from intune_callbacks.decide.features import features
from intune_callbacks.decide.moves import MOVES, QUANTA, STAY, Moved, allowed, at, best_moves
from intune_callbacks.decide.network import Values
from intune_callbacks.decide.progress import BURST, CONFIRM, HOLD, Progress, ShellConfig
from intune_callbacks.decide.target import fit_budget, fit_memory, target, windows_for
from intune_callbacks.decide.track import UNMEASURED, Track
from intune_callbacks.decide.view import Bools, Floats, View

__all__ = ["USABLE", "Shell"]

USABLE = 0.95
"""Share of a stage's largest rate that is aimed at. A choice: nearer to it a curve with a lock asks for many workers
that bring next to nothing."""
PREFETCH = 16.0
"""Batches a prefetch buffer is asked for when jumping. A choice: for batches that come in bursts; where memory is short
buffers give way first."""

TOO_WIDE = 0.2
"""Where less than this share of a window is needed, the rest is given back. A choice: a quarter of the CPUs needs more.
Cuts of a half cost 5 % of the 40 s after 64 CPUs had become 32 (`benchmarks.resize_tfdata`)."""


class Shell(Progress):
    """Decides where N pipelines go next.

    Args:
        values: the agent's network; None makes no moves of its own: model jumps and hold.
        quanta: see `best_moves`.
    """

    def __init__(self, values: Values | None, config: ShellConfig | None = None, *, quanta: int = QUANTA) -> None:
        super().__init__(config or ShellConfig(), has_agent=values is not None)
        self.values, self.quanta = values, quanta
        self.moved: Moved | None = None
        """What the network decided last, for the learner; None when it was not asked."""
        self.jumped: Bools = np.zeros(0, bool)
        """Pipelines that go to the fitted allocation now, [N]."""

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return values and windows, [N, S], for the next decision."""
        track, c = self._measured(view), self.config
        self.moved = None
        self._wake(view, track)
        aimed = view.value
        if self._wants_target(track).any():
            workers = np.where(view.workers, target(view, track.curves, USABLE), view.value)
            buffer = np.minimum(np.maximum(PREFETCH, view.low), view.high)
            fills = view.is_buffer_of_use | (workers > view.value).any(1)
            buffer = np.where(fills[:, None], buffer, np.minimum(buffer, view.value))
            aimed = np.where(view.mask & view.is_buffer, buffer, workers)
        self._look(view, track, aimed)
        # Beside workers that have just started for the first jump the model is slow, and seems to need fewer.
        is_correction = (track.age > c.jumps[0]) & (track.age == track.decisions)
        is_fewer = ~(aimed > view.value).any(1) & (view.free_cpus >= -1e-6)
        jump = (self._jump & ~(is_correction & is_fewer)) | self._look_jump | self._again_jump
        # What failed is left alone also where a jump is due.
        self.jumped = jump & ~self._has_failed(view.value, aimed)
        value = np.where(self.jumped[:, None], aimed, view.value)
        value = self._burst(view, track, value, aimed)
        value = self._confirm(view, track, value)
        self.asked, window = self._guarded(view, track, value)
        return self.asked, window

    def _burst(self, view: View, track: Track, value: Floats, aimed: Floats) -> Floats:
        rows = self.phase == BURST
        if not rows.any() or self.values is None:
            return value
        c, best = self.config, track.best[0]
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
        legal = allowed(view, ratio, c.memory_limit)
        free = view.free_cpus
        moves = best_moves(q, legal, view.worker_weight, free, self.quanta)
        # Slots that do not exist may only stay.
        gain = (at(q, moves) - q[..., STAY]).sum(1)
        weak = (gain / np.maximum(view.mask.sum(1), 1) < c.gate) & (free >= 0.0)
        moves = np.where(weak[:, None], STAY, moves)
        moves = np.where(self._has_failed(view.value, view.value + MOVES[moves])[:, None], STAY, moves)
        next_ = view.value + MOVES[moves]
        # What is clearly worse than the best known is left at once, not in small moves.
        back = rows & (track.low >= 3)
        value = np.where(back[:, None], best, np.where(rows[:, None], next_, value))
        # Slower than it was, though where it was best: that is the work, not a lack of moves.
        slump = back & (best == view.value).all(1)
        self._idle = np.where(slump, 0, self._idle + rows)
        self.moved = Moved(slots, pipeline, view.mask, moves, legal, view.weight, free, rows & ~back)
        return value

    def _confirm(self, view: View, track: Track, value: Floats) -> Floats:
        """Measure what may be the best until it is sure; then hold. What is asked for and not granted ends it, too."""
        rows = (self.phase == CONFIRM) & ~self._look_jump
        if not rows.any():
            return value
        self._hold(rows & self._refused)
        rows &= ~self._refused
        # What would be cut to the budget is another allocation, maybe the present one: it would be measured for ever.
        fits = (track.value * view.worker_weight[:, None]).sum(2) <= view.budget[:, None] + 1e-6
        fits[:, 0] = True
        lower = np.where(fits, track.score, UNMEASURED)
        upper = track.mean + track.noise[:, None] / np.sqrt(np.maximum(track.count, 1.0))
        upper = np.where(fits, upper, UNMEASURED)
        # Where the agent stopped is believed until the measurements speak against it.
        trusted = self._trusted & (upper[:, 0] >= lower[:, 1:].max(1))
        upper[trusted, 0] = np.inf
        upper[trusted, 1:] = lower[trusted, 1:] = UNMEASURED
        open_ = (track.count > 0.0) & (track.count < self.config.measured) & (upper >= lower.max(1, keepdims=True))
        choice = np.where(open_, upper, -np.inf).argmax(1)
        sure = ~open_.any(1)
        choice = np.where(sure, lower.argmax(1), choice)
        self._hold(rows & sure)
        return np.where(rows[:, None], track.value[np.arange(len(value)), choice], value)

    def _hold(self, rows: Bools) -> None:
        self.phase[rows], self._held[rows], self._trusted[rows] = HOLD, 0, False

    def _guarded(self, view: View, track: Track, value: Floats) -> tuple[Floats, Floats]:
        c = self.config
        value = fit_budget(view, value)
        # What was not granted is not asked for again and again.
        still = self._is_left_alone | ((self.phase == HOLD) & (value == self._denied).all(1))
        value = np.where(still[:, None], view.value, value)
        moved = (value != view.value).any(1)
        wide = windows_for(value, track.curves.cv, view)
        # A window that is cut holds up the stages before it until it has drained, and their CPUs idle: beside memory
        # only what is left of another machine is a reason.
        may = moved | (self._bound & ~self._is_left_alone)
        wider = (wide > np.where(moved, 1.0, 1.2)[:, None] * view.window) & may[:, None]
        window = np.where(wider | (moved[:, None] & (wide < TOO_WIDE * view.window)), wide, view.window)
        changed = moved | (window != view.window).any(1)
        limit = np.where(changed | (view.full_memory > c.memory_limit + 0.03), c.memory_limit, 9.0)
        return fit_memory(view, value, window, limit)
