"""What the agent remembers of a running pipeline: fitted curves, elasticities, the best allocations it measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intune_callbacks.decide.curves import Curves
from intune_callbacks.decide.view import Bools, Floats, Ints, View

__all__ = ["MOMENTS", "REMEMBERED", "UNMEASURED", "Track"]

REMEMBERED = 3
"""Allocations remembered besides the present one. A choice: each is measured again before one is held."""
MOMENTS = 3
"""Sums kept of the moves of a slot."""
UNMEASURED = -30.0
"""Log throughput of an allocation that was not measured: below any real one."""
FORGET_MOVES = 0.97
"""Weight old moves keep at each decision. A choice: some thirty decisions count, a burst."""
AGING = 0.0007
"""Log throughput an old measurement loses per decision: work drifts. A choice: 1 % in 14 decisions."""
MOST_COUNT = 20.0
"""Windows of an allocation that count in its mean. A choice: more would no longer follow work that drifts."""
SECOND_WEIGHT = 0.8
"""Weight of an allocation's second window: in the first one, windows fill or drain."""
CLEARLY, CLEAR_NOISE = 0.1, 1.5
"""Log throughput, and errors of one window, by which what is clearly worse is below the best. A choice: smaller
differences are often noise."""
SMOOTH = 0.4
"""Weight of a new window in the smoothed log throughput. A choice: some three windows count."""
LEAST_NOISE, MOST_NOISE = 0.005, 0.3
"""Bounds of the relative error of one window: a few equal windows are luck, and one stall is no noise."""


class Track:
    """Memory of N pipelines, fed one `View` per decision."""

    def __init__(self, view: View) -> None:
        n, s = view.mask.shape
        self.curves = Curves(view)
        self.decisions = 0
        self.resized: Bools = np.zeros(n, bool)
        """Machines whose CPUs changed, or that came back from being down, at this decision."""
        self.age: Ints = np.zeros(n, int)
        """Decisions since the start or the last resize."""
        self.log_rate: Floats = np.log(np.maximum(view.rate, 1e-12))
        self.smooth: Floats = self.log_rate.copy()
        self.change: Floats = np.zeros(n)
        """Change of log throughput since the decision before."""
        self.last_move: Floats = np.zeros((n, s))
        self.noise: Floats = view.noise.copy()
        """Relative error of one measured throughput."""
        self.low: Ints = np.zeros(n, int)
        """Decisions in a row that were clearly below the best known."""
        self.moves: Floats = np.zeros((MOMENTS, n, s))
        """Sums over each slot's moves, in logs: squares, products with the changes of service time and throughput."""
        # Column 0 is the present allocation.
        self.value: Floats = np.repeat(view.value[:, None], REMEMBERED + 1, 1)
        self.mean: Floats = np.full((n, REMEMBERED + 1), UNMEASURED)
        self.count: Floats = np.zeros((n, REMEMBERED + 1))
        self.score: Floats = self._scores()
        """Log throughput of the remembered allocations, less what may be luck, [N, REMEMBERED + 1]."""
        self.best: tuple[Floats, Floats] = (view.value, np.full(n, UNMEASURED))
        """The best allocation measured, [N, S], and its score, [N]."""
        self.view = view
        self._note(view)

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered of the only pipeline, in plain numbers."""
        own = {name: getattr(self, name)[0].tolist() for name in ("value", "mean", "count", "noise", "age")}
        return self.curves.state_dict() | own | {"moves": self.moves[:, 0].tolist(), "decisions": self.decisions}

    def go_on(self, saved: Mapping[str, Floats], view: View) -> None:
        """Take back what `state_dict` gave, as arrays; `view` is the first one since."""
        self.curves.go_on(saved, view)
        self.value, self.mean, self.count = (saved[name][None].copy() for name in ("value", "mean", "count"))
        self.noise, self.moves = saved["noise"][None].copy(), saved["moves"][:, None].copy()
        self.age, self.decisions = np.array([int(saved["age"]) + 1]), int(saved["decisions"]) + 1
        self._note(view)

    def update(self, view: View) -> None:
        """Take one decision's measurements."""
        before = self.view
        self.decisions += 1
        self.view = view
        self.curves.learn(view)
        self.resized = (view.cpus != before.cpus) | (view.alive & ~before.alive)
        ok = view.alive & ~self.resized & before.alive
        log_rate = np.log(np.maximum(view.rate, 1e-12))
        self.change = np.where(ok, log_rate - self.log_rate, 0.0)
        self.log_rate = log_rate
        self.age = np.where(self.resized | ~view.alive, 0, self.age + 1)
        self._learn_moves(before, view, ok)
        self.smooth = np.where(self.age == 0, log_rate, self.smooth + SMOOTH * (log_rate - self.smooth))
        self._note(view)
        margin = np.maximum(CLEARLY, CLEAR_NOISE * self.noise)
        self.low = np.where((self.smooth < self.best[1] - margin) & (self.age > 0), self.low + 1, 0)

    def forget(self, rows: Bools, age: int = 0) -> None:
        """Forget what `rows` measured, for the work or the machine is another, and count decisions from `age` on."""
        self.age[rows] = age
        self.mean[rows] = UNMEASURED
        self.count[rows] = 0.0
        self.low[rows] = 0
        self._rank()

    def _scores(self) -> Floats:
        known = self.mean - self.noise[:, None] / np.sqrt(np.maximum(self.count, 1.0))
        return np.where(self.count > 0.0, known, UNMEASURED)

    def _rank(self) -> None:
        self.score = self._scores()
        rows, top = np.arange(len(self.score)), self.score.argmax(1)
        self.best = self.value[rows, top], self.score[rows, top]

    def _learn_moves(self, before: View, view: View, ok: Bools) -> None:
        self.moves = FORGET_MOVES * self.moves
        now, then = np.maximum(view.value, 1.0), np.maximum(before.value, 1.0)
        self.last_move = (now - then) * ok[:, None]
        if not self.last_move.any():
            return
        move = np.log(now / then) * ok[:, None]
        work = np.log(np.maximum(view.work_s, 1e-12) / np.maximum(before.work_s, 1e-12))
        self.moves += move * np.stack([move, work * view.workers, np.broadcast_to(self.change[:, None], move.shape)])

    def _note(self, view: View) -> None:
        """Add the measurement to the present allocation; put the one before away if it was among the best."""
        rows = np.arange(len(view.cpus))
        lost = self.resized | ~view.alive
        if lost.any():
            self.mean[lost], self.count[lost] = UNMEASURED, 0.0
        self.mean -= AGING
        moved = (self.value[:, 0] != view.value).any(1)
        if moved.any():
            score = self._scores()
            worst = score[:, 1:].argmin(1) + 1
            known = (self.value[:, 1:] == self.value[:, :1]).all(-1) & (self.count[:, 1:] > 0.0)
            place = np.where(known.any(1), known.argmax(1) + 1, worst)
            keep = moved & (self.count[:, 0] > 0.0) & (known.any(1) | (score[:, 0] > score[rows, worst]))
            k, p = rows[keep], place[keep]
            self.value[k, p], self.mean[k, p], self.count[k, p] = self.value[k, 0], self.mean[k, 0], self.count[k, 0]
            same = (self.value[:, 1:] == view.value[:, None]).all(-1) & (self.count[:, 1:] > 0.0)
            again, at = same.any(1), same.argmax(1) + 1
            self.value[moved, 0], self.mean[moved, 0], self.count[moved, 0] = view.value[moved], UNMEASURED, 0.0
            # Only column 0 goes on: what it gave once, left beside it, would be hoped for as long as it is in force.
            k = rows[moved & again]
            self.mean[k, 0], self.count[k, 0] = self.mean[k, at[k]], self.count[k, at[k]]
            self.mean[k, at[k]], self.count[k, at[k]] = UNMEASURED, 0.0
        # What an allocation gives in the decision of a resize belongs to neither machine.
        up = ~lost
        steady = up & ~moved & (self.count[:, 0] > 1.0)
        difference = np.abs(self.log_rate - self.mean[:, 0])
        self.noise = np.where(
            steady, np.clip(self.noise + 0.1 * (1.25 * difference - self.noise), LEAST_NOISE, MOST_NOISE), self.noise
        )
        # In the first decision of an allocation windows fill or drain: the second one nearly replaces it.
        count = self.count[:, 0]
        gain = np.where(count == 1.0, SECOND_WEIGHT, 1.0 / np.minimum(count + 1.0, MOST_COUNT))
        moving = self.mean[:, 0] + gain * (self.log_rate - self.mean[:, 0])
        self.mean[:, 0] = np.where(up, np.where(count == 0.0, self.log_rate, moving), self.mean[:, 0])
        self.count[up, 0] += 1.0
        self._rank()
