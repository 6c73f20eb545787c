"""Online fine-tuning: the network goes on learning from the pipeline it tunes, off the training thread."""

from __future__ import annotations

import queue
import threading

import numpy as np

from intune_callbacks.decide.learner import Learner, LearnerConfig, Replay
from intune_callbacks.decide.moves import Moved
from intune_callbacks.decide.network import Network, Weights
from intune_callbacks.decide.view import Bools, Floats

__all__ = ["FineTuner"]

DISCOUNT, SCALE, WORST = 0.5, 20.0, 1.0
"""As in pre-training: 5 % more throughput earns 1."""
TRANSITIONS, FEWEST, BATCH, UPDATES = 400, 16, 32, 2
"""Transitions remembered, those there before the first update, those of an update, and updates per decision. A choice:
few, for a run makes one decision a second at most, and its work drifts."""
RATE, ANCHOR = 1e-4, 0.02
"""Learning rate, a twentieth of that of pre-training, and pull towards the first weights per update. A choice: one run
says far less than pre-training did."""
WAITING = 64
"""Decisions that may wait for the thread, about a minute of them; more are dropped."""
IDLE_S = 5.0
"""The thread ends when nothing came for so long: most of a run nothing is learned."""


class FineTuner:
    """A network that learns from its own moves, pulled back to the weights it started with.

    Args:
        network: where to start; it is the anchor too.
        seed: of the draws from the replay.
        threaded: learn in a thread of its own; False learns at once, for simulation.
    """

    def __init__(self, network: Network, seed: int = 0, *, threaded: bool = True) -> None:
        self.network = network
        self.updates = 0
        self.failed: str | None = None
        """Why learning stopped; the newest weights stay in use."""
        config = LearnerConfig(rate=RATE, batch=BATCH, anchor=ANCHOR, teach=0.0)
        self._learner = Learner(config, seed, network)
        self._rng = np.random.default_rng(seed)
        self._replay: Replay | None = None
        self._before: tuple[Moved, Floats] | None = None
        self._queue: queue.Queue[tuple[Moved, Moved, Floats, Bools]] = queue.Queue(WAITING)
        self._threaded = threaded
        # Started with the first transition and gone after the last.
        self._thread: threading.Thread | None = None

    def __call__(self, slots: Weights, pipeline: Weights, mask: Bools) -> Weights:
        """Return the value of every move with the newest weights; arguments as for `Network`."""
        return self.network(slots, pipeline, mask)

    def record(self, moved: Moved | None, utility: Floats) -> None:
        """Take one decision; never waits.

        Args:
            moved: what was decided; None when no move was due.
            utility: see `reward.utility`, measured just before it, [N].
        """
        before, self._before = self._before, None if moved is None else (moved, utility)
        if before is None or moved is None:
            return
        reward = SCALE * np.clip(utility - before[1], -WORST, WORST)
        transition = (before[0], moved, reward, before[0].followed)
        if not self._threaded:
            self._learn(*transition)
            return
        if self.failed is not None:
            return
        try:
            self._queue.put_nowait(transition)
        except queue.Full:
            # The learner is behind: one transition less is better than a late batch.
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="intune-fine-tuning", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                self._learn(*self._queue.get(timeout=IDLE_S))
            except queue.Empty:
                return
            except Exception as error:
                # What was learned so far is kept; the training does not depend on it.
                self.failed = f"{type(error).__name__}: {error}"
                return

    def _learn(self, before: Moved, after: Moved, reward: Floats, rows: Bools) -> None:
        if self._replay is None:
            self._replay = Replay(TRANSITIONS, before.mask.shape[1])
        if {before.mask.shape[1], after.mask.shape[1]} != {self._replay.slots}:
            return
        self._replay.add(before, after, reward, DISCOUNT, rows)
        if self._replay.size < FEWEST:
            return
        for _ in range(UPDATES):
            self._learner.update(self._replay.sample(self._rng, BATCH))
        self.updates += UPDATES
        self.network = self._learner.online.network()
