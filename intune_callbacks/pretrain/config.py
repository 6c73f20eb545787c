"""PretrainConfig: everything that decides what `intune pretrain` learns, checked before the hours are spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from intune_callbacks.config import number_problem
from intune_callbacks.decide.learner import LearnerConfig
from intune_callbacks.errors import ConfigError
from intune_callbacks.pretrain.lessons import LessonsConfig

__all__ = ["PretrainConfig"]

# Smallest and largest value of what `intune pretrain` takes; whole numbers where the limits are.
LIMITS: Mapping[str, tuple[float, float]] = {
    "decisions": (1, 10**12),
    "minutes": (0.001, 1e6),
    "seed": (0, 2**31 - 1),
    "eval_static": (0, 100_000),
    "eval_resize": (0, 100_000),
    "eval_seed": (0, 2**31 - 1),
}
OF_THE_EVALUATION = ("eval_static", "eval_resize", "eval_seed")


@dataclass(frozen=True, slots=True)
class PretrainConfig:
    """How the agent is trained and tested; give either `decisions` or `minutes`.

    Args:
        seed: of the first weights, the machines, the random moves and the draws from the replay.
        decisions: length of the training, decisions of single machines; the same seed and number give the same weights.
        minutes: length of the training by the wall clock.
        explore: share of decisions with random moves at the start.
        explore_last: the same once it has fallen, in a straight line.
        explore_until: share of the training at which it has fallen.
        rate_last: learning rate at the end, as a share of the first; falls in a straight line.
        replay: most transitions remembered.
        replay_first: transitions remembered before the first update.
        learner: hyper-parameters of the learning.
        lessons: how episodes are made.
        eval_static, eval_resize: held-out machines the result is compared on, per scenario; 0 leaves it out.
        eval_seed: of those machines.

    Raises:
        ConfigError: with all problems at once.
    """

    seed: int = 0
    decisions: int | None = None
    minutes: float | None = None
    explore: float = 0.6
    explore_last: float = 0.05
    explore_until: float = 0.5
    rate_last: float = 0.03
    replay: int = 300_000
    replay_first: int = 5_000
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lessons: LessonsConfig = field(default_factory=LessonsConfig)
    eval_static: int = 128
    eval_resize: int = 64
    eval_seed: int = 5001

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> Iterable[str]:
        if (self.decisions is None) == (self.minutes is None):
            yield f"decisions={self.decisions!r}, minutes={self.minutes!r}: give one of them, and only one"
        for name, (low, high) in LIMITS.items():
            if (given := getattr(self, name)) is not None:
                problems = list(number_problem(name, given, low, high))
                if not problems and isinstance(low, int) and not isinstance(given, int):
                    problems = [f"{name}={given!r}: expected a whole number from {low} to {high}"]
                yield from problems

    def trained(self) -> dict[str, Any]:
        """Return what decides the weights, dotted name -> value; the held-out machines do not."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                found |= {f"{name}.{key}": inner for key, inner in value.items()}
            elif name not in OF_THE_EVALUATION:
                found[name] = value
        return found
