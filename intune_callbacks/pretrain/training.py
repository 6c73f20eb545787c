"""Trains the agent on simulated machines: seeded, resumable, on one CPU core."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import date as calendar
from pathlib import Path
from typing import Any

import numpy as np

from intune_callbacks.errors import ConfigError, MissingPackage

try:
    import torch
except ImportError as error:
    raise MissingPackage("torch", "lightning") from error

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT
from intune_callbacks.decide.learner import Learner, Replay
from intune_callbacks.decide.network import Network
from intune_callbacks.decide.view import Bools, Floats
from intune_callbacks.pretrain import model_card as card
from intune_callbacks.pretrain.config import PretrainConfig
from intune_callbacks.pretrain.lessons import Lessons
from intune_callbacks.pretrain.machines import SLOTS, Machines, sample
from intune_callbacks.record.files import unwritable
from intune_callbacks.types import Clock
from intune_callbacks.words import wrapped

__all__ = ["CHECKPOINT", "WEIGHTS", "PretrainConfig", "Pretraining", "pretrain"]

CHECKPOINT, WEIGHTS = "checkpoint.pt", "weights.npz"
CHECKPOINT_EVERY_S, LINE_EVERY_S = 60.0, 5.0
"""A choice: at most a minute is lost, and who looks sees that it goes on."""
STREAM = 7
"""First part of the random seed: no seed makes the lessons repeat the machines policies are compared on."""
SMOOTHING = 0.01
"""Weight of a new loss in the one that is shown. A choice: some hundred updates count."""
_COUNTERS = ("decisions", "updates", "refilled", "wall_s", "cpu_s", "loss")


class Pretraining:
    """One training under way: all machines decide, then the network is updated once."""

    def __init__(
        self,
        config: PretrainConfig,
        clock: Clock | None = None,
        draw: Callable[[int, np.random.Generator], Machines] = sample,
    ) -> None:
        self.config, self._clock, self._draw = config, clock or Clock(), draw
        self.learner = Learner(config.learner, config.seed)
        self.replay = Replay(config.replay, SLOTS)
        self.decisions, self.updates, self.refilled = 0, 0, 0
        self.wall_s, self.cpu_s, self.loss = 0.0, 0.0, 0.0
        self.owed = 0
        """Transitions that a resumed training had and has to gather again before it learns."""
        self._begin(np.random.default_rng([STREAM, config.seed]))

    def _begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.lessons = Lessons(self._values, self.config.lessons, rng, self._draw)

    @property
    def share(self) -> float:
        """Done, 0..1."""
        c = self.config
        return min(1.0, self.decisions / c.decisions if c.decisions else self.wall_s / (60.0 * (c.minutes or 1.0)))

    @property
    def explore(self) -> float:
        """Share of decisions with random moves now."""
        c = self.config
        return max(c.explore_last, c.explore * (1.0 - self.share / c.explore_until))

    @property
    def rate(self) -> float:
        """Learning rate now."""
        return self.config.learner.rate * max(self.config.rate_last, 1.0 - self.share)

    def step(self) -> None:
        """Let all machines decide once, then learn once if enough is remembered."""
        wall_s, cpu_s = self._clock.wall(), self._clock.cpu()
        explore, rate = self.explore, self.rate
        self.lessons.explore = explore
        self.lessons.step(self.replay)
        count = self.config.lessons.machines
        if self.replay.size < self.owed:
            # What was done before the interruption is done again, and counts once.
            self.refilled += count
        else:
            self.decisions += count
            if self.replay.size > self.config.replay_first:
                loss = self.learner.update(self.replay.sample(self._rng, self.config.learner.batch), rate)
                self.updates += 1
                self.loss += max(SMOOTHING, 1.0 / self.updates) * (loss - self.loss)
            self.wall_s += self._clock.wall() - wall_s
        self.cpu_s += self._clock.cpu() - cpu_s

    def line(self) -> str:
        """Return how far it is, in words."""
        if self.replay.size < self.owed:
            return f"refilling the replay before learning goes on: {self.replay.size:,} of {self.owed:,} transitions"
        left_s = self.wall_s * (1.0 - self.share) / max(self.share, 1e-9)
        speed = self.decisions / max(self.wall_s, 1e-9)
        return (
            f"{self.decisions:,} decisions ({speed:,.0f}/s), {self.updates:,} updates, loss {self.loss:.4f}, "
            f"rate {self.rate:.1e}, {left_s / 60.0:.1f} min left"
        )

    def save(self, path: Path) -> None:
        """Write all that is needed to go on, at once or not at all; the replay is left out."""
        source: Any = self._rng.bit_generator
        state = {
            "made_by": self._made_by(),
            "online": self.learner.online.state_dict(),
            "target": self.learner.target.state_dict(),
            "optimizer": self.learner.optimizer.state_dict(),
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "owed": max(self.replay.size, self.owed),
            "rng": source.state,
            # Machines get random streams of their own, split off one after another.
            "rng_children": source.seed_seq.n_children_spawned,
        }
        partial = path.with_name(f"{path.name}.partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Go on where `save` was called; the replay is filled again before learning goes on.

        Raises:
            ConfigError: it was made with another configuration or another version of the agent.
        """
        state = torch.load(path, weights_only=True)
        now, then = self._made_by(), state["made_by"]
        problems = [
            f"{name}={now.get(name)!r}: {path} was made with {then.get(name)!r}; give the same, or begin anew elsewhere"
            for name in sorted(now.keys() | then.keys())
            if now.get(name) != then.get(name)
        ]
        if problems:
            raise ConfigError(problems)
        self.learner.online.load_state_dict(state["online"])
        self.learner.target.load_state_dict(state["target"])
        self.learner.optimizer.load_state_dict(state["optimizer"])
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])
        self.owed = state["owed"]
        seed = np.random.SeedSequence([STREAM, self.config.seed], n_children_spawned=state["rng_children"])
        rng = np.random.default_rng(seed)
        rng.bit_generator.state = state["rng"]
        self._begin(rng)

    def _made_by(self) -> dict[str, Any]:
        return self.config.trained() | {"state of a slot": list(OF_SLOT), "state of a pipeline": list(OF_PIPELINE)}

    def _values(self, slots: Floats, pipeline: Floats, mask: Bools) -> Floats:
        with torch.no_grad():
            values = self.learner.online(torch.from_numpy(slots), torch.from_numpy(pipeline), torch.from_numpy(mask))
        return np.asarray(values.numpy())


def pretrain(
    config: PretrainConfig, out: Path, *, resume: bool = False, date: str | None = None, clock: Clock | None = None
) -> Network:
    """Train, compare on held-out machines, and write ``weights.npz``, ``card.md`` and ``card.json``.

    Args:
        out: folder of the results and of the checkpoint, which is written every minute.
        resume: go on from the checkpoint; of a finished training only the comparison is made again.
        date: of the model card, today by default.
        clock: whose minutes and CPU seconds count, also of the minutes between two checkpoints.

    Raises:
        ConfigError: the folder holds another training, or none to resume, or cannot be written.
    """
    clock = clock or Clock()
    training = Pretraining(config, clock)
    if (why := unwritable(out)) is not None:
        raise ConfigError([f"--out={str(out)!r}: {why}; expected a folder that can be written"])
    _check(out, resume)
    if resume:
        training.load(out / CHECKPOINT)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # to root, what permissions say is no answer
        why = f"it cannot be made ({error.strerror})"
        raise ConfigError([f"--out={str(out)!r}: {why}; expected a folder that can be written"]) from None
    threads = torch.get_num_threads()
    # One thread: with more, the order of additions and with it the weights would depend on the machine.
    torch.set_num_threads(1)
    try:
        _run(training, out / CHECKPOINT, clock)
    finally:
        torch.set_num_threads(threads)
    network = training.learner.online.network()
    network.save(out / WEIGHTS)
    print(f"comparing on machines not seen: {config.eval_static} static, {config.eval_resize} resized", flush=True)
    card.write(out, _numbers(training, network, out / WEIGHTS, date or str(calendar.today())))
    return network


def _check(out: Path, resume: bool) -> None:
    there = [name for name in (CHECKPOINT, WEIGHTS, *card.FILES) if (out / name).exists()]
    if resume and CHECKPOINT not in there:
        raise ConfigError([f"{out / CHECKPOINT} does not exist: nothing to resume; leave out --resume to begin"])
    if there and not resume:
        raise ConfigError([f"{out} already holds {', '.join(there)}: give --resume to go on, or another folder"])


def _run(training: Pretraining, checkpoint: Path, clock: Clock) -> None:
    saved_s = told_s = clock.wall()
    while training.share < 1.0:
        training.step()
        now_s = clock.wall()
        if now_s - told_s >= LINE_EVERY_S or training.share >= 1.0:
            print(wrapped(f"{training.share:4.0%}  {training.line()}"), flush=True)
            told_s = now_s
        if now_s - saved_s >= CHECKPOINT_EVERY_S:
            training.save(checkpoint)
            saved_s = clock.wall()
    training.save(checkpoint)


def _numbers(training: Pretraining, network: Network, weights: Path, date: str) -> dict[str, Any]:
    """Return what the model card says."""
    c, written = training.config, weights.read_bytes()
    trained = {name: value for name, value in c.trained().items() if value is not None}
    return {
        "date": date,
        "versions": card.versions(),
        "weights": {"file": weights.name, "bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()},
        "training": {
            "seed": trained.pop("seed"),
            "decisions of single machines": training.decisions,
            "decisions repeated after interruptions": training.refilled,
            "updates": training.updates,
            "CPU seconds": round(training.cpu_s),
        },
        "config": trained,
        "population": card.population(),
        "results": card.held_out(network, {"static": c.eval_static, "resize": c.eval_resize}, c.eval_seed),
    }
