"""PretrainConfig: everything that decides what `intune pretrain` learns, checked before the hours are spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from intune_callbacks.config import number_problem
from intune_callbacks.decide.learner import LearnerConfig
from intune_callbacks.errors import ConfigError
from intune_callbacks.pretrain.lessons import LessonsConfig

__all__ = ["PretrainConfig"]

MOST = 2**31 - 1
# Smallest and largest value; whole numbers where the limits are.
LIMITS: Mapping[str, tuple[float, float]] = {
    "seed": (0, MOST),
    "explore": (0.0, 1.0),
    "explore_last": (0.0, 1.0),
    "explore_until": (0.01, 1.0),
    "rate_last": (0.0, 1.0),
    "replay": (2, MOST),
    "replay_first": (1, MOST),
    "eval_static": (0, 100_000),
    "eval_resize": (0, 100_000),
    "eval_seed": (0, MOST),
    "learner.hidden": (1, 4096),
    "learner.rate": (1e-8, 1.0),
    "learner.batch": (1, 1_000_000),
    "learner.follow": (0.0, 1.0),
    "learner.clip": (1e-6, 1e6),
    "learner.teach": (0.0, 1e6),
    "learner.anchor": (0.0, 1.0),
    "lessons.machines": (1, 100_000),
    # A resize comes at least 15 decisions after the start and before the end.
    "lessons.decisions": (31, 100_000),
    "lessons.discount": (0.0, 1.0),
    "lessons.steps": (1, 1000),
    "lessons.labelled": (0, 100_000),
    "lessons.cost_share": (0.0, 1.0),
    "lessons.best_share": (0.0, 1.0),
    "lessons.fresh_share": (0.0, 1.0),
    "lessons.resized_share": (0.0, 1.0),
    "lessons.hostile_share": (0.0, 1.0),
    "lessons.harm": (0.0, 1.0),
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
        if self.decisions is not None:
            yield from _number("decisions", self.decisions, 1, 10**12)
        if self.minutes is not None:
            yield from _number("minutes", self.minutes, 0.001, 1e6)
        wrong = {name: list(_number(name, attrgetter(name)(self), *limits)) for name, limits in LIMITS.items()}
        for found in wrong.values():
            yield from found
        if not wrong["replay"] and not wrong["replay_first"] and self.replay <= self.replay_first:
            yield f"replay={self.replay}: expected more than replay_first={self.replay_first}, or nothing is learned"
        lessons = self.lessons
        if not wrong["lessons.steps"] and not wrong["lessons.decisions"] and lessons.steps >= lessons.decisions:
            yield f"lessons.steps={lessons.steps}: expected fewer than lessons.decisions={lessons.decisions}"
        if not wrong["lessons.labelled"] and not wrong["lessons.machines"] and lessons.labelled > lessons.machines:
            yield f"lessons.labelled={lessons.labelled}: expected no more than lessons.machines={lessons.machines}"

    def trained(self) -> dict[str, Any]:
        """Return what decides the weights, dotted name -> value; the held-out machines do not."""
        values = {name: value for name, value in asdict(self).items() if name not in OF_THE_EVALUATION}
        return {
            dotted: value
            for name, given in values.items()
            for dotted, value in (
                {f"{name}.{key}": inner for key, inner in given.items()} if isinstance(given, dict) else {name: given}
            ).items()
        }


def _number(name: str, given: object, low: float, high: float) -> Iterable[str]:
    problems = list(number_problem(name, given, low, high))
    if not problems and isinstance(low, int) and not isinstance(given, int):
        problems = [f"{name}={given!r}: expected a whole number from {low} to {high}"]
    yield from problems
