"""Episodes the agent learns from: simulated machines in the shell, with long bursts and random moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from intune_callbacks.decide.learner import Replay
from intune_callbacks.decide.moves import MOVES, STAY, Moved
from intune_callbacks.decide.network import Values
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.decide.reward import utility
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import Bools, Floats
from intune_callbacks.pretrain.flow import memory
from intune_callbacks.pretrain.hostile import HostileEnv, draw
from intune_callbacks.pretrain.machines import BUFFER, SLOTS, Machines, sample

__all__ = ["Lessons", "LessonsConfig"]

WORST, SCALE = 1.0, 20.0
"""Largest change of log utility that counts, and reward per unit of it: 5 % more throughput earns 1."""


@dataclass(frozen=True, slots=True)
class LessonsConfig:
    """How episodes are made.

    Args:
        machines: side by side.
        decisions: length of an episode.
        discount: of the reward per decision.
        steps: n of the n-step return.
        labelled: machines per decision for which the worth of every single move is worked out, a dense lesson beside
            the sampled one.
        cost_share: share of a change's cost that is charged: it is paid once, what it gains stays.
        fresh_share: machines that begin their burst from a random allocation, without jumps.
        resized_share: machines resized once under way.
        hostile_share: machines that stand against a tuner, see `hostile`.
        harm: share of what an allocation gives less than the best one so far, the start included, that is charged in
            every decision.
    """

    machines: int = 256
    decisions: int = 56
    discount: float = 0.5
    steps: int = 2
    labelled: int = 128
    cost_share: float = 0.2
    fresh_share: float = 0.25
    resized_share: float = 0.3
    hostile_share: float = 0.25
    harm: float = 0.25


class Lessons:
    """Endless decisions of simulated machines, with what each was worth.

    Args:
        values: the network that is learning, called anew at every decision.
        draw: machines of an episode.
    """

    def __init__(
        self,
        values: Values,
        config: LessonsConfig,
        rng: np.random.Generator,
        draw: Callable[[int, np.random.Generator], Machines] = sample,
    ) -> None:
        self.values, self.config, self.rng, self.draw = values, config, rng, draw
        self.explore = 1.0
        self._begin()

    def _begin(self) -> None:
        c, rng = self.config, self.rng
        machines = self.draw(c.machines, rng)
        scale = np.where(rng.random(c.machines) < 0.5, 1.0, 0.4)[:, None]
        machines = replace(machines, worker_memory=machines.worker_memory * scale)
        resized = rng.random(c.machines) < c.resized_share
        factor = np.where(resized, rng.choice([0.5, 2.0, 4.0], c.machines), 1.0)
        factor = np.where(machines.cpus * factor < 2.0 * machines.stages, 1.0, factor)
        when = int(rng.integers(15, c.decisions - 15))
        hostile = draw(machines, rng, c.hostile_share)
        self.env = HostileEnv(machines, rng, {when: factor}, hostile=hostile, mixed=True)
        # Lessons are long bursts: when to stop, or to jump in their middle, is the shell's business, not the network's.
        jumps = tuple(sorted(rng.choice([2, 3, 4, 5, 6], int(rng.integers(1, 4)), replace=False).tolist()))
        config = ShellConfig(jumps=jumps, burst=10**6, patience=10**6, gate=-np.inf, review=10**7)
        self.shell = Shell(self._explored, config, quanta=1)
        self._fresh = rng.random(c.machines) < c.fresh_share
        self._past: deque[tuple[Moved, Floats, Bools, Floats]] = deque()
        self._worth = self._utility(self.env.steady_rate)
        self._best = self._worth
        self._left = c.decisions

    def _utility(self, rate: Floats) -> Floats:
        used = (self.env.workers * self.env.machines.share).sum(1) / self.env.cpus
        return utility(rate, self.env.view.memory, used)

    def step(self, replay: Replay) -> None:
        """Run one decision of all machines."""
        c, env = self.config, self.env
        if self.shell.track is not None and self.shell.track.decisions == 0:
            self.shell.track.age[self._fresh] = 100
        value, window = self.shell.act(env.view)
        moved = self.shell.moved
        gains = self._gains() if moved is not None else np.zeros(0)
        cpus = env.cpus
        env.step(value, window)
        reward, usable = self._reward((env.cpus == cpus) & env.view.alive & ~env.shaken)
        if moved is None:
            self._past.clear()
        else:
            self._past.append((moved, reward, usable, gains))
            if len(self._past) > c.steps:
                self._remember(replay)
        self._left -= 1
        if self._left <= 0:
            self._begin()

    def _explored(self, slots: Floats, pipeline: Floats, mask: Bools) -> Floats:
        """What the network says, but random values in some slots of a share `explore` of the decisions."""
        q, rng = self.values(slots, pipeline, mask).astype(float), self.rng
        if self.explore > 0.0:
            some = (rng.random(len(q)) < self.explore)[:, None] & (rng.random(q.shape[:2]) < 0.35)
            q = np.where(some[..., None], rng.normal(0.0, 10.0, q.shape), q)
        return q

    def _gains(self) -> Floats:
        """The true gain in utility of each single move at the present state, [N, S, 5]; NaN for most machines.

        A move made now instead of one decision later is worth (1 - discount) of what it gains.
        """
        c, env = self.config, self.env
        gains = np.full((*env.view.mask.shape, 5), np.nan, np.float32)
        if not c.labelled:
            return gains
        rows = self.rng.choice(len(env), c.labelled, replace=False)
        m = env.machines.take(rows)
        moves = np.array([(slot, move) for slot in range(SLOTS) for move in range(5)])
        step = np.zeros((len(moves), SLOTS))
        step[np.arange(len(moves)), moves[:, 0]] = MOVES[moves[:, 1]]
        workers = np.maximum(env.workers[rows][:, None] + step[None, :, :BUFFER], 1.0)
        ratio = env.windows[rows] / np.maximum(env.workers[rows], 1.0)
        windows, buffer = workers * ratio[:, None], np.maximum(env.buffer[rows][:, None] + step[None, :, BUFFER], 1.0)
        cpus = env.cpus[rows]
        rate = env.delivered(workers, windows, buffer, rows).rate
        used = np.where(m.mask[:, None], workers * m.share[:, None], 0.0).sum(-1) / cpus[:, None]
        full = memory(m, env.base[rows], workers, windows, buffer, 0.7)
        worth = utility(rate, full, used).reshape(len(rows), SLOTS, 5)
        gain = np.clip(worth - worth[..., STAY, None], -WORST, WORST)
        gains[rows] = SCALE * (1.0 - c.discount) * gain
        return gains

    def _reward(self, usable: Bools) -> tuple[Floats, Bools]:
        """The true change of the log utility, its cost included, free of measurement noise."""
        now, steady = self._utility(self.env.rate), self._utility(self.env.steady_rate)
        paid = steady - self.config.cost_share * (steady - now)
        change = np.clip(paid - self._worth, -WORST, WORST)
        self._best = np.maximum(np.where(usable, self._best, -np.inf), steady)
        self._worth = steady
        reward = SCALE * (change - self.config.harm * np.clip(self._best - steady, 0.0, WORST))
        out = ~self.env.view.alive
        return np.where(out, -SCALE, reward), usable | out

    def _remember(self, replay: Replay) -> None:
        c = self.config
        first, last = self._past[0][0], self._past[c.steps][0]
        steps = [self._past[k] for k in range(c.steps)]
        total = sum(c.discount**k * step[1] for k, step in enumerate(steps))
        rows = first.followed & np.logical_and.reduce([step[2] for step in steps])
        replay.add(first, last, np.asarray(total), c.discount**c.steps, rows, self._past[0][3])
        self._past.popleft()
