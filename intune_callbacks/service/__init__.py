"""The agent of many trainings in a process of its own, asked over the network."""

from __future__ import annotations

from intune_callbacks.config import TunerConfig, is_address
from intune_callbacks.decide.policies import make_policy
from intune_callbacks.types import Policy

__all__ = ["policy_of"]


def policy_of(config: TunerConfig) -> Policy:
    """Return a new policy, here or behind the address that `config` names."""
    limit = config.memory_soft_limit
    if not is_address(config.policy):
        return make_policy(config.policy, fine_tune=config.fine_tune, memory_limit=limit)
    from intune_callbacks.service.client import Agent, RemotePolicy

    return RemotePolicy(Agent(config.policy), make_policy("dqn", memory_limit=limit), limit)
