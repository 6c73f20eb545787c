"""What the agent remembers of a single running pipeline, in plain numbers: `Track` does the same for N.

On a few stages arrays are slower: each call costs more than what it does. A test compares both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

__all__ = [
    "AGING",
    "CLEARLY",
    "CLEAR_NOISE",
    "FORGET_MOVES",
    "LEAST_NOISE",
    "MOST_COUNT",
    "MOST_NOISE",
    "NOBODY",
    "SECOND",
    "SMOOTH",
    "SPREAD",
    "TrackOfOne",
]

NOBODY = -30.0
FORGET_MOVES = 0.97
SPREAD = 0.03
AGING = 0.0007
"""Log throughput an old measurement loses per decision: work drifts."""
MOST_COUNT = 20.0
SECOND = 0.8
CLEARLY, CLEAR_NOISE = 0.1, 1.5
SMOOTH = 0.4
LEAST_NOISE, MOST_NOISE = 0.005, 0.3


@dataclass(slots=True)
class TrackOfOne:
    """Memory of one pipeline; names and meanings are those of `Track`, lists are by slot or by allocation.

    Args:
        resized: its CPUs changed, or it came back from being down, at this decision.
        age: decisions since the start or the last resize.
        log_rate, smooth, change: log throughput, its running mean, its change since the decision before.
        last_move: units, by slot.
        noise: relative error of one measured throughput.
        low: decisions in a row that were clearly below the best known.
        moves: by slot, the sums of squares of its moves, and of their products with service time and throughput.
        value: the present allocation and those kept, each by slot.
        mean, count, score: of these allocations.
    """

    resized: bool
    age: int
    log_rate: float
    smooth: float
    change: float
    last_move: list[float]
    noise: float
    low: int
    moves: list[list[float]]
    value: list[list[float]]
    mean: list[float]
    count: list[float]
    score: list[float]

    @property
    def best(self) -> tuple[list[float], float]:
        """The best allocation measured, and its score."""
        most = max(self.score)
        return self.value[self.score.index(most)], most

    def take(self, then: SimpleNamespace, now: SimpleNamespace) -> None:
        """Take one decision's measurements.

        Args:
            then, now: `View.one` of the decision before, and of this one.
        """
        alive, resized = now.alive, now.cpus != then.cpus or (now.alive and not then.alive)
        ok = alive and not resized and then.alive
        log_rate = math.log(max(now.rate, 1e-12))
        self.resized, self.change, self.log_rate = resized, log_rate - self.log_rate if ok else 0.0, log_rate
        self.age = 0 if resized or not alive else self.age + 1
        self._learn_moves(then, now, ok)
        self.smooth = log_rate if self.age == 0 else self.smooth + SMOOTH * (log_rate - self.smooth)
        self._note(now.value, alive and not resized)
        is_low = self.age > 0 and self.smooth < max(self.score) - max(CLEARLY, CLEAR_NOISE * self.noise)
        self.low = self.low + 1 if is_low else 0

    def tried(self) -> tuple[list[float], list[float], list[float]]:
        """Return `work_elasticity`, `rate_elasticity` and `tried` of `Track`, by slot."""
        work = [min(max(of_work / (square + SPREAD), -1.0), 1.5) for square, of_work, _ in self.moves]
        rate = [min(max(of_rate / (square + SPREAD), -1.0), 1.0) for square, _, of_rate in self.moves]
        return work, rate, [min(math.sqrt(square), 2.0) for square, _, _ in self.moves]

    def _learn_moves(self, then: SimpleNamespace, now: SimpleNamespace, ok: bool) -> None:
        moves = [max(a, 1.0) - max(b, 1.0) if ok else 0.0 for a, b in zip(now.value, then.value, strict=True)]
        learned = [[FORGET_MOVES * a, FORGET_MOVES * b, FORGET_MOVES * c] for a, b, c in self.moves]
        self.last_move, self.moves = moves, learned
        for i, move in enumerate(moves):
            if move:
                far = math.log(max(now.value[i], 1.0) / max(then.value[i], 1.0))
                work = math.log(max(now.work_s[i], 1e-12) / max(then.work_s[i], 1e-12)) * now.workers[i]
                square, of_work, of_rate = learned[i]
                learned[i] = [square + far * far, of_work + far * work, of_rate + far * self.change]

    def _note(self, now: list[float], up: bool) -> None:
        """Add the measurement to the present allocation; put the one before away if it was among the best.

        Args:
            now: units, by slot.
            up: the pipeline was alive, with the same CPUs, all the time.
        """
        values, count, log_rate = self.value, self.count, self.log_rate
        mean = [m - AGING for m in self.mean]
        if not up:
            mean, count = [NOBODY - AGING] * len(mean), [0.0] * len(count)
        others = range(1, len(values))
        if moved := values[0] != now:
            score = self._scores(mean, count)
            worst = min(others, key=score.__getitem__)
            known = next((k for k in others if count[k] > 0.0 and values[k] == values[0]), None)
            if count[0] > 0.0 and (known is not None or score[0] > score[worst]):
                place = worst if known is None else known
                values[place], mean[place], count[place] = values[0], mean[0], count[0]
            again = next((k for k in others if count[k] > 0.0 and values[k] == now), None)
            mean[0], count[0] = (NOBODY, 0.0) if again is None else (mean[again], count[again])
            values[0] = now
        if up and not moved and count[0] > 1.0:
            difference = abs(log_rate - mean[0])
            self.noise = min(max(self.noise + 0.1 * (1.25 * difference - self.noise), LEAST_NOISE), MOST_NOISE)
        if up:
            # In the first decision of an allocation windows fill or drain: the second one nearly replaces it.
            gain = SECOND if count[0] == 1.0 else 1.0 / min(count[0] + 1.0, MOST_COUNT)
            mean[0] = log_rate if count[0] == 0.0 else mean[0] + gain * (log_rate - mean[0])
            count[0] += 1.0
        self.mean, self.count, self.score = mean, count, self._scores(mean, count)

    def _scores(self, mean: list[float], count: list[float]) -> list[float]:
        return [m - self.noise / math.sqrt(c) if c > 0.0 else NOBODY for m, c in zip(mean, count, strict=True)]
