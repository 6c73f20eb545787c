"""A training of the agent that is over in no time, and its networks compared."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from intune_callbacks.decide.learner import LearnerConfig  # noqa: E402
from intune_callbacks.decide.network import Network  # noqa: E402
from intune_callbacks.pretrain.lessons import LessonsConfig  # noqa: E402
from intune_callbacks.pretrain.training import PretrainConfig  # noqa: E402

TINY = PretrainConfig(
    seed=3,
    decisions=40 * 16,
    replay=500,
    replay_first=100,
    learner=LearnerConfig(hidden=8, batch=16),
    lessons=LessonsConfig(machines=16, decisions=31, labelled=4, fresh_share=1.0, resized_share=0.0),
    eval_static=0,
    eval_resize=0,
)


def weights(network: Network) -> dict[str, Any]:
    return {name: getattr(network, name) for name in ("w1", "b1", "w2", "b2", "w3", "b3")}


def same(one: Network, other: Network) -> bool:
    return all((a == b).all() for a, b in zip(weights(one).values(), weights(other).values(), strict=True))
