"""Training of the paper-literal agent in PyTorch: offline in the simulator, then online on the job (section 4.2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.policies.literal import (
    FACTORS,
    LiteralDQN,
    LiteralNetwork,
    Seen,
    allowed,
    draw_constants,
    look,
    moves_of,
    reward,
)
from intune_callbacks.decide.moves import MOVES
from intune_callbacks.decide.network import PARAMETERS
from intune_callbacks.decide.view import Floats, Ints, View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.machines import Machines, sample

__all__ = ["LiteralConfig", "LiteralLearner", "TunedLiteralDQN", "pretrain"]

Draw = Callable[[int, np.random.Generator], Machines]
"""(count, rng) -> machines of an episode, all with the same number of stages."""


@dataclass(frozen=True, slots=True)
class LiteralConfig:
    """What the paper leaves open.

    Args:
        hidden: width of both hidden layers.
        discount: per decision.
        rate: first learning rate of Adam; falls to a tenth.
        batch: transitions per update.
        follow: share the target network moves to the online one per update.
        capacity: transitions kept.
        double: let the online network choose the next action and the target network value it.
        machines: side by side.
        decisions: length of an episode.
        resized: share of machines whose CPUs change half-way through an episode.
        explore: share of random joint actions at the end; it starts at 1 and falls over the first half.
    """

    hidden: int = 64
    discount: float = 0.6
    rate: float = 1e-3
    batch: int = 256
    follow: float = 0.005
    capacity: int = 100_000
    double: bool = True
    machines: int = 128
    decisions: int = 64
    resized: float = 0.3
    explore: float = 0.05


class LiteralLearner:
    """Deep Q-learning of one network.

    Args:
        r: slots.
        config: see there.
        seed: of weights and of the drawing of transitions.
        start: weights to begin with; drawn if None.
    """

    def __init__(self, r: int, config: LiteralConfig, seed: int, start: LiteralNetwork | None = None) -> None:
        self.r, self.config, self.seed, self.rng = r, config, seed, np.random.default_rng(seed)
        hidden = config.hidden if start is None else start.w1.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(len(FACTORS), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.head = nn.Linear(hidden, len(MOVES) ** r)
        if start is not None:
            with torch.no_grad():
                for p, name in zip(self._parameters(), PARAMETERS, strict=True):
                    p.copy_(torch.from_numpy(getattr(start, name).T.copy()))
        self.slow_body, self.slow_head = copy.deepcopy(self.body), copy.deepcopy(self.head)
        self.optimizer = torch.optim.Adam(self._parameters(), lr=config.rate)
        self.updates, self.decisions, self._at = 0, 0, 0
        self.kept: dict[str, Any] = {}

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.body.parameters(), *self.head.parameters()]

    def _slow_parameters(self) -> list[nn.Parameter]:
        return [*self.slow_body.parameters(), *self.slow_head.parameters()]

    def values(self, state: Any) -> torch.Tensor:
        """Return the value of every joint action, [n, 5^r]."""
        with torch.no_grad():
            found: torch.Tensor = self.head(self.body(torch.from_numpy(state)))
        return found

    def choose(self, seen: Seen, explore: float) -> Ints:
        """Return an allowed joint action of each machine, [n]: the best, or a random one with probability `explore`."""
        ok = allowed(seen.legal, seen.weight, seen.free_cpus)
        value = self.values(seen.state).numpy()
        chance = self.rng.random(len(value)) < explore
        value[chance] = self.rng.random((int(chance.sum()), value.shape[1]), dtype=np.float32)
        return np.asarray(np.where(ok, value, -np.inf).argmax(1))

    def remember(self, seen: Seen, actions: Ints, rewards: Floats, then: Seen) -> None:
        """Keep what n machines saw, did, earned and saw next; the oldest are forgotten."""
        new: dict[str, Any] = {"state": seen.state, "action": actions, "reward": rewards.astype(np.float32)}
        new |= {"next": then.state, "legal": then.legal, "weight": then.weight, "free_cpus": then.free_cpus}
        size = self.config.capacity
        if not self.kept:
            self.kept = {name: np.zeros((size, *a.shape[1:]), a.dtype) for name, a in new.items()}
        at = (self._at + np.arange(len(actions))) % size
        for name, a in new.items():
            self.kept[name][at] = a
        self._at += len(actions)
        self.decisions += len(actions)

    def update(self, batch: int, rate: float) -> float:
        """Make one step with the learning rate `rate` and return the loss (Huber)."""
        c = self.config
        rows = self.rng.integers(0, min(self._at, c.capacity), batch)
        b = {name: a[rows] for name, a in self.kept.items()}
        with torch.no_grad():
            after = self.slow_body(torch.from_numpy(b["next"]))
            chosen = self.values(b["next"]) if c.double else self.slow_head(after)
            ok = torch.from_numpy(allowed(b["legal"], b["weight"], b["free_cpus"]))
            best = chosen.where(ok, -torch.inf).argmax(1)
            # Rewards are scaled so that values have the size of rewards, whatever the discount.
            wanted = (1.0 - c.discount) * torch.from_numpy(b["reward"])
            wanted += c.discount * ((after * self.slow_head.weight[best]).sum(1) + self.slow_head.bias[best])
        action = torch.from_numpy(b["action"])
        # Only the outputs of the actions taken are needed: the head is by far the largest layer.
        got = (self.body(torch.from_numpy(b["state"])) * self.head.weight[action]).sum(1) + self.head.bias[action]
        loss = nn.functional.smooth_l1_loss(got, wanted)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters(), 5.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self._slow_parameters(), self._parameters(), strict=True):
                slow.lerp_(fast, c.follow)
        self.updates += 1
        return float(loss.detach())

    def network(self) -> LiteralNetwork:
        """Return a copy of the target network, the average of the last weights, for numpy."""
        arrays: dict[str, Any] = {
            name: p.detach().numpy().T.copy() for name, p in zip(PARAMETERS, self._slow_parameters(), strict=True)
        }
        return LiteralNetwork(**arrays, seed=self.seed, updates=self.updates, decisions=self.decisions)


def pretrain(
    r: int, seed: int, updates: int, config: LiteralConfig | None = None, draw: Draw | None = None
) -> LiteralNetwork:
    """Return a network trained offline from the even split (section 4.2); the same arguments give the same weights.

    Args:
        r: worker stages and the buffer, 3..5.
        seed: of everything.
        updates: steps of the optimizer; one per decision of all machines, after the first 20.
        config: see there.
        draw: machines of an episode; by default `sample` with r - 1 stages.

    Raises:
        ValueError: when r is not 3, 4 or 5.
    """
    if r not in (3, 4, 5):
        raise ValueError(f"r is {r}, expected 3, 4 or 5: a head of 5^r outputs is too large beyond")
    c, rng = config or LiteralConfig(), np.random.default_rng([seed, r])
    learner = LiteralLearner(r, c, seed)
    rows, turn = np.arange(c.machines), 0
    while learner.updates < updates:
        machines = draw(c.machines, rng) if draw else sample(c.machines, rng, stages=r - 1)
        factor = np.where(rng.random(c.machines) < c.resized, rng.choice([0.5, 2.0, 4.0], c.machines), 1.0)
        env, constants = Env(machines, rng, {c.decisions // 2: factor}), draw_constants(c.machines, rng)
        start, seen = env.view.rate, look(env.view, rows, r, constants)
        for _ in range(c.decisions):
            done = learner.updates / updates
            actions = learner.choose(seen, max(c.explore, 1.0 - 2.0 * done))
            view = env.step(_moved(env.view, actions, r))
            then = look(view, rows, r, constants)
            learner.remember(seen, actions, reward(view, start), then)
            seen, turn = then, turn + 1
            if turn > 20 and learner.updates < updates:
                learner.update(c.batch, c.rate * max(0.1, 1.0 - done))
    return learner.network()


def _moved(view: View, actions: Ints, r: int) -> Floats:
    value, moves = view.value.copy(), moves_of(actions, r)
    value[:, : r - 1] += moves[:, :-1]
    value[:, -1] += moves[:, -1]
    return value


class TunedLiteralDQN(LiteralDQN):
    """The same agent tuned online: one copy per r learns from all machines of that r; with one machine, from that job.

    Args:
        networks: r -> network trained offline; copies are tuned.
        seed: of exploration and of the machines' constants.
        explore: share of random joint actions.
        rate: learning rate.
        batch: transitions per update, one update per decision.
    """

    def __init__(
        self,
        networks: Mapping[int, LiteralNetwork],
        seed: int = 0,
        *,
        explore: float = 0.02,
        rate: float = 2e-4,
        batch: int = 64,
    ) -> None:
        super().__init__(networks, seed)
        self._explore, self._rate, self._batch = explore, rate, batch
        config = LiteralConfig(capacity=5000, follow=0.01)
        self._learners = {r: LiteralLearner(r, config, seed, network) for r, network in self.networks.items()}
        self._before: dict[int, tuple[Seen, Ints]] = {}

    def choose(self, r: int, rows: Ints, seen: Seen, view: View) -> Ints:
        """Learn from what the last actions brought, then return the next ones, [n]."""
        learner = self._learners[r]
        if r in self._before and self.start is not None:
            learner.remember(*self._before[r], reward(view, self.start)[rows], seen)
            learner.update(self._batch, self._rate)
        actions = learner.choose(seen, self._explore)
        self._before[r] = seen, actions
        return actions
