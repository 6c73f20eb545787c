"""The two scenarios policies are compared in, and how a run of a policy is scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from intune_callbacks.decide.view import Bools, Floats, View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.hostile import HostileEnv, draw
from intune_callbacks.pretrain.machines import Machines, sample

__all__ = ["SCENARIOS", "Controller", "Run", "Scenario", "first_reach", "make", "play"]


class Controller(Protocol):
    """Decides for N machines at once; called once per decision with what was measured."""

    def act(self, view: View) -> tuple[Floats, Floats | None]:
        """Return values and windows, both [N, SLOTS]; windows of None are twice the workers."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How long a run is and what happens to the machine.

    Args:
        decisions: length of a run.
        sizes: decision -> factor on the first number of CPUs.
        cpus: CPUs at the start; None draws them.
        every: decisions between two searches of the oracle.
        hostile: the machines stand against a tuner; the oracle knows nothing of it, and is out of reach.
    """

    decisions: int
    sizes: Mapping[int, float] = field(default_factory=dict)
    cpus: int | None = None
    every: int = 30
    hostile: bool = False


SCENARIOS = {
    "static": Scenario(300),
    "resize": Scenario(600, {121: 2.0, 241: 4.0, 361: 2.0, 481: 1.0}, cpus=32, every=40),
    "hostile": Scenario(300, hostile=True),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What a policy got on N machines, [decisions, N] each.

    Args:
        rate: batches per second delivered, cost of changes included.
        moved: some worker count changed.
        ran_out: machines that ran out of memory at least once, [N].
    """

    rate: Floats
    moved: Bools
    ran_out: Bools


def make(name: str, count: int, seed: int) -> Machines:
    """Return the machines of a scenario: `seed` decides them."""
    scenario = SCENARIOS[name]
    machines = sample(count, np.random.default_rng(seed), cpus=scenario.cpus)
    # Memory for the workers of the largest size the machine will have.
    scale = 0.4 if scenario.sizes else 1.0
    return replace(machines, worker_memory=machines.worker_memory * scale, item_memory=machines.item_memory * scale)


def _environment(machines: Machines, name: str, seed: int) -> Env:
    """Return the machines of a scenario as they begin to run; arguments as for `play`."""
    of, rng = SCENARIOS[name], np.random.default_rng(seed)
    if not of.hostile:
        return Env(machines, rng, of.sizes)
    return HostileEnv(machines, rng, of.sizes, hostile=draw(machines, np.random.default_rng([seed, 1])))


def play(controller: Controller, machines: Machines, name: str, seed: int) -> Run:
    """Run a controller through a scenario.

    Args:
        machines: from `make`.
        seed: of the environment; the oracle's `trace` needs the same.
    """
    scenario = SCENARIOS[name]
    env = _environment(machines, name, seed)
    shape = (scenario.decisions, len(machines))
    rate, moved = np.zeros(shape), np.zeros(shape, bool)
    for t in range(scenario.decisions):
        before = env.workers
        value, window = controller.act(env.view)
        env.step(value, window)
        rate[t] = env.rate
        moved[t] = (env.workers != before).any(1)
    return Run(rate, moved, env.ran_out > 0)


def first_reach(fraction: Floats, threshold: float) -> Floats:
    """Return the decisions until the mean of five fractions of the oracle reaches `threshold`, else infinity; [N]."""
    total = np.cumsum(np.vstack([np.zeros((1, fraction.shape[1])), fraction]), 0)
    reached = (total[5:] - total[:-5]) / 5 >= threshold
    return np.where(reached.any(0), reached.argmax(0) + 5, np.inf)
