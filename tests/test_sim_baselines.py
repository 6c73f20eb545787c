"""The policies others use, and the product's scalar policies, on simulated machines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.policies.hill_climb import HillClimb
from benchmarks.policies.observe import MEMORY_BYTES, Scalar, arrays, observe
from benchmarks.policies.others import Autotune, PlumberLP, Unoptimized, WaterFilling, output_time, water_fill
from intune_callbacks.decide.dqn import ModelJump
from intune_callbacks.decide.live import view_of
from intune_callbacks.decide.policies import EvenSplit
from intune_callbacks.decide.view import Floats, View
from intune_callbacks.measure.counts import StageCounts
from intune_callbacks.pretrain.env import DOWN, Env
from intune_callbacks.pretrain.machines import BUFFER, Machines, sample
from intune_callbacks.pretrain.scenarios import Controller
from intune_callbacks.types import Observation, Policy, Proposal


def drive(controller: Controller, machines: Machines, decisions: int, sizes: dict[int, float] | None = None) -> Env:
    """Run a controller and return the environment it left behind."""
    env = Env(machines, np.random.default_rng(3), sizes)
    for _ in range(decisions):
        env.step(*controller.act(env.view))
    return env


def a_view(count: int = 4, seed: int = 0, **given: Any) -> View:
    return Env(sample(count, np.random.default_rng(seed), **given), np.random.default_rng(seed)).view


def busy(view: View, value: Floats) -> Floats:
    """CPUs all workers together would occupy, [N]."""
    return np.where(view.workers, value * view.weight, 0.0).sum(1)


def test_water_filling_is_the_best_split_there_is() -> None:
    view = a_view(12, stages=3, cpus=8)
    cost_s = np.where(view.workers, view.work_s, 0.0)
    n = water_fill(cost_s, view)
    assert (busy(view, n) <= view.budget + 1e-9).all()
    for row in range(12):
        got = (n[row, :3] / cost_s[row, :3]).min()
        split = [s for s in itertools.product(range(1, 25), repeat=3) if np.dot(s, view.weight[row, :3]) <= 8.0 + 1e-9]
        assert got == pytest.approx(max((np.array(s) / cost_s[row, :3]).min() for s in split))


def test_output_time_is_the_queue_of_its_source() -> None:
    work_s = np.array([2.0, 3.0, 0.0])
    # The second stage takes 3 s and finds its queue of one place empty with (1 - 1.5) / (1 - 1.5^2) = .4.
    assert output_time(work_s, np.array([1.0, 1.0, 0.0])) == pytest.approx(3.0 + 0.4 * 2.0)
    # As fast as its input: one in (places + 1).
    assert output_time(np.array([2.0, 2.0]), np.array([1.0, 1.0])) == pytest.approx(2.0 + 2.0 / 2.0)
    assert output_time(np.array([2.0, 6.0]), np.array([1.0, 3.0])) == pytest.approx(2.0 + 2.0 / 4.0)
    assert output_time(work_s, np.array([100.0, 1.0, 0.0])) < 3.01


def test_unoptimized_stays_at_one_worker_each() -> None:
    env = drive(Unoptimized(), sample(5, np.random.default_rng(1)), 3)
    assert (env.workers == env.machines.mask).all()


def test_spreading_by_measured_cost_beats_the_even_split_on_plain_machines() -> None:
    machines = sample(16, np.random.default_rng(2), cpus=64, plain=True)
    even = drive(Scalar(EvenSplit), machines, 1).steady_rate
    for make, gain in ((WaterFilling, 1.2), (PlumberLP, 1.2), (Autotune, 1.05)):
        assert np.median(drive(make(), machines, 20).steady_rate / even) > gain, make.__name__


def test_only_autotune_keeps_the_size_it_was_launched_with() -> None:
    machines = sample(8, np.random.default_rng(4), cpus=16, plain=True)
    machines = replace(machines, worker_memory=0.1 * machines.worker_memory, base=np.full(8, 0.3))
    for make, grows in ((WaterFilling, True), (PlumberLP, True), (Autotune, False)):
        before = drive(make(), machines, 25, {30: 4.0}).workers.sum(1)
        after = drive(make(), machines, 45, {30: 4.0}).workers.sum(1)
        assert (bool((after > 2.0 * before).all()), bool((after > 1.5 * before).any())) == (grows, grows), make.__name__


def test_autotune_runs_out_of_memory_where_guarded_ones_do_not() -> None:
    machines = sample(8, np.random.default_rng(5), cpus=16)
    # Little is free, batches are large and the model is about as fast as the pipeline: buffers fill and empty.
    machines = replace(
        machines,
        base=np.full(8, 0.75),
        batch_memory=np.full(8, 0.004),
        demand=machines.nominal_rate * 0.7,
        has_buffer=np.ones(8, bool),
    )
    assert (drive(Autotune(), machines, 120).ran_out > 0).any()
    for make in (WaterFilling, PlumberLP, lambda: Scalar(HillClimb)):
        assert not drive(make(), machines, 120).ran_out.any()


def test_observation_keeps_the_numbers_of_the_view() -> None:
    view = a_view(6, seed=7, cpus=32)
    for row in range(6):
        seen = observe(view, row, decision=3, parts=1000.0)
        assert seen.batches / seen.elapsed_s == pytest.approx(float(view.rate[row]) * 1000.0)
        assert seen.at_s == 3.0 and seen.resources.cpus == 32.0
        assert seen.wait_frac == pytest.approx(max(0.0, 1.0 - view.rate[row] / view.demand[row]))
        counts = StageCounts()
        counts.learn(seen)
        weight = {f"s{slot}": float(view.weight[row, slot]) for slot in range(BUFFER)}
        again = view_of(seen, weight, counts.of_stages(), counts.demand, {})
        slots = np.flatnonzero(view.mask[row])
        for name in ("value", "low", "high", "weight", "window", "is_buffer"):
            np.testing.assert_array_equal(getattr(again, name)[0], getattr(view, name)[row, slots], err_msg=name)
        workers = np.flatnonzero(view.workers[row])
        for name in ("cpu_share", "busy", "fill", "unit_memory", "item_memory"):
            got, given = getattr(again, name)[0, : len(workers)], getattr(view, name)[row, workers]
            np.testing.assert_allclose(got, given, rtol=1e-6, err_msg=name)
        assert again.rate[0] / 1000.0 == pytest.approx(view.rate[row])
        assert again.demand[0] / 1000.0 == pytest.approx(view.demand[row])
        assert again.memory[0] == pytest.approx(view.memory[row], abs=2.0 / MEMORY_BYTES)
        value, window = arrays(seen.allocation, view, row)
        assert (value == view.value[row]).all() and (window == view.window[row]).all()


@pytest.mark.parametrize("make", [EvenSplit, HillClimb, ModelJump])
def test_scalar_policies_stay_within_the_budget_of_the_simulator(make: Callable[[], Policy]) -> None:
    controller = Scalar(make)
    env = Env(sample(6, np.random.default_rng(8), cpus=16), np.random.default_rng(8), {25: 2.0})
    moved = False
    for _ in range(40):
        value, window = controller.act(env.view)
        moved = moved or bool((value != env.view.value).any())
        if env.decision != 25:  # the resize itself comes after the decision
            assert (busy(env.view, value) <= env.view.budget + 1e-6).all()
        env.step(value, window)
    assert moved


class Asked:
    """Wants one worker more in its first stage at each decision; remembers how often it was asked."""

    name = "asked"

    def __init__(self) -> None:
        self.decisions = 0

    def decide(self, observation: Observation) -> Proposal:
        self.decisions += 1
        return Proposal({"s0": observation.allocation["s0"] + 1})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_a_policy_is_not_asked_while_its_change_settles_and_is_made_anew_after_a_crash() -> None:
    made: list[Asked] = []

    def make() -> Asked:
        made.append(Asked())
        return made[-1]

    machines = replace(sample(1, np.random.default_rng(9), cpus=64, stages=2), leak=np.zeros(1))
    env = Env(machines, np.random.default_rng(9))
    env.step(np.ones((1, BUFFER + 1)))
    controller = Scalar(make)
    for _ in range(6):
        env.step(*controller.act(env.view))
    assert len(made) == 1 and made[0].decisions == 3
    env.base[:] = 2.0
    env.step(*controller.act(env.view))
    env.base[:] = 0.3
    for _ in range(DOWN + 2):
        env.step(*controller.act(env.view))
    assert env.ran_out[0] == 1 and len(made) == 2


def test_hill_climb_goes_on_to_other_moves_where_growth_is_refused() -> None:
    machines = sample(12, np.random.default_rng(10), cpus=32, plain=True)
    even = drive(Scalar(EvenSplit), machines, 1).steady_rate
    # The even split leaves no CPU free: only moving workers from stage to stage can help.
    assert np.median(drive(Scalar(HillClimb), machines, 120).steady_rate / even) > 1.15
