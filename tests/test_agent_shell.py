"""The shell around the network: its phases, what it does by itself, and what no network can make it do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from views import Seen, a_network, order, plain, roomy, row_of, wants

from intune_callbacks.decide.moves import STAY
from intune_callbacks.decide.network import Values, shipped
from intune_callbacks.decide.progress import BURST, CONFIRM, HOLD, JUMP, ShellConfig
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.machines import BUFFER, sample
from intune_callbacks.pretrain.oracle import best

# -- the phases --------------------------------------------------------------------------------------------------------


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
        """A network that cares for nothing but a smaller buffer."""
        q = np.zeros((*mask.shape, 5), np.float32)
        q[:, BUFFER, 1] = 9.0
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
