"""The agent with online fine-tuning on simulated machines: each machine has a network of its own."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from intune_callbacks.decide.network import Network
from intune_callbacks.decide.online import FineTuner
from intune_callbacks.decide.progress import ShellConfig
from intune_callbacks.decide.reward import utility
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import Floats, View

__all__ = ["FineTuned"]


class FineTuned:
    """Runs one shell and one learning network per machine, as in as many separate trainings.

    Args:
        network: weights all of them start with.
        config: of the shells.
    """

    def __init__(self, network: Network, config: ShellConfig | None = None) -> None:
        self._network, self._config = network, config
        self._machines: list[tuple[Shell, FineTuner]] = []

    @property
    def updates(self) -> int:
        """Steps of learning, all machines together."""
        return sum(tuner.updates for _, tuner in self._machines)

    def act(self, view: View) -> tuple[Floats, Floats]:
        """Return values and windows, [N, S]."""
        count = len(view.cpus)
        if not self._machines:
            tuners = [FineTuner(self._network, seed, threaded=False) for seed in range(count)]
            self._machines = [(Shell(tuner, self._config), tuner) for tuner in tuners]
        value, window = view.value.copy(), view.window.copy()
        for row, (shell, tuner) in enumerate(self._machines):
            one = View(**{field.name: getattr(view, field.name)[row : row + 1] for field in fields(View)})
            value[row : row + 1], window[row : row + 1] = shell.act(one)
            used = np.where(one.workers, one.value * one.weight, 0.0).sum(1) / one.budget
            tuner.record(shell.moved, utility(one.rate, one.memory, used))
        return value, window
