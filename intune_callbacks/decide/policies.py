"""The policies by name, and the simplest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from intune_callbacks.config import POLICIES, choice_problem
from intune_callbacks.decide.dqn import Dqn, ModelJump
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.errors import ConfigError
from intune_callbacks.types import Allocation, Observation, Policy, Proposal

__all__ = ["EvenSplit", "make_policy", "with_windows"]


class EvenSplit:
    """Gives every worker stage the same number of CPUs and twice as wide a window; follows the machine's size."""

    name = "even"

    def __init__(self) -> None:
        self._failed: Allocation = {}

    def decide(self, observation: Observation) -> Proposal:
        """Return the even split where it differs from what is there."""
        stages = [stage for stage in observation.stages if stage.kind != "memory"]
        cpus = observation.resources.cpus + observation.resources.remote_cpus
        each = max(1, int(cpus / max(1, len(stages))))
        wanted = {stage.name: min(max(each, stage.low), stage.high) for stage in stages}
        wanted = with_windows(wanted, observation)
        if wanted and wanted.items() <= self._failed.items():
            return Proposal(reason="the even split was tried and gave less", settled=True)
        reason = f"{cpus:g} CPUs over {len(stages)} stages"
        return Proposal(wanted, reason, settled=wanted.items() <= observation.allocation.items())

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        """Do not ask for `failed` again."""
        self._failed = failed

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: this policy has no memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing back."""


def make_policy(name: str, *, fine_tune: bool = False, memory_limit: float = 0.90) -> Policy:
    """Return a new policy.

    Args:
        name: one of `intune_callbacks.config.POLICIES`.
        fine_tune: let the policy ``dqn`` go on learning.
        memory_limit: share of the memory ``dqn`` and ``model-jump`` plan with, 0..1; the guard holds ``even`` to it.

    Raises:
        ConfigError: for a name that does not exist.
        MissingPackage: for `fine_tune` without PyTorch.
    """
    config = ShellConfig(memory_limit=memory_limit)
    makers: dict[str, Callable[[], Policy]] = {
        Dqn.name: lambda: Dqn(config=config, fine_tune=fine_tune),
        ModelJump.name: lambda: ModelJump(config),
        EvenSplit.name: EvenSplit,
    }
    if name not in makers:
        raise ConfigError(list(choice_problem("policy", name, POLICIES)))
    return makers[name]()


def with_windows(workers: Allocation, observation: Observation) -> Allocation:
    """Add windows twice as wide as the workers, so that one slow item does not stop the others."""
    windows = {
        stage.name: min(max(2 * workers[stage.window_of], stage.low), stage.high)
        for stage in observation.stages
        if stage.window_of in workers
    }
    return workers | windows
