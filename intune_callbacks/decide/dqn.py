"""The DQN as a policy of a live pipeline: one `Observation` in, one `Proposal` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from intune_callbacks.decide.live import awake, slots_of, view_of
from intune_callbacks.decide.network import Network, Values, shipped
from intune_callbacks.decide.progress import BURST, CONFIRM, HOLD, ShellConfig, checked_state
from intune_callbacks.decide.reward import utility
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import Floats, View
from intune_callbacks.errors import MissingPackage
from intune_callbacks.measure.counts import CpuShares, StageCounts
from intune_callbacks.types import Allocation, Observation, Proposal, Stage

if TYPE_CHECKING:
    from intune_callbacks.decide.online import FineTuner

__all__ = ["Dqn", "ModelJump"]

WINDOWS_BEFORE, LONG_S = 2, 2.0
"""Windows of the untouched pipeline before anything is changed; one is enough when it was that long, in seconds, or
steady: more cost much on slow reads, see "Later still" in docs/adr/0014-no-experiment-first.md."""
STEADY = 0.1
"""Relative error of its service times, and share of its items that only filled or emptied a queue, up to which a window
is steady. A choice: a jump is off by no more then."""


class Dqn:
    """Jumps to the fitted allocation, lets the network improve it move by move, keeps the best measured.

    Args:
        network: weights; those shipped with the package by default.
        config: of the shell around it.
        fine_tune: go on learning from this pipeline, in a thread of its own.

    Raises:
        MissingPackage: for `fine_tune` without PyTorch.
    """

    name = "dqn"

    def __init__(
        self, network: Network | None = None, config: ShellConfig | None = None, *, fine_tune: bool = False
    ) -> None:
        start = network if network is not None else shipped()
        self._tuner = _fine_tuner(start) if fine_tune else None
        self._begin(self._tuner or start, config)

    def _begin(self, values: Values | None, config: ShellConfig | None) -> None:
        self._values, self._config = values, config or ShellConfig()
        self._shell = self._new_shell()
        self._names: tuple[str, ...] = ()
        self._windows = 0
        self._first: Observation | None = None
        self._shares = CpuShares()
        self._counts = StageCounts()
        self._saved: dict[str, Any] = {}
        self._no_worker: set[str] = set()
        """Stages that gave less with one worker than in the training loop."""

    def decide(self, observation: Observation) -> Proposal:
        """Return where to go from here; an empty allocation means stay."""
        before, asleep = observation.allocation, {s.name for s in observation.stages if s.current < 1 <= s.high}
        observation = awake(observation)
        self._counts.learn(observation)
        self._shares.learn(observation)
        slots = slots_of(observation.stages)
        names = tuple(stage.name for stage in slots)
        if names != self._names:
            self._names, self._shell, self._windows, self._first = names, self._new_shell(), 0, None
            if self._saved.get("names") == list(names):
                # This pipeline was measured before: there is no untouched one to look at.
                self._shell.saved, self._windows = checked_state(self._saved, len(names)), WINDOWS_BEFORE
        if not observation.may_change and self._windows + 1 >= WINDOWS_BEFORE:
            return Proposal(reason="only measuring")  # the last one before a change is one behind which it may be made
        if not self._counts.is_reliable(observation):
            return Proposal(reason="measuring: some stage has made too few items to be judged")
        self._windows += 1
        if self._windows < WINDOWS_BEFORE:
            self._first = observation
            is_enough = observation.elapsed_s >= LONG_S or _is_steady(observation)
            if not is_enough or not observation.may_change:
                return Proposal(reason=f"measuring, window {self._windows} of {WINDOWS_BEFORE}")
        if self._first is not None:
            # Learned only now: how many items make a batch is not known behind a window in which buffers fill or drain.
            self._shell.act(self._view(self._first, slots))
            self._first = None
        view = self._view(observation, slots)
        (value,), (window,) = self._shell.act(view)
        if self._tuner is not None:
            used = (view.value * view.worker_weight).sum(1) / np.maximum(view.budget, 1e-9)
            self._tuner.record(self._shell.moved, utility(view.rate, view.memory, used))
        changes = _changes(observation, slots, value, window)
        if self._shell.jumped[0]:
            # A first worker beside the training loop is a move where the shell goes somewhere, and none where it stays.
            changes |= {s.name: 1 for s in slots if s.name in asleep - self._no_worker and s.name not in changes}
        return Proposal(changes, self._reason(view, before, changes), bool(self._shell.phase[0] == HOLD))

    def measured(self, observation: Observation) -> None:
        """Learn from a window after which nothing may change, as its `may_change` says."""
        self.decide(observation)

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        """Hold what was gone back to, and do not jump near `failed` again, unless the machine changes."""
        self._no_worker |= {name for name in self._names if failed.get(name) == 1}
        if (track := self._shell.track) is not None:
            now = track.view.value[0].tolist()
            left = [float(failed.get(name, value)) for name, value in zip(self._names, now, strict=True)]
            self._shell.taken_back(np.array(left))

    def state_dict(self) -> dict[str, Any]:
        """Return readings, CPU shares, and what the shell knows: its phase, the curves, the best measured."""
        known = self._shell.state_dict()
        saved = {"names": list(self._names), **known} if known else self._saved
        return {"counts": self._counts.state_dict(), "shares": self._shares.state_dict(), "shell": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; the shell goes on where it was if stages and CPUs are the same.

        Raises:
            KeyError, TypeError, ValueError: this is no such state.
        """
        saved = dict(state["shell"])
        if saved:
            checked_state(saved, len(saved["names"]))
        self._saved, self._names, self._shell = saved, (), self._new_shell()
        self._counts.load_state_dict(state["counts"])
        self._shares.load_state_dict(state["shares"])

    def _new_shell(self) -> Shell:
        return Shell(self._values, self._config)

    def _view(self, observation: Observation, slots: list[Stage]) -> View:
        counts, expected_s = self._counts, self._expected_s(slots)
        return view_of(observation, self._shares.known(), counts.of_stages(), counts.demand, expected_s)

    def _expected_s(self, slots: list[Stage]) -> dict[str, float]:
        """Worker seconds per batch the curves expect of the present allocation."""
        if (track := self._shell.track) is None:
            return {}
        expected_s = track.curves.service_s(np.array([[stage.current for stage in slots]], float))
        named = zip(slots, expected_s[0].tolist(), track.view.workers[0].tolist(), strict=True)
        return {stage.name: seconds for stage, seconds, known in named if known}

    def _reason(self, now: View, before: Allocation, changes: Allocation) -> str:
        moves = ", ".join([f"{name} {before[name]}>{changes[name]}" for name in self._names if name in changes])
        phase, moved = int(self._shell.phase[0]), self._shell.moved
        if phase == BURST and moved is not None and moved.followed[0]:
            why = f"move: {moves}" if moves else "no move is worth it"
        elif phase in (HOLD, CONFIRM):
            why = "holding the best allocation measured" if phase == HOLD else "measuring the best allocations again"
            why += f": {moves}" if moves else ""
        else:
            why = f"jump to the fitted allocation: {moves}" if moves else "measuring"
        over = now.full_memory[0] > self._config.memory_limit
        return f"full windows would pass the memory limit; {why}" if over else why


class ModelJump(Dqn):
    """Jumps to the fitted allocation, confirms it and holds it: the same without a network."""

    name = "model-jump"

    def __init__(self, config: ShellConfig | None = None) -> None:
        self._tuner = None
        self._begin(None, config)


def _fine_tuner(start: Network) -> FineTuner:
    try:
        from intune_callbacks.decide.online import FineTuner
    except ImportError as error:
        raise MissingPackage("torch", "lightning") from error
    return FineTuner(start)


def _is_steady(observation: Observation) -> bool:
    """Return whether all stages made what was delivered, at service times whose mean is known."""
    return all(
        abs(r.stored) <= max(1.0, STEADY * r.items) and r.service_cv <= STEADY * r.items**0.5
        for r in observation.rates.values()
    )


def _changes(observation: Observation, slots: list[Stage], value: Floats, window: Floats) -> Allocation:
    windows = {stage.window_of: stage for stage in observation.stages if stage.window_of is not None}
    changes: Allocation = {}
    for stage, units, wide in zip(slots, value, window, strict=True):
        if int(units) != stage.current:
            changes[stage.name] = int(units)
        held = windows.get(stage.name)
        if held is not None and wide > 0.0 and int(wide) != held.current:
            changes[held.name] = int(wide)
    return changes
