"""The shell around the network: its phases, what it does by itself, and what no network can make it do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from views import a_network, a_view, plain, roomy, row_of

from intune_callbacks.decide.features import OF_SLOT
from intune_callbacks.decide.moves import STAY
from intune_callbacks.decide.network import Values, shipped
from intune_callbacks.decide.progress import BURST, CONFIRM, HOLD, JUMP, ShellConfig
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.machines import BUFFER, Machines, sample
from intune_callbacks.pretrain.oracle import best

SLOWEST = OF_SLOT.index("ln(capacity / capacity of the slowest slot) / 2, 0..1.5")


def wants(move: int, *, slowest: bool = False) -> Values:
    """Return a network that wants one move above all, in every slot or in the slowest one only."""

    def values(slots: Any, pipeline: Any, mask: Any) -> Any:
        q = np.zeros((*mask.shape, 5), np.float32)
        q[..., move] = np.where((slots[..., SLOWEST] < 1e-6) & (slots[..., -1] != 0.0), 9.0, 0.0) if slowest else 9.0
        return q

    return values


class Seen:
    """Runs a shell on machines and keeps what happened, one row per decision."""

    def __init__(self, shell: Shell, machines: Machines, decisions: int, sizes: Any = None, seed: int = 0) -> None:
        self.shell, self.env = shell, Env(machines, np.random.default_rng(seed), sizes)
        self.views, self.values, self.windows, self.phases, self.rates = [], [], [], [], []
        for _ in range(decisions):
            value, window = shell.act(self.env.view)
            self.views.append(self.env.view)
            self.values.append(value)
            self.windows.append(window)
            self.phases.append(shell.phase.copy())
            self.env.step(value, window)
            self.rates.append(self.env.steady_rate.copy())

    def moved(self, row: int = 0) -> list[bool]:
        pairs = zip(self.values, self.views, strict=True)
        return [bool((value[row] != view.value[row]).any()) for value, view in pairs]

    def best(self) -> Any:
        """Batches per second of the best allocation for the machine as it is now."""
        return best(self.env.machines, self.env.work_s, self.env.base, self.env.cpus)[0]


def order(phases: list[Any]) -> list[int]:
    """Return the phases of one machine, each stretch once."""
    names = [int(phase[0]) for phase in phases]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


# -- the phases ------------------------------------------------------------------------------------------------------


def test_phases_come_in_order() -> None:
    # Jumps in the middle of the moves bring a random network back to where it was: left out.
    seen = Seen(Shell(a_network(7), ShellConfig(review=99)), plain(6, stages=3, cpus=32), 60)
    orders = [order([phase[row:] for phase in seen.phases]) for row in range(6)]
    firsts = [o[: o.index(HOLD) + 1] for o in orders]
    assert [JUMP, BURST, CONFIRM, HOLD] in firsts
    assert all(first in ([JUMP, BURST, CONFIRM, HOLD], [JUMP, BURST, HOLD]) for first in firsts), firsts
    # One that wants nothing is not waited for. Without a network there are no moves of its own.
    assert order(Seen(Shell(wants(STAY)), plain(1, stages=3, cpus=32), 29).phases) == [JUMP, BURST, HOLD]
    without = order(Seen(Shell(None), plain(1, stages=3, cpus=32), 29).phases)
    assert BURST not in without and without[0] == JUMP and without[-1] == HOLD


def test_the_first_jumps_bring_the_stages_in_proportion_to_their_cost() -> None:
    seen = Seen(Shell(None), plain(1, stages=3, cpus=32), 8)
    per_work = seen.values[-1][0, :3] / seen.env.work_s[0, :3]
    assert per_work.max() / per_work.min() < 1.6
    assert 0.8 * 32 <= seen.values[-1][0, :3].sum() <= 32


def test_nothing_is_changed_before_the_first_jump() -> None:
    seen = Seen(Shell(shipped()), roomy(sample(32, np.random.default_rng(5))), 2)
    moved = np.array([seen.moved(row) for row in range(32)])
    assert not moved[:, 0].any() and moved[:, 1].any()


def test_jump_and_hold_alone_come_near_the_best_of_plain_machines() -> None:
    seen = Seen(Shell(None), plain(12, seed=1, cpus=64), 40)
    assert (seen.phases[-1] == HOLD).all()
    assert (seen.env.steady_rate / seen.best()).min() > 0.85


def test_follows_a_resize_in_the_same_decision() -> None:
    machines = plain(3, seed=2, cpus=32)
    seen = Seen(Shell(wants(STAY)), machines, 45, {40: 4.0})
    # The size is seen after 40 decisions were made, and used by the next.
    assert (seen.views[40].cpus == 128.0).all()
    before, after = (seen.values[t][:, :BUFFER].sum(1) for t in (39, 40))
    assert (before <= 32).all() and (after > 0.7 * 128).all()
    shrunk = Seen(Shell(wants(STAY)), machines, 45, {40: 0.5})
    assert (shrunk.values[40][:, :BUFFER].sum(1) <= 16).all()


def test_leaves_a_pipeline_alone_that_the_model_cannot_follow() -> None:
    machines = plain(4, seed=3, cpus=64)
    slow = replace(machines, demand=0.05 * machines.nominal_rate)
    seen = Seen(Shell(wants(4)), slow, 300)
    assert (seen.phases[-1] == HOLD).all()
    assert (seen.env.steady_rate > 0.97 * slow.demand).all()
    moved = np.array([seen.moved(row) for row in range(4)])
    # A look now and then may come when the model's time, which varies by 2 %, makes it seem to wait.
    assert not moved[:, :20].any() and moved.sum() <= 2


def test_holds_quietly() -> None:
    seen = Seen(Shell(wants(STAY)), plain(6, seed=4, cpus=32), 120)
    assert (seen.phases[25] == HOLD).all()
    assert not np.any([seen.moved(row)[25:] for row in range(6)])


def test_looks_again_while_holding_and_follows_the_drift() -> None:
    machines = plain(4, seed=5, cpus=64)
    seen = Seen(Shell(None), machines, 30)
    shell, env = seen.shell, seen.env
    env.work_s[:, 0] *= 2.5
    for _ in range(80):
        env.step(*shell.act(env.view))
    # What was held is no longer balanced: left alone the first stage would hold all others up.
    stale = Env(machines, np.random.default_rng(0))
    stale.work_s[:, 0] *= 2.5
    stale.step(seen.values[-1], seen.windows[-1])
    new = best(machines, env.work_s, env.base, env.cpus)[0]
    assert (env.steady_rate > 0.85 * new).all()
    assert (env.steady_rate > 1.05 * stale.steady_rate).any()


def test_jumps_in_the_middle_of_a_burst_that_does_not_follow_the_work() -> None:
    def buffers(slots: Any, pipeline: Any, mask: Any) -> Any:
        """A network that cares for nothing but a larger buffer."""
        q = np.zeros((*mask.shape, 5), np.float32)
        q[:, BUFFER, 3] = 9.0
        return q

    def after_a_change(review: int) -> Any:
        seen = Seen(Shell(buffers, ShellConfig(review=review)), plain(4, seed=5, cpus=64), 12)
        assert (seen.phases[-1] == BURST).sum() >= 3
        seen.env.work_s[:, 0] *= 2.5
        for _ in range(14):
            seen.env.step(*seen.shell.act(seen.env.view))
        assert (seen.shell.phase == BURST).sum() >= 3
        return seen.env.steady_rate

    assert (after_a_change(6) > 1.15 * after_a_change(99)).any()
    assert (after_a_change(6) > 0.98 * after_a_change(99)).all()


# -- what no network can make it do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [wants(0, slowest=True), wants(1, slowest=True), wants(0), wants(4)],
    ids=["-5 of the slowest", "-1 of the slowest", "-5 of all", "+5 of all"],
)
def test_a_harmful_network_does_little_harm(values: Values) -> None:
    machines = plain(8, seed=6, cpus=64)
    without, harmed = Seen(Shell(None), machines, 120), Seen(Shell(values), machines, 120)
    # What is clearly worse is left at once: the burst itself costs less than half.
    assert np.min(np.mean(harmed.rates[8:38], 0) / np.mean(without.rates[8:38], 0)) > 0.5
    # Its wishes are followed for a while, which costs something; then the best measured is held.
    assert np.min(np.mean(harmed.rates[60:], 0) / np.mean(without.rates[60:], 0)) > 0.9
    assert np.mean(np.array(harmed.phases[60:]) == HOLD) > 0.6
    assert np.min(np.median(harmed.rates[60:], 0) / np.median(without.rates[60:], 0)) > 0.95


def test_without_value_there_is_no_move() -> None:
    # Less than the gate is worth no change.
    def hardly(slots: Any, pipeline: Any, mask: Any) -> Any:
        return 0.001 * wants(3)(slots, pipeline, mask)

    seen = Seen(Shell(hardly), plain(3, seed=7, cpus=32), 40)
    bursts = [t for t, phase in enumerate(seen.phases) if (phase == BURST).all()]
    assert bursts and not any(seen.moved(row)[t] for row in range(3) for t in bursts)


def test_never_more_cpus_than_there_are() -> None:
    seen = Seen(Shell(a_network(1)), sample(40, np.random.default_rng(8)), 50, {20: 2.0, 35: 0.5})
    for view, value in zip(seen.views, seen.values, strict=True):
        used, least = (np.where(view.workers, units * view.weight, 0.0).sum(1) for units in (value, view.low))
        assert (used <= np.maximum(view.budget, least) + 1e-6).all()
        here = view.mask & view.alive[:, None]
        assert ((value >= view.low) & (value <= view.high))[here].all()


@pytest.mark.parametrize(
    ("network", "would"), [(a_network(2), True), (wants(4), False), (None, False)], ids=["random", "greedy", "none"]
)
def test_memory_never_passes_its_limit(network: Values | None, would: bool) -> None:
    machines = sample(50, np.random.default_rng(9))
    tight = replace(machines, base=np.full(50, 0.6), batch_memory=4.0 * machines.batch_memory)
    tight = replace(tight, worker_memory=3.0 * tight.worker_memory, leak=np.zeros(50))
    env = Env(tight, np.random.default_rng(9))
    # Those that begin near the limit are not of the shell's making.
    fits = env.view.needed(env.view.value, env.view.window) < 0.88
    assert fits.sum() > 15
    seen = Seen(Shell(network), tight, 80, seed=9)
    assert not seen.env.ran_out[fits].any()
    grown = 0
    for view, value, window in zip(seen.views, seen.values, seen.windows, strict=True):
        more = ((value > view.value) & view.mask).any(1) & fits
        assert (view.needed(value, window)[more] <= 0.9 + 1e-9).all()
        grown += int(more.sum())
    assert grown > 50
    # Without the shell's care the same wishes would not fit.
    if would:
        careless = Seen(Shell(network, ShellConfig(memory_limit=9.0)), tight, 80, seed=9)
        assert careless.env.ran_out[fits].any()


# -- one and many ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [a_network(3), a_network(4, 1.0), None], ids=["random", "wilder", "none"])
def test_one_pipeline_is_decided_for_as_it_is_among_many(values: Values | None) -> None:
    machines = sample(10, np.random.default_rng(10))
    many = Seen(Shell(values), machines, 50, {25: 2.0})
    assert values is None or any((phase == BURST).any() for phase in many.phases)
    for row in range(10):
        one = Shell(values)
        for t, view in enumerate(many.views):
            value, window = one.act(row_of(view, row))
            np.testing.assert_array_equal(value[0], many.values[t][row], err_msg=f"machine {row}, decision {t}")
            np.testing.assert_array_equal(window[0], many.windows[t][row])
            assert one.phase[0] == many.phases[t][row]


def test_slots_that_do_not_exist_do_not_matter() -> None:
    """A live pipeline has no empty slots; the network learned with them."""
    machines = sample(10, np.random.default_rng(12), stages=3)
    many = Seen(Shell(a_network(5)), machines, 40)
    for row in range(10):
        here, one = np.flatnonzero(many.views[0].mask[row]), Shell(a_network(5))
        for t, view in enumerate(many.views):
            value, _ = one.act(row_of(view, row, here))
            np.testing.assert_array_equal(value[0], many.values[t][row, here], err_msg=f"machine {row}, decision {t}")


def test_tells_the_learner_what_it_did() -> None:
    shell = Shell(wants(3))
    env = Env(plain(2, seed=14, cpus=64), np.random.default_rng(0))
    view: View = env.view
    for _ in range(12):
        view = env.view
        value, window = shell.act(view)
        env.step(value, window)
        if shell.moved is not None:
            break
    moved = shell.moved
    assert moved is not None and moved.followed.all()
    steps = np.array([-5.0, -1.0, 0.0, 1.0, 5.0])[moved.moves]
    np.testing.assert_array_equal(view.value + np.where(view.mask, steps, 0.0), value)
    assert np.take_along_axis(moved.legal, moved.moves[..., None], 2).all()


# -- what was tried and gave less --------------------------------------------------------------------------------------


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
