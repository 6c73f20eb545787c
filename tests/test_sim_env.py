"""The simulated machines: what a policy can and cannot change, their oracle, and how they are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from views import plain, quiet, roomy

from intune_callbacks.pretrain.env import DOWN, Env, even_split
from intune_callbacks.pretrain.flow import flow, memory
from intune_callbacks.pretrain.machines import BATCH, BUFFER, DISK, SLOTS, UDF, Machines, sample
from intune_callbacks.pretrain.oracle import best, spread

# -- env -------------------------------------------------------------------------------------------------------------


def played(machines: Machines, decide: Any, decisions: int = 60, seed: int = 5, sizes: Any = None) -> Env:
    env = Env(machines, np.random.default_rng(seed), sizes)
    for _ in range(decisions):
        env.step(decide(env))
    return env


def keep(env: Env) -> Any:
    return env.view.value


def even(env: Env) -> Any:
    """Return an even split with a buffer of two batches."""
    return np.concatenate([even_split(env.machines, env.cpus), np.full((len(env), 1), 2.0)], 1)


def test_drift_does_not_depend_on_the_policy() -> None:
    machines = replace(sample(30, np.random.default_rng(1)), jump=np.full((30, 6), 0.05))
    rng = np.random.default_rng(9)

    def wild(env: Env) -> Any:
        return rng.integers(1, 400, (len(env), SLOTS)).astype(float)

    one, two = played(machines, keep), played(machines, wild)
    assert two.ran_out.any() and not (one.view.value == two.view.value).all()
    np.testing.assert_array_equal(one.work_s, two.work_s)
    np.testing.assert_array_equal(one.base, two.base)
    assert (one.work_s != played(machines, keep, seed=6).work_s).any()
    assert (one.work_s != machines.work_s)[machines.drift > 0.0].all()


def test_the_same_seed_gives_the_same_run() -> None:
    machines = sample(10, np.random.default_rng(1))
    one, two = played(machines, keep).view, played(machines, keep).view
    np.testing.assert_array_equal(one.rate, two.rate)
    np.testing.assert_array_equal(one.work_s, two.work_s)


def test_out_of_memory_restarts_from_the_even_split() -> None:
    machines = replace(plain(2, seed=2, cpus=16), has_buffer=np.ones(2, bool))
    machines = replace(machines, batch_memory=np.full(2, 0.02))
    env = Env(machines, np.random.default_rng(0))
    greedy = even(env)
    # The pipeline is not faster than its model, so its buffer is empty; a model that takes little leaves it full.
    env.machines = replace(machines, demand=0.2 * machines.nominal_rate)
    greedy[0, BUFFER] = 200.0
    view = env.step(greedy)
    assert env.ran_out.tolist() == [1, 0] and view.alive.tolist() == [False, True]
    assert env.rate[0] == 0.0 and env.rate[1] > 0.0
    assert env.workers[0].tolist() == even_split(machines, env.cpus)[0].tolist() and env.buffer[0] < 200.0
    downs = 1
    while not env.step(env.view.value).alive[0]:
        downs += 1
    assert downs == DOWN
    assert env.rate[0] > 0.0 and env.ran_out.tolist() == [1, 0]


def test_memory_leaks_until_it_is_out() -> None:
    machines = plain(1, seed=2, cpus=16)
    assert played(replace(machines, leak=np.full(1, 0.01)), even, 90).ran_out[0] >= 1
    assert not played(machines, even, 90).ran_out.any()


def test_resizes_follow_the_schedule() -> None:
    machines = plain(3, seed=3, cpus=32)
    env = Env(machines, np.random.default_rng(0), {5: 2.0, 8: 0.5})
    seen = [float(env.step(even(env)).cpus[0]) for _ in range(9)]
    assert seen == [32.0] * 4 + [64.0] * 3 + [16.0] * 2


def test_a_change_costs_something_once() -> None:
    machines = quiet(plain(1, seed=4, cpus=32), resize_cost=0.05)
    env = Env(machines, np.random.default_rng(0))
    env.step(keep(env))
    assert env.rate[0] == env.steady_rate[0]
    more = env.view.value.copy()
    more[0, 0] += 10.0
    env.step(more)
    # One stage and ten workers: three times the cost.
    assert env.rate[0] == pytest.approx(0.85 * env.steady_rate[0])
    env.step(more)
    assert env.rate[0] == env.steady_rate[0]


def test_settle_noise_is_there_only_in_the_decision_of_a_change() -> None:
    machines = quiet(plain(300, seed=5, cpus=32), settle_noise=0.2, resize_cost=1e-6)
    env = Env(machines, np.random.default_rng(0))

    def error() -> Any:
        return np.log(env.view.rate / env.rate)

    env.step(keep(env))
    assert np.abs(error()).max() < 1e-9
    more = env.view.value.copy()
    more[:150, 0] += 1.0
    env.step(more)
    assert error()[:150].std() == pytest.approx(0.2, rel=0.2)
    assert np.abs(error()[150:]).max() < 1e-9
    env.step(more)
    assert np.abs(error()).max() < 1e-9


def test_measurements_are_the_truth_and_noise() -> None:
    machines = roomy(sample(400, np.random.default_rng(6), plain=True, cpus=32))
    view = Env(machines, np.random.default_rng(0)).view
    here = machines.mask
    error = np.log(view.work_s[:, :BUFFER][here] / machines.work_s[here])
    assert abs(error.mean()) < 0.02 and 0.02 < error.std() < 0.2
    assert np.log(view.demand / machines.demand).std() == pytest.approx(0.02, rel=0.2)
    assert (view.value[:, :BUFFER] == even_split(machines, machines.cpus)).all()
    still = Env(quiet(machines), np.random.default_rng(0)).view
    np.testing.assert_allclose(still.work_s[:, :BUFFER][here], machines.work_s[here], rtol=0.05)


def test_mixed_starts_are_random_and_fit() -> None:
    machines = sample(200, np.random.default_rng(7))
    env = Env(machines, np.random.default_rng(0), mixed=True)
    other = (env.workers != even_split(machines, machines.cpus)).any(1)
    assert 0.3 < other.mean() < 0.6
    assert (env.workers.sum(1)[other] <= machines.cpus[other]).all()
    assert ((env.workers >= 1.0) == machines.mask).all()
    assert (env.view.memory < 1.0).all()


# -- oracle ----------------------------------------------------------------------------------------------------------


def test_oracle_finds_the_closed_form_of_plain_machines() -> None:
    machines = replace(plain(10, seed=8, cpus=128), cv=np.zeros((10, 6)), has_buffer=np.ones(10, bool))
    rate, workers, _, _ = best(machines, machines.work_s, machines.base, machines.cpus)
    balanced = spread(machines.work_s, machines, machines.cpus)
    ideal = np.where(machines.mask, balanced / np.maximum(machines.work_s, 1e-12), np.inf).min(1)
    assert (rate / ideal).min() > 0.9 and (rate / ideal).max() < 1.1
    assert ((workers * machines.share).sum(1) <= machines.cpus + 1e-9).all()


def test_nobody_near_the_oracle_is_clearly_better() -> None:
    machines = sample(12, np.random.default_rng(9))
    rate, workers, windows, buffer = best(machines, machines.work_s, machines.base, machines.cpus)
    rng, tries = np.random.default_rng(10), 200
    shape = (12, tries, 6)
    step = np.where(rng.random(shape) < 0.5, rng.integers(-4, 5, shape), 0)
    factor = np.exp(rng.normal(0.0, 0.15, shape))
    tried = np.where(machines.mask[:, None], np.maximum(1.0, np.round(workers[:, None] * factor) + step), 0.0)
    wide = np.maximum(tried, np.round(windows[:, None] * np.exp(rng.normal(0.0, 0.2, (12, tries, 1)))))
    deep = np.maximum(1.0, np.round(buffer[:, None] * np.exp(rng.normal(0.0, 0.4, (12, tries)))))
    deep = np.where(machines.has_buffer[:, None], deep, buffer[:, None])
    fits = (tried * machines.share[:, None]).sum(-1) <= machines.cpus[:, None]
    fits &= memory(machines, machines.base, tried, wide, deep, 1.0) < 0.93
    assert fits.sum(1).min() > 10
    got = flow(machines, machines.work_s, tried, wide, deep, machines.cpus).rate
    assert np.where(fits, got, 0.0).max() > 0.0
    assert (np.where(fits, got, 0.0).max(1) / rate).max() < 1.02


# -- population ------------------------------------------------------------------------------------------------------


def test_shares_of_the_population() -> None:
    machines = sample(3000, np.random.default_rng(11))
    nominal, udf = machines.nominal_rate, (machines.kind == UDF) & machines.mask
    serial = machines.serial[udf]
    shares = {
        "lock": ((machines.lock > 0.0).any(1).mean(), 0.2),
        "GIL-like": ((serial >= 0.15).mean(), 0.25),
        "disk": ((machines.io_rate < 10.0 * nominal).mean(), 0.4),
        "interference": ((machines.interference > 0.0).mean(), 0.5),
        "model": ((machines.demand < 10.0 * nominal).mean(), 0.5),
        "buffer": (machines.has_buffer.mean(), 0.8),
        "256 CPUs": ((machines.cpus == 256).mean(), 0.05),
    }
    for name, (got, wanted) in shares.items():
        assert got == pytest.approx(wanted, abs=0.03), name
    # A lock is shared: by at least two stages of most machines that have one.
    holders = (machines.lock > 0.0).sum(1)
    assert (holders[holders > 0] >= 2).mean() > 0.5
    assert not machines.lock[~(udf | (machines.kind == BATCH))].any()
    assert (machines.share[(machines.kind != DISK)] == 1.0).all()


def test_sample_keeps_to_what_is_asked_for() -> None:
    machines = sample(200, np.random.default_rng(12), stages=4, cpus=64)
    assert (machines.stages == 4).all() and (machines.cpus == 64.0).all()
    assert (machines.work_s[machines.mask] > 0.0).all() and not machines.work_s[~machines.mask].any()
    assert (sample(200, np.random.default_rng(13), stages=6, cpus=8).stages == 4).all()
    bare = sample(200, np.random.default_rng(12), plain=True)
    for name in ("serial", "coherence", "lock", "drift", "convoy", "interference"):
        assert not getattr(bare, name).any(), name


def test_seed_decides_the_machines() -> None:
    one, same, other = (sample(5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (one.work_s == same.work_s).all() and (one.work_s != other.work_s).any()
    assert (one.take(slice(2, 3)).work_s == one.work_s[2:3]).all() and len(one.take(np.array([0, 4]))) == 2
