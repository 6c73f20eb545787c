"""The paper-literal agent: its masks, its reward, its file, and that its learning learns."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies.literal import (
    LiteralDQN,
    LiteralNetwork,
    Seen,
    allowed,
    draw_constants,
    look,
    moves_of,
    reward,
)
from intune_callbacks.decide.moves import MOVES
from intune_callbacks.decide.view import View
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.machines import BUFFER, Machines, sample

pytest.importorskip("torch")
from benchmarks.policies.literal_train import LiteralConfig, LiteralLearner, TunedLiteralDQN, pretrain

TINY = LiteralConfig(hidden=16, machines=16, decisions=16, batch=32)


def random_network(r: int, seed: int) -> LiteralNetwork:
    rng = np.random.default_rng(seed)
    shapes = ((6, 8), (8,), (8, 8), (8,), (8, 5**r), (5**r,))
    return LiteralNetwork(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


def start(count: int = 40, seed: int = 1) -> Env:
    return Env(sample(count, np.random.default_rng(seed)), np.random.default_rng(seed), {15: 0.5, 30: 2.0})


def used(view: View) -> np.ndarray:
    return np.asarray((view.value * view.weight).sum(1))


def test_joint_actions_are_masked_by_the_cap_and_the_range() -> None:
    env = start()
    rows = np.flatnonzero(env.machines.stages == 2)
    seen = look(env.view, rows, 3, draw_constants(len(env), np.random.default_rng(0)))
    ok = allowed(seen.legal, seen.weight, seen.free_cpus)
    units = np.stack([env.view.value[rows, 0], env.view.value[rows, 1], env.view.value[rows, BUFFER]], 1)
    can_buffer = env.machines.has_buffer[rows]
    for k, row in enumerate(rows):
        for action, moves in enumerate(itertools.product(MOVES, repeat=3)):
            assert (moves_of(np.array([action]), 3)[0] == moves).all()
            after = units[k] + moves
            fits = (after[:2] * env.view.weight[row, :2]).sum() <= env.view.budget[row] + 1e-9
            fits &= (after >= 1).all() and (can_buffer[k] or moves[2] == 0)
            assert ok[k, action] == fits, (row, moves)
    assert ok.any(1).all() and not ok.all()


def test_the_cap_holds_for_any_weights_and_a_shrunk_machine_gives_back_at_once() -> None:
    env = start()
    agent = LiteralDQN({r: random_network(r, r) for r in (3, 4, 5)})
    small = env.machines.stages <= 4
    for _ in range(40):
        before = env.view
        value, window = agent.act(before)
        assert window is None
        assert (value >= before.low)[before.mask].all()
        spent = (value * before.weight).sum(1)
        # What five less of every stage gives back; more is not asked of one decision.
        can = np.select([before.value > 5, before.value > 1], [5.0, 1.0]) * before.workers
        at_most = np.maximum(before.budget, used(before) - (can * before.weight).sum(1))
        assert (spent <= at_most + 1e-9)[small].all()
        env.step(value)
    assert env.decision == 40


def test_machines_of_more_slots_keep_the_even_split() -> None:
    env = start()
    agent = LiteralDQN({r: random_network(r, r) for r in (3, 4, 5)})
    value, _ = agent.act(env.view)
    value, _ = agent.act(env.step(value))
    large = env.machines.stages > 4
    assert large.any()
    assert (value[large, :BUFFER] == env.workers[large]).all()
    assert (value[~large, :BUFFER] != env.workers[~large]).any(1).mean() > 0.5


def test_reward_is_relative_throughput_and_falls_to_nothing_at_full_memory() -> None:
    view = start(4).view
    view = replace(view, rate=np.array([2.0, 2.0, 2.0, 2.0]), memory=np.array([0.0, 0.5, 1.0, 0.2]))
    view = replace(view, alive=np.array([True, True, True, False]))
    assert reward(view, np.array([1.0, 2.0, 1.0, 1.0])) == pytest.approx([2.0, 0.5, 0.0, 0.0])
    lower = [float(reward(replace(view, memory=np.full(4, m)), np.ones(4))[0]) for m in (0.9, 0.99, 0.999)]
    assert lower == pytest.approx([0.2, 0.02, 0.002])


def test_state_is_the_six_factors_and_nothing_of_single_stages() -> None:
    env = start()
    rows, constants = np.flatnonzero(env.machines.stages == 3), draw_constants(len(env), np.random.default_rng(0))
    state = look(env.view, rows, 4, constants).state
    assert state.shape == (len(rows), 6) and np.isfinite(state).all()
    blind = replace(env.view, work_s=env.view.work_s * 3, busy=env.view.busy * 0, fill=env.view.fill * 0)
    assert (look(blind, rows, 4, constants).state == state).all()
    factors = {"rate": 0, "memory": 2, "demand": 3}
    for name, index in factors.items():
        other = look(replace(env.view, **{name: getattr(env.view, name) * 0.5}), rows, 4, constants).state
        assert [k for k in range(6) if (other[:, k] != state[:, k]).any()] == [index]
    assert (look(env.view, rows, 4, constants * 1.1).state != state).any(0).tolist() == [False] * 4 + [True] * 2


def test_same_seed_same_weights() -> None:
    a = pretrain(3, 1, 30, TINY)
    pytest.importorskip("torch").rand(1)  # what else draws random numbers in the process does not matter
    b, c = pretrain(3, 1, 30, TINY), pretrain(3, 2, 30, TINY)
    assert (a.w3 == b.w3).all() and (a.w1 == b.w1).all()
    assert (a.w3 != c.w3).any()
    assert (a.updates, a.seed) == (30, 1)
    assert a.decisions % 16 == 0 and a.decisions >= 30 * 16


def test_saved_agent_loads_and_runs_on_mixed_machines(tmp_path: Path) -> None:
    agent = LiteralDQN({3: pretrain(3, 0, 5, TINY), 4: pretrain(4, 0, 6, TINY)})
    agent.save(tmp_path / "literal.npz")
    loaded = LiteralDQN.load(tmp_path / "literal.npz")
    assert {r: n.updates for r, n in loaded.networks.items()} == {3: 5, 4: 6}
    assert loaded.networks[4].w3 == pytest.approx(agent.networks[4].w3, rel=1e-3, abs=1e-4)
    env, again = start(), start()
    for _ in range(5):
        value, _ = loaded.act(env.view)
        env.step(value)
        assert np.isfinite(value).all()
        again.step(LiteralDQN.act(loaded, again.view)[0])
    assert (env.workers == again.workers).all()


def test_shipped_weights_are_small_and_say_how_they_were_trained() -> None:
    from benchmarks.literal import WEIGHTS

    assert WEIGHTS.stat().st_size < 1_500_000
    agent, env = LiteralDQN.load(WEIGHTS), start()
    assert {r: network.w3.shape[1] for r, network in agent.networks.items()} == {3: 125, 4: 625, 5: 3125}
    assert all(network.decisions > 1_000_000 for network in agent.networks.values())
    moved = [env.step(agent.act(env.view)[0]) for _ in range(10)]
    assert all(np.isfinite(view.value).all() for view in moved)


def test_a_file_that_is_not_the_agent_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", w1=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz: expected networks of r"):
        LiteralDQN.load(tmp_path / "other.npz")
    LiteralDQN({3: random_network(4, 0)}).save(tmp_path / "wrong.npz")
    with pytest.raises(ValueError, match=r"r = 3: 6 -> 625, expected 6 -> 125"):
        LiteralDQN.load(tmp_path / "wrong.npz")


def test_only_small_heads_can_be_trained() -> None:
    with pytest.raises(ValueError, match="r is 6, expected 3, 4 or 5"):
        pretrain(6, 0, 1)


def toy(count: int, rng: np.random.Generator) -> Machines:
    """The same machine many times: 16 CPUs, the second stage four times as heavy as the first."""
    one = sample(1, np.random.default_rng(0), stages=2, cpus=16, plain=True).take(np.zeros(count, int))
    work_s = np.zeros_like(one.work_s)
    work_s[:, :2] = 0.4, 1.6
    return replace(one, work_s=work_s, has_buffer=np.zeros(count, bool), base=np.full(count, 0.3), cv=one.cv * 0.0)


def mean_rate(agent: LiteralDQN) -> float:
    env = Env(toy(8, np.random.default_rng(0)), np.random.default_rng(5))
    rates = [env.step(agent.act(env.view)[0]).rate.mean() for _ in range(40)]
    return float(np.mean(rates[10:]))


def test_learning_solves_a_toy_machine() -> None:
    config = LiteralConfig(hidden=32, machines=32, decisions=32, batch=64, resized=0.0, follow=0.02)
    learned = mean_rate(LiteralDQN({3: pretrain(3, 0, 1200, config, toy)}))
    even = mean_rate(LiteralDQN({}))
    untrained = [mean_rate(LiteralDQN({3: random_network(3, seed)})) for seed in range(5)]
    assert learned > 1.2 * even
    assert learned > 1.2 * float(np.mean(untrained))


def test_values_settle_where_the_bellman_equation_says() -> None:
    learner = LiteralLearner(1, LiteralConfig(hidden=16, discount=0.5, follow=0.05), 0)
    actions, legal = np.arange(5).repeat(8), np.ones((40, 1, 5), bool)
    legal[..., 4] = False
    seen = Seen(np.ones((40, 6), np.float32), legal, np.ones((40, 1)), np.full(40, 9.0))
    learner.remember(seen, actions, actions.astype(float), seen)
    for _ in range(800):
        learner.update(32, 3e-3)
    # Q(a) = (1 - 0.5) a + 0.5 max Q; the best, a = 4, may not be chosen next: max Q = Q(3) = 3.
    assert learner.values(seen.state)[0].tolist() == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.5], abs=0.1)
    assert (learner.choose(seen, 0.0) == 3).all()


def test_tuning_online_changes_a_copy_and_learns_from_what_happened() -> None:
    network = random_network(3, 0)
    kept = network.w3.copy()
    agent, frozen = TunedLiteralDQN({3: network}, explore=0.0, rate=1e-2), LiteralDQN({3: network})
    env = Env(toy(8, np.random.default_rng(0)), np.random.default_rng(5))
    for _ in range(20):
        env.step(agent.act(env.view)[0])
    assert (network.w3 == kept).all()
    tuned, as_given = mean_rate(agent), mean_rate(frozen)
    assert tuned != as_given
