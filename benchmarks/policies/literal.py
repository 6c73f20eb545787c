"""The agent exactly as the InTune paper describes it (sections 4.1 to 4.3), kept as a baseline and for the record.

It sees the six factors of the paper's table and nothing of single stages, and chooses one of the 5^r combinations of
-5, -1, 0, +1, +5 for r slots: the worker stages and the prefetch buffer. As in the paper there is one three-layer
network per r. They exist for r = 3, 4, 5; beyond, the head is too large to learn or to ship: 15625 outputs and 1.0
million weights at r = 6, 78125 outputs and 5.1 million at r = 7. Those machines keep the even split the paper starts
from. What the paper leaves open, or means for real machines, is chosen here: the prefetch buffer counts batches, not
megabytes; memory is a share of the limit, not bytes; DRAM bandwidth and clock are constants drawn per machine, and no
simulated stage depends on them. Actions over the CPU cap or under the floor are masked; memory is left to the reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from intune_callbacks.decide.moves import MOVES, STAY
from intune_callbacks.decide.network import PARAMETERS
from intune_callbacks.decide.view import Bools, Floats, Ints, View
from intune_callbacks.pretrain.machines import BUFFER, log_uniform

__all__ = ["FACTORS", "LiteralDQN", "LiteralNetwork", "Seen", "allowed", "draw_constants", "look", "moves_of", "reward"]

FACTORS = (
    "pipeline latency, ln(seconds per batch) / 3",
    "free CPUs, arsinh / 3",
    "free memory, share of the limit x 2",
    "model latency, ln(seconds per batch) / 3",
    "DRAM-CPU bandwidth, ln(MB/s / 100000)",
    "CPU clock, GHz - 3",
)
"""The state: the paper's table of factors (section 4.1), scaled."""
_BANDWIDTH_MB_S, _CLOCK_GHZ = (20_000.0, 300_000.0), (2.2, 3.8)
_LATENCY_S = (1e-4, 1e2)
_TRAINING = ("seed", "updates", "decisions")
Weights = NDArray[np.float32]


def draw_constants(count: int, rng: np.random.Generator) -> Floats:
    """Return DRAM bandwidth (MB/s) and CPU clock (GHz) of `count` machines, [count, 2]."""
    return np.stack([log_uniform(rng, *_BANDWIDTH_MB_S, count), rng.uniform(*_CLOCK_GHZ, count)], 1)


def reward(view: View, start: Floats) -> Floats:
    """Return the paper's reward, throughput x (1 - memory share) (section 4.1, equation 1), [N].

    The throughput is relative to the start, so that machines of any speed can share a network. It is 0 at full memory
    and for a pipeline that ran out of it.

    Args:
        view: after the action.
        start: batches per second at the start, [N].
    """
    worth = view.rate / np.maximum(start, 1e-12) * np.clip(1.0 - view.memory, 0.0, 1.0)
    return np.where(view.alive, worth, 0.0)


@dataclass(frozen=True, slots=True)
class Seen:
    """One decision of n machines with the same r.

    Args:
        state: the six factors, [n, 6].
        legal: moves a slot may make on its own, [n, r, 5].
        weight: CPUs per unit, 0 for the buffer, [n, r].
        free_cpus: CPUs that may be added, [n].
    """

    state: Weights
    legal: Bools
    weight: Floats
    free_cpus: Floats


def look(view: View, rows: Ints, r: int, constants: Floats) -> Seen:
    """Return what the agent sees of machines with r slots.

    Args:
        view: N machines of the simulator.
        rows: the machines, [n].
        r: worker stages and the buffer.
        constants: DRAM bandwidth in MB/s and clock in GHz, [N, 2].
    """
    at = np.ix_(rows, _columns(r))
    weight, value = np.where(view.is_buffer[at], 0.0, view.weight[at]), view.value[at]
    after = value[..., None] + MOVES
    legal = (after >= view.low[at][..., None]) & (after <= view.high[at][..., None]) & view.mask[at][..., None]
    legal[..., STAY] = True
    free_cpus = view.budget[rows] - (value * weight).sum(1)
    latency_s, model_s = (np.clip(1.0 / np.maximum(a[rows], 1e-12), *_LATENCY_S) for a in (view.rate, view.demand))
    bandwidth, clock = constants[rows].T
    free = 2.0 * (1.0 - view.memory[rows])
    times = np.log(latency_s) / 3.0, np.log(model_s) / 3.0
    factors = (times[0], np.arcsinh(free_cpus) / 3.0, free, times[1], np.log(bandwidth / 1e5), clock - 3.0)
    return Seen(np.stack(factors, 1).astype(np.float32), legal, weight, free_cpus)


def allowed(legal: Bools, weight: Floats, free_cpus: Floats) -> Bools:
    """Return the joint actions that keep every slot in its range and all together in the CPU cap, [n, 5^r].

    Where the cap is exceeded already, because the machine shrank, only the actions that give most CPUs back are left.

    Args:
        legal, weight, free_cpus: as in `Seen`.
    """
    spent = np.zeros((len(legal), 1))
    alone = np.where(legal, weight[..., None] * MOVES, np.inf)
    for i in range(legal.shape[1]):
        spent = (spent[:, :, None] + alone[:, i, None]).reshape(len(legal), -1)
    return np.asarray(spent <= np.maximum(free_cpus, spent.min(1))[:, None] + 1e-9)


def moves_of(actions: Ints, r: int) -> Floats:
    """Return the units every slot moves by, [n, r], for joint actions 0 .. 5^r - 1, [n]."""
    return MOVES[np.stack(np.unravel_index(actions, (len(MOVES),) * r), 1)]


def _columns(r: int) -> Ints:
    return np.array([*range(r - 1), BUFFER])


@dataclass(frozen=True, slots=True)
class LiteralNetwork:
    """``Q = W3 relu(W2 relu(W1 factors))``: six inputs, H hidden units twice, 5^r outputs (section 4.2); float32.

    Args:
        w1, b1, w2, b2, w3, b3: [6, H], [H], [H, H], [H], [H, 5^r], [5^r].
        seed, updates, decisions: how it was trained: the seed, steps of the optimizer, decisions of single machines.
    """

    w1: Weights
    b1: Weights
    w2: Weights
    b2: Weights
    w3: Weights
    b3: Weights
    seed: int = 0
    updates: int = 0
    decisions: int = 0

    def __call__(self, state: Weights) -> Weights:
        """Return the value of every joint action, [n, 5^r], for the six factors, [n, 6]."""
        h = np.maximum(state @ self.w1 + self.b1, 0.0)
        return np.asarray(np.maximum(h @ self.w2 + self.b2, 0.0) @ self.w3 + self.b3)


class LiteralDQN:
    """Decides for N simulated machines with one network per number of slots, greedily; see the head of this module.

    Args:
        networks: r -> network; machines of another r keep the even split.
        seed: of the machines' constants.
    """

    def __init__(self, networks: Mapping[int, LiteralNetwork], seed: int = 0) -> None:
        self.networks = dict(networks)
        self.rng = np.random.default_rng(seed)
        self.start: Floats | None = None
        """Batches per second at the first decision, [N]."""

    @classmethod
    def load(cls, path: Path | str, seed: int = 0) -> LiteralDQN:
        """Return the agent saved in an ``.npz`` file by `save`.

        Raises:
            ValueError: when the file holds something else.
        """
        networks = {}
        with np.load(path) as arrays:
            for r in sorted({int(name[1]) for name in arrays.files if name[0] == "r" and name[1:2].isdigit()}):
                values: dict[str, Any] = {name: arrays[f"r{r}_{name}"].astype(np.float32) for name in PARAMETERS}
                values |= {name: int(arrays[f"r{r}_{name}"]) for name in _TRAINING}
                networks[r] = LiteralNetwork(**values)
                inputs, outputs = values["w1"].shape[0], values["w3"].shape[1]
                if (inputs, outputs) != (len(FACTORS), len(MOVES) ** r):
                    raise ValueError(f"{path}: r = {r}: {inputs} -> {outputs}, expected 6 -> {5**r}; train again")
        if not networks:
            raise ValueError(f"{path}: expected networks of r = 3, 4 or 5, found none; train with benchmarks.literal")
        return cls(networks, seed)

    def save(self, path: Path | str) -> None:
        """Write an ``.npz`` file: weights as float16, and per r the seed, updates and decisions of the training."""
        arrays: dict[str, Any] = {}
        for r, network in self.networks.items():
            arrays |= {f"r{r}_{name}": getattr(network, name).astype(np.float16) for name in PARAMETERS}
            arrays |= {f"r{r}_{name}": np.array(getattr(network, name)) for name in _TRAINING}
        np.savez_compressed(path, **arrays)

    def act(self, view: View) -> tuple[Floats, None]:
        """Return values, [N, SLOTS], for the next decision; windows stay at twice the workers."""
        if self.start is None:
            self.start, self.constants = view.rate.copy(), draw_constants(len(view.cpus), self.rng)
        stages = view.workers.sum(1)
        even = np.maximum(1.0, np.floor(view.cpus / np.maximum(stages, 1)))
        value = np.where(view.workers, even[:, None], view.value)
        for r in sorted(set((stages + 1).tolist()) & set(self.networks)):
            rows = np.flatnonzero(stages + 1 == r)
            actions = self.choose(r, rows, look(view, rows, r, self.constants), view)
            at = np.ix_(rows, _columns(r))
            value[at] = view.value[at] + moves_of(actions, r)
        return value, None

    def choose(self, r: int, rows: Ints, seen: Seen, view: View) -> Ints:
        """Return the best allowed joint action of each machine in `rows`, [n]."""
        ok = allowed(seen.legal, seen.weight, seen.free_cpus)
        return np.asarray(np.where(ok, self.networks[r](seen.state), -np.inf).argmax(1))
