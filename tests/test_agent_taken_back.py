"""The shell around the network, after what was tried and gave less, or was never granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from views import a_view, plain, wants

from intune_callbacks.decide.moves import STAY
from intune_callbacks.decide.network import Values, shipped
from intune_callbacks.decide.progress import BURST, CONFIRM, HOLD, JUMP, ShellConfig
from intune_callbacks.decide.shell import Shell
from intune_callbacks.pretrain.env import Env


def until_changed(shell: Shell, env: Env, most: int) -> tuple[int, Any]:
    """Return after how many decisions the only pipeline is changed, at most `most`, and to what."""
    for decision in range(most):
        view = env.view
        value, window = shell.act(view)
        if (value != view.value).any() or (window != view.window).any():
            return decision, value
        env.step(value, window)
    return most, env.view.value


def log_distance(one: Any, other: Any) -> float:
    return float(np.abs(np.log(np.maximum(one, 1.0) / np.maximum(other, 1.0))).sum())


@pytest.mark.parametrize("irregular", [0.0, 0.9], ids=["regular", "windows too narrow"])
def test_what_was_taken_back_is_held_and_looked_at_again_after_twice_the_time(irregular: float) -> None:
    shell, env = Shell(shipped()), Env(plain(1, seed=21, cpus=64), np.random.default_rng(0))
    start = env.view
    for _ in range(10):
        env.step(*shell.act(env.view))
    failed = env.view.value[0]
    assert (failed != start.value[0]).any() and shell.phase[0] == BURST
    env.machines = replace(env.machines, cv=np.full_like(env.machines.cv, irregular))
    env.step(start.value, start.window)
    shell.taken_back(failed)
    assert until_changed(shell, env, 200)[0] >= 2 * ShellConfig().look - 1
    for _ in range(500):
        view = env.view
        value, _ = shell.act(view)
        moved = log_distance(value[0], view.value[0])
        assert moved == 0.0 or log_distance(value[0], failed) >= moved
        env.step(start.value, start.window)


def test_each_failure_doubles_the_wait_up_to_the_longest() -> None:
    config = ShellConfig(look=10, longest=35)
    shell, env = Shell(wants(3), config), Env(plain(1, seed=22, cpus=64), np.random.default_rng(0))
    shell.act(env.view)
    waits = []
    for _ in range(3):
        shell.taken_back(np.full(env.view.value.shape[1], 400.0))
        waits.append(until_changed(shell, env, 60)[0])
    assert 19 <= waits[0] <= 21 and 34 <= waits[1] <= 36 and 34 <= waits[2] <= 36


def test_a_machine_that_grows_ends_the_wait() -> None:
    shell, env = Shell(shipped()), Env(plain(1, seed=23, cpus=32), np.random.default_rng(0), {20: 4.0})
    for _ in range(12):
        env.step(*shell.act(env.view))
    before = env.view.value.sum()
    shell.taken_back(env.view.value[0] + 1.0)
    waited, value = until_changed(shell, env, 60)
    assert waited == 8 and value.sum() > 1.5 * before


def test_a_lasting_drop_ends_the_wait() -> None:
    shell, env = Shell(shipped()), Env(plain(1, seed=21, cpus=64), np.random.default_rng(0))
    for _ in range(12):
        env.step(*shell.act(env.view))
    shell.taken_back(env.view.value[0] + 50.0)
    for _ in range(8):
        env.step(*shell.act(env.view))
    assert shell.phase[0] == HOLD
    env.machines = replace(env.machines, work_s=3.0 * env.machines.work_s)
    env.work_s = 3.0 * env.work_s
    phases = []
    for _ in range(12):
        env.step(*shell.act(env.view))
        phases.append(int(shell.phase[0]))
    assert {JUMP, BURST} & set(phases)


@pytest.mark.parametrize("taken", [1e6, 4.6])
def test_the_first_jump_is_not_corrected_for_nothing(taken: float) -> None:
    """Beside workers that start the model is slow: fewer of them would be enough for what it seems to take."""
    shell, work_s = Shell(wants(STAY)), 0.9
    view = a_view([4.0], work_s, cpus=20.0, weight=0.07, budget=2.0)
    values = []
    for decision in range(8):
        value, _ = shell.act(view)
        values.append(float(value[0, 0]))
        demand = 1e6 if decision < 2 else taken
        # What sixteen workers give is what four promised; more would not help a model that takes no more than this.
        view = a_view(value, work_s * value / 4.0, cpus=20.0, weight=0.07, budget=2.0, demand=demand, rate=4.4)
    assert max(values) >= 16.0
    assert values[-1] == max(values)


def test_taking_back_before_anything_was_decided_is_no_error() -> None:
    shell = Shell(None)
    shell.taken_back(np.ones(3))
    assert shell.state_dict() == {}


@pytest.mark.parametrize("values", [wants(4), wants(3), None], ids=["+5", "+1", "no network"])
def test_what_is_never_granted_is_not_asked_for_for_ever(values: Values | None) -> None:
    shell, env = Shell(values, ShellConfig(burst=1000)), Env(plain(3, seed=24, cpus=64), np.random.default_rng(0))
    asked = []
    for _ in range(60):
        view = env.view
        value, _ = shell.act(view)
        asked.append((value != view.value).any(1))
        env.step(view.value, view.window)
    # A look now and then may ask once more.
    assert np.any(asked[:20]) and np.sum(asked[20:], 0).max() <= 4
    assert (shell.phase == HOLD).all()


def test_more_workers_than_cpus_that_are_not_given_up_are_asked_for_once() -> None:
    machines = plain(1, seed=25, cpus=8)
    env = Env(machines, np.random.default_rng(0))
    env.workers = np.where(machines.mask, 16.0, 0.0)
    env.step(np.concatenate([env.workers, env.buffer[:, None]], 1))
    shell, asked = Shell(None), 0
    for _ in range(80):
        view = env.view
        value, _ = shell.act(view)
        asked += int((value != view.value).any())
        env.step(view.value, view.window)
    assert 1 <= asked < 15


def test_a_stroke_of_luck_is_not_waited_for_for_ever() -> None:
    # What windows had held comes out at once: each allocation gives six times as much when it begins.
    shell, cost = Shell(wants(3), ShellConfig(burst=5)), np.array([[0.1, 0.4, 0.2]])
    view, met, phases = a_view([2.0, 2.0, 2.0], cost, cpus=64.0), {(2.0, 2.0, 2.0)}, []
    for _ in range(60):
        value, _ = shell.act(view)
        phases.append(int(shell.phase[0]))
        allocation = tuple(value[0].tolist())
        view = a_view(value, cost, cpus=64.0, rate=10.0 if allocation in met else 60.0)
        met.add(allocation)
    # Three allocations are remembered beside the present one, and three decisions are enough for each.
    assert phases.count(CONFIRM) <= 15 and HOLD in phases


def test_what_no_longer_fits_the_cpus_is_not_measured_for_ever() -> None:
    # Workers turn out to take more CPU time than they did when the best allocation was met.
    shell, cost = Shell(wants(3), ShellConfig(burst=5)), np.array([[0.1, 0.4, 0.2]])
    view, phases = a_view([2.0, 2.0, 2.0], cost, cpus=24.0, weight=0.7), []
    for _ in range(60):
        value, _ = shell.act(view)
        phases.append(int(shell.phase[0]))
        is_new = (value != view.value).any()
        weight = 0.7 if BURST in (*phases[-1:], JUMP) and CONFIRM not in phases else 1.0
        view = a_view(value, cost, cpus=24.0, weight=weight, rate=60.0 if is_new and weight < 1.0 else 10.0)
    assert phases.count(CONFIRM) <= 15 and HOLD in phases
