"""Machines that stand against a tuner: what each of them does, and that a tuner survives all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from views import a_network, plain

from benchmarks.policies.sim_pipeline import SimPipeline
from intune_callbacks.config import TunerConfig
from intune_callbacks.pretrain.env import Env
from intune_callbacks.pretrain.hostile import EPOCH, KINDS, HostileEnv, draw
from intune_callbacks.pretrain.machines import SLOTS, Machines, sample
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Pipeline


def against(kinds: Collection[str], machines: Machines | None = None, seed: int = 0) -> HostileEnv:
    """Return machines of one kind, or of several at once."""
    machines = machines if machines is not None else plain(24, seed=3, cpus=32)
    hostile = draw(machines, np.random.default_rng(seed), kinds=kinds)
    return HostileEnv(machines, np.random.default_rng(seed), hostile=hostile)


def rates(env: Env, decisions: int, value: Any = None) -> Any:
    """Return the true rates, [decisions, N], of an allocation that is kept."""
    kept = env.view.value if value is None else value
    seen = []
    for _ in range(decisions):
        env.step(kept, env.view.window)
        seen.append(env.steady_rate.copy())
    return np.array(seen)


def test_without_hostility_it_is_the_plain_machine() -> None:
    machines = sample(10, np.random.default_rng(1))
    one, other = Env(machines, np.random.default_rng(0)), against((), machines)
    np.testing.assert_array_equal(rates(one, 30), rates(other, 30))
    np.testing.assert_array_equal(one.view.work_s, other.view.work_s)


def test_workers_that_were_taken_away_do_not_come_back() -> None:
    env = against(["sticky"])
    start = env.view.value
    before = rates(env, 3)[-1]
    fewer = np.where(env.view.is_buffer, start, np.maximum(1.0, np.floor(start / 4.0)))
    rates(env, 3, fewer)
    after = rates(env, 3, start)[-1]
    # All the while the numbers say that they are back. Only machines whose slowest stage is sticky show it.
    assert (env.view.value == start).all()
    assert (after < 0.5 * before).mean() > 0.3 and (after < 1.01 * before).all()
    sound = against(())
    rates(sound, 3, fewer)
    np.testing.assert_allclose(rates(sound, 3, start)[-1], before, rtol=1e-9)


def test_more_than_it_began_with_is_not_made_either() -> None:
    env = against(["sticky"])
    env.hostile.sticky[:] = env.machines.mask
    before = rates(env, 2)[-1]
    double = np.where(env.view.is_buffer, env.view.value, 2.0 * env.view.value)
    assert (rates(env, 2, double)[-1] <= 1.3 * before).all()


def test_readings_are_off_by_a_factor_that_stays() -> None:
    env, truth = against(["lies"]), against(())
    kept = env.view.value
    ratios = []
    for _ in range(20):
        env.step(kept, env.view.window)
        truth.step(kept, truth.view.window)
        ratios.append((env.view.work_s / np.maximum(truth.view.work_s, 1e-12))[env.view.workers])
    np.testing.assert_allclose(ratios[0], ratios[-1])
    assert ratios[0].min() < 0.5 and ratios[0].max() > 2.0
    np.testing.assert_array_equal(env.rate, truth.rate)


def test_it_stalls_for_many_decisions_and_comes_back() -> None:
    env = against(["stalls"])
    seen = rates(env, 300)
    stalled = seen < 0.1 * np.median(seen, 0)
    assert 0.1 < stalled.mean() < 0.8
    for row in range(len(env)):
        lengths = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], stalled[:, row], [0]]))))[::2]
        # One may run into the next, or into the end.
        assert (lengths[:-1] >= 20).all()
    assert (seen[-1] > 0.5 * np.median(seen, 0)).any()


def test_more_workers_cost_more_at_every_epoch() -> None:
    env, friendly = against(["seams"]), against(())
    kept = env.view.value
    double = np.where(env.view.is_buffer, kept, 2.0 * kept)
    lost = 1.0 / rates(env, 1)[0] - 1.0 / rates(friendly, 1)[0]
    more = 1.0 / rates(env, 1, double)[0] - 1.0 / rates(friendly, 1, double)[0]
    np.testing.assert_allclose(more, 2.0 * lost, rtol=1e-6)
    assert (lost > 0.0).all()


def test_neighbours_take_cpus_that_nobody_speaks_of() -> None:
    env = against(["neighbours"])
    seen = rates(env, 200)
    assert (env.view.cpus == env.machines.cpus).all()
    away = (seen < 0.95 * seen.max(0)).mean(0)
    # Where one stage holds up all others, CPUs are not what is short.
    assert (away > 0.1).mean() > 0.4 and (away < 0.95).all()


def test_a_share_of_the_machines_is_hostile() -> None:
    machines = sample(600, np.random.default_rng(2))
    some = draw(machines, np.random.default_rng(0), 0.3)
    odd = (
        some.sticky.any(1) | (some.wrong_s != 1.0).any(1) | (some.stall > 0) | (some.seam_s > 0) | (some.neighbours > 0)
    )
    assert 0.2 < odd.mean() < 0.3
    assert some.sticky.any() and not some.sticky[~machines.mask].any()


# -- under the real tuner ----------------------------------------------------------------------------------------------


def a_machine(seed: int = 0) -> Machines:
    return plain(1, seed=seed, stages=3, cpus=32)


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids=[*KINDS, "all at once"])
def test_the_tuner_survives(kinds: Collection[str]) -> None:
    pipeline = SimPipeline(a_machine(), hostile=kinds)
    assert isinstance(pipeline, Pipeline)
    tuner = Tuner(pipeline, TunerConfig(), probe=pipeline, clock=pipeline.clock)
    while pipeline.clock.wall() < 60.0:
        tuner.batch(pipeline.step(), samples=1)
    assert tuner.frozen is None
    assert pipeline.rate > 0.0


def test_epochs_begin_with_the_start_of_every_worker() -> None:
    pipeline = SimPipeline(a_machine(), hostile=["seams"])
    workers = sum(stage.current for stage in pipeline.stages() if stage.unit == "workers")
    assert all((stage.startup_s == pipeline.seam_s) == (stage.unit == "workers") for stage in pipeline.stages())
    took = []
    for _ in range(3 * EPOCH):
        begin_s = pipeline.clock.wall()
        totals = pipeline.step()
        took.append(pipeline.clock.wall() - begin_s)
    firsts, others = took[::EPOCH], [s for i, s in enumerate(took) if i % EPOCH]
    assert min(firsts) > workers * pipeline.seam_s > 0.0
    assert min(firsts) > max(others)
    assert totals.wait_s + totals.model_s == pytest.approx(pipeline.clock.wall())


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"sticki.*expected some of sticky"):
        SimPipeline(a_machine(), hostile=["sticki"])


# -- in the lessons ----------------------------------------------------------------------------------------------------


def rewards(**config: Any) -> Any:
    """Return the rewards of the same random moves on the same machines."""
    pytest.importorskip("torch", reason="the learner is torch's")
    from intune_callbacks.decide.learner import Replay
    from intune_callbacks.pretrain.lessons import Lessons, LessonsConfig

    network = a_network(2)
    lessons = Lessons(network, LessonsConfig(machines=32, labelled=8, **config), np.random.default_rng(4))
    replay = Replay(4000, SLOTS)
    for _ in range(30):
        lessons.step(replay)
    return replay.arrays["reward"][: replay.size]


def test_being_below_the_best_so_far_is_charged() -> None:
    free, charged = rewards(harm=0.0), rewards(harm=0.5)
    assert len(free) == len(charged) > 200
    assert (charged <= free + 1e-5).all() and (charged < free - 0.5).mean() > 0.2


def test_what_a_stall_does_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnoticed(env: HostileEnv, *moves: Any) -> Any:
        seen = step(env, *moves)
        env.shaken = np.zeros(len(env), bool)
        return seen

    kept, step = len(rewards(hostile_share=1.0)), HostileEnv.step
    monkeypatch.setattr(HostileEnv, "step", unnoticed)
    assert kept < len(rewards(hostile_share=1.0))
