"""Double DQN with n-step returns, in PyTorch; inference elsewhere needs numpy only."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT
from intune_callbacks.decide.moves import STAY, Moved, best_moves
from intune_callbacks.decide.network import PARAMETERS, Network
from intune_callbacks.decide.view import Bools, Floats

__all__ = ["Learner", "LearnerConfig", "Replay", "SharedQ"]


class SharedQ(nn.Module):
    """The network of `Network`, in PyTorch."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.one = nn.Linear(len(OF_SLOT) + len(OF_PIPELINE), hidden)
        self.two = nn.Linear(3 * hidden, hidden)
        self.three = nn.Linear(hidden, 5)
        nn.init.uniform_(self.three.weight, -0.01, 0.01)
        nn.init.zeros_(self.three.bias)

    def forward(self, slots: torch.Tensor, pipeline: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the value of every move, [N, S, 5]; arguments as for `Network`."""
        f = slots.shape[2]
        weight, here = self.one.weight, mask[..., None].to(slots.dtype)
        h = slots @ weight[:, :f].T + (pipeline @ weight[:, f:].T + self.one.bias)[:, None]
        h = torch.relu(h) * here
        mean = h.sum(1) / here.sum(1).clamp(min=1.0)
        size = h.shape[-1]
        two = self.two.weight
        context = mean @ two[:, size : 2 * size].T + h.amax(1) @ two[:, 2 * size :].T + self.two.bias
        h = torch.relu(h @ two[:, :size].T + context[:, None])
        result: torch.Tensor = self.three(h)
        return result

    def network(self) -> Network:
        """Return a copy for numpy."""
        arrays = [
            part.detach().numpy().T.copy() if part.ndim == 2 else part.detach().numpy().copy()
            for layer in (self.one, self.two, self.three)
            for part in (layer.weight, layer.bias)
        ]
        return Network.of(dict(zip(PARAMETERS, arrays, strict=True)))

    def take(self, network: Network) -> None:
        """Take over the weights of `network`."""
        with torch.no_grad():
            for layer, w, b in ((self.one, "w1", "b1"), (self.two, "w2", "b2"), (self.three, "w3", "b3")):
                layer.weight.copy_(torch.from_numpy(getattr(network, w).T.copy()))
                layer.bias.copy_(torch.from_numpy(getattr(network, b).copy()))


class Replay:
    """The last transitions, drawn from uniformly."""

    def __init__(self, capacity: int, slots: int) -> None:
        s, f, g = slots, len(OF_SLOT), len(OF_PIPELINE)
        self.capacity, self.slots, self.size, self._next = capacity, slots, 0, 0
        self.arrays: dict[str, Any] = {
            "slots": np.zeros((capacity, s, f), np.float32),
            "pipeline": np.zeros((capacity, g), np.float32),
            "mask": np.zeros((capacity, s), bool),
            "moves": np.zeros((capacity, s), np.int8),
            "reward": np.zeros(capacity, np.float32),
            "discount": np.zeros(capacity, np.float32),
            "gains": np.zeros((capacity, s, 5), np.float32),
            "next_slots": np.zeros((capacity, s, f), np.float32),
            "next_pipeline": np.zeros((capacity, g), np.float32),
            "next_legal": np.zeros((capacity, s, 5), bool),
            "next_weight": np.zeros((capacity, s), np.float32),
            "next_free_cpus": np.zeros(capacity, np.float32),
        }

    def add(
        self, before: Moved, after: Moved, reward: Floats, discount: float, rows: Bools, gains: Floats | None = None
    ) -> None:
        """Keep the transitions of `rows`.

        Args:
            before, after: first and last decision of the n steps.
            reward: discounted sum over them, [N].
            discount: of the value that follows.
            rows: pipelines whose transition counts, [N].
            gains: what every single move would have gained, [N, S, 5]; NaN where that is not known.
        """
        new = {
            "slots": before.slots,
            "pipeline": before.pipeline,
            "mask": before.mask,
            "moves": before.moves,
            "reward": reward,
            "discount": np.full(len(reward), discount),
            "gains": np.full((*before.mask.shape, 5), np.nan) if gains is None else gains,
            "next_slots": after.slots,
            "next_pipeline": after.pipeline,
            "next_legal": after.legal,
            "next_weight": np.where(after.mask, after.weight, 0.0),
            "next_free_cpus": after.free_cpus,
        }
        count = int(rows.sum())
        places = (self._next + np.arange(count)) % self.capacity
        for name, values in new.items():
            self.arrays[name][places] = values[rows]
        self._next = (self._next + count) % self.capacity
        self.size = min(self.capacity, self.size + count)

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, Any]:
        """Return `count` transitions as arrays."""
        places = rng.integers(0, self.size, count)
        return {name: values[places] for name, values in self.arrays.items()}


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Hyper-parameters.

    Args:
        hidden: width of the network.
        rate: learning rate of Adam.
        batch: transitions per update.
        follow: share of the online weights the target network takes over per update.
        clip: largest norm of the gradient.
        teach: weight of the known gains of single moves, where a transition has them.
        anchor: pull of the weights towards those the learner started with, per update.
    """

    hidden: int = 64
    rate: float = 2e-3
    batch: int = 512
    follow: float = 0.01
    clip: float = 5.0
    teach: float = 3.0
    anchor: float = 0.0


class Learner:
    """Fits the Q network to transitions.

    Args:
        seed: of the first weights.
        start: weights to start with.
    """

    def __init__(self, config: LearnerConfig | None = None, seed: int = 0, start: Network | None = None) -> None:
        self.config = config or LearnerConfig()
        # The program's own random state stays as it is.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.online = SharedQ(self.config.hidden if start is None else start.w1.shape[1])
        if start is not None:
            self.online.take(start)
        self.target = copy.deepcopy(self.online)
        self._home = [p.detach().clone() for p in self.online.parameters()]
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=self.config.rate)

    def targets(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return ``reward + discount * Q(next state, best next moves)``, [B]; Q is the mean over the slots."""
        mask, slots = torch.from_numpy(batch["mask"]), torch.from_numpy(batch["next_slots"])
        pipeline = torch.from_numpy(batch["next_pipeline"])
        with torch.no_grad():
            valued = self.target(slots, pipeline, mask)
            # Double DQN (van Hasselt et al., 2016): chosen by the online network, valued by the target network.
            chosen = self.online(slots, pipeline, mask)
            legal, weight, free = batch["next_legal"], batch["next_weight"], batch["next_free_cpus"]
            moves = best_moves(chosen.numpy().astype(float), legal, weight, free, quanta=1)
            following = _mean(valued, torch.from_numpy(moves), mask)
            return torch.from_numpy(batch["reward"]) + torch.from_numpy(batch["discount"]) * following

    def update(self, batch: dict[str, Any], rate: float | None = None) -> float:
        """Make one step on what `Replay.sample` gave, and return the loss (Huber)."""
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        wanted = self.targets(batch)
        mask = torch.from_numpy(batch["mask"])
        values = self.online(torch.from_numpy(batch["slots"]), torch.from_numpy(batch["pipeline"]), mask)
        got = _mean(values, torch.from_numpy(batch["moves"].astype(np.int64)), mask)
        loss = nn.functional.smooth_l1_loss(got, wanted)
        if self.config.teach:
            loss = loss + self.config.teach * _taught_loss(values, torch.from_numpy(batch["gains"]), mask)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), self.config.clip)
        self.optimizer.step()
        with torch.no_grad():
            for mine, home in zip(self.online.parameters(), self._home, strict=True):
                if self.config.anchor:
                    mine.lerp_(home, self.config.anchor)
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, self.config.follow)
        return float(loss.detach())


def _mean(values: torch.Tensor, moves: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    here = mask.to(values.dtype)
    return (values.gather(-1, moves[..., None])[..., 0] * here).sum(1) / here.sum(1).clamp(min=1.0)


def _taught_loss(values: torch.Tensor, gains: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Huber loss between the advantage of every single move and its known gain, where it is known."""
    slots = mask.sum(1).clamp(min=1)[:, None, None]
    advantage = (values - values[..., STAY, None]) / slots
    known = mask[..., None] & ~torch.isnan(gains)
    wrong = nn.functional.smooth_l1_loss(advantage, torch.nan_to_num(gains), reduction="none")
    return (wrong * known).sum() / known.sum().clamp(min=1)
