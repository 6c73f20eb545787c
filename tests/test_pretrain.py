"""Pre-training: it solves machines whose best allocation is known, repeats itself, goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pretrain_toys import TINY, same  # noqa: E402

from intune_callbacks import Clock  # noqa: E402
from intune_callbacks.decide.learner import Learner, LearnerConfig, Replay  # noqa: E402
from intune_callbacks.decide.network import Network  # noqa: E402
from intune_callbacks.decide.progress import ShellConfig  # noqa: E402
from intune_callbacks.decide.shell import Shell  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402
from intune_callbacks.pretrain.env import Env  # noqa: E402
from intune_callbacks.pretrain.lessons import Lessons, LessonsConfig  # noqa: E402
from intune_callbacks.pretrain.machines import SLOTS, Machines, sample  # noqa: E402
from intune_callbacks.pretrain.oracle import best  # noqa: E402
from intune_callbacks.pretrain.scenarios import make  # noqa: E402
from intune_callbacks.pretrain.training import CHECKPOINT, WEIGHTS, PretrainConfig, Pretraining, pretrain  # noqa: E402

TOY_LESSONS = LessonsConfig(machines=64, decisions=32, labelled=16, fresh_share=1.0, resized_share=0.0)
TOY = PretrainConfig(
    decisions=200 * 64,
    replay=50_000,
    replay_first=1_000,
    learner=LearnerConfig(hidden=32, rate=2e-3, batch=128, follow=0.02),
    lessons=TOY_LESSONS,
)


def toys(machines: int, rng: np.random.Generator) -> Machines:
    """Return machines of two stages without noise, locks, limits or bursts: the best allocation is the balanced one."""
    none, each = np.zeros(machines), np.zeros((machines, 6))
    drawn = sample(machines, rng, stages=2, cpus=16, plain=True)
    calm = {
        "rate_noise": none,
        "leak": none,
        "resize_cost": none,
        "burst": none + 1e-9,
        "stage_noise": each,
        "cv": each,
    }
    return replace(drawn, **calm, has_buffer=np.zeros(machines, bool))  # type: ignore[arg-type]


@lru_cache
def judged() -> tuple[Machines, Any]:
    machines = toys(24, np.random.default_rng(777))
    return machines, best(machines, machines.work_s, machines.base, machines.cpus)[0]


def fraction_of_best(network: Network, uneven: bool) -> float:
    """Return the mean fraction of the oracle reached by the network's moves alone: no jump, no look at the curves."""
    machines, oracle = judged()
    env = Env(machines, np.random.default_rng(1), mixed=uneven)
    shell = Shell(network, ShellConfig(jumps=(-1,), look=10**9, review=10**9))
    for _ in range(50):
        env.step(*shell.act(env.view))
    return float((env.steady_rate / oracle).mean())


def ticking(seconds: float) -> Clock:
    """Return a clock that is `seconds` later at every look."""
    steps = count()
    return Clock(wall=lambda: seconds * next(steps), cpu=lambda: 0.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- it learns -------------------------------------------------------------------------------------------------------


def test_exploring_moves_something_and_repeats_itself() -> None:
    network = Learner(LearnerConfig(hidden=8)).online.network()

    def moves(explore: float, seed: int = 1) -> Any:
        lessons, replay = Lessons(network, TINY.lessons, np.random.default_rng(seed)), Replay(300, SLOTS)
        lessons.explore = explore
        for _ in range(20):
            lessons.step(replay)
        return replay.arrays["moves"]

    assert moves(0.5).any() and (moves(0.5) == moves(0.5)).all()
    assert (moves(0.5) != moves(0.0)).any() and (moves(0.5) != moves(0.5, seed=2)).any()


@pytest.mark.parametrize("teach", [0.0, 1.0], ids=["from rewards alone", "and from the known worth of single moves"])
def test_solves_toy_machines(teach: float) -> None:
    lessons = replace(TOY_LESSONS, labelled=16 if teach else 0)
    training = Pretraining(replace(TOY, learner=replace(TOY.learner, teach=teach), lessons=lessons), draw=toys)
    untrained = training.learner.online.network()
    while training.share < 1.0:
        training.step()
    trained = training.learner.online.network()
    for uneven in (False, True):
        assert fraction_of_best(untrained, uneven) < 0.85
        assert fraction_of_best(trained, uneven) > 0.97


def test_no_seed_trains_on_the_machines_that_are_compared_on() -> None:
    trained = Pretraining(replace(TINY, seed=5001)).lessons.env.machines
    held_out = make("static", 16, 5001)
    assert not np.isin(trained.burst, held_out.burst).any()


def test_schedule_falls_in_straight_lines() -> None:
    training = Pretraining(TINY)
    assert (training.explore, training.rate) == (0.6, 2e-3)
    training.decisions = 160
    assert (training.share, training.explore, training.rate) == pytest.approx((0.25, 0.3, 1.5e-3))
    training.decisions = 640
    assert (training.share, training.explore, training.rate) == pytest.approx((1.0, 0.05, 0.06e-3))


def test_minutes_are_those_of_the_clock() -> None:
    # Two looks at the clock per step: every step takes one second.
    training = Pretraining(replace(TINY, decisions=None, minutes=0.5), ticking(1.0))
    steps = 0
    while training.share < 1.0:
        training.step()
        steps += 1
    assert steps == 30
    assert training.decisions == 30 * 16
    assert 0 < training.updates < 30


# -- it repeats itself and goes on -----------------------------------------------------------------------------------


def test_seed_and_decisions_decide_the_weights(tmp_path: Path) -> None:
    one, again = pretrain(TINY, tmp_path / "one"), pretrain(replace(TINY), tmp_path / "again")
    assert same(one, again)
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "again" / WEIGHTS).read_bytes()
    assert not same(one, pretrain(replace(TINY, seed=4), tmp_path / "other"))
    assert not same(one, Learner(TINY.learner, TINY.seed).online.network())


def test_threads_of_the_program_stay_as_they_were(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    pretrain(TINY, tmp_path / "out")
    assert torch.get_num_threads() == 2


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, first, second = (Pretraining(TINY) for _ in range(3))
    for _ in range(25):
        first.step()
    assert first.updates > 0
    first.save(tmp_path / CHECKPOINT)
    second.load(tmp_path / CHECKPOINT)
    for name in ("decisions", "updates", "share", "explore", "rate", "loss"):
        assert getattr(first, name) == getattr(second, name)
    assert same(first.learner.online.network(), second.learner.online.network())
    assert same(first.learner.target.network(), second.learner.target.network())
    steps = [float(state["step"]) for state in second.learner.optimizer.state_dict()["state"].values()]
    assert set(steps) == {float(first.updates)}
    # Nothing is learned and nothing counted before the replay holds what it held.
    second.step()
    assert (second.decisions, second.updates) == (first.decisions, first.updates)
    assert "refilling the replay" in second.line()
    while second.replay.size < first.replay.size:
        assert second.updates == first.updates
        second.step()
    for training in (whole, second):
        while training.share < 1.0:
            training.step()
    assert (second.decisions, second.updates) == (whole.decisions, whole.updates)
    assert second.refilled >= 16 * 10
    assert not same(first.learner.online.network(), second.learner.online.network())


def test_machines_after_a_resume_are_new_ones(tmp_path: Path) -> None:
    def errors(env: Env) -> Any:
        """Return the errors of measured sizes, which only the machines' own random stream decides."""
        return env.view.unit_memory[:, 0] / (env.machines.worker_memory + env.machines.item_memory)[:, 0]

    first, second = Pretraining(TINY), Pretraining(TINY)
    seen = [first.lessons.env]
    for _ in range(35):
        first.step()
    seen.append(first.lessons.env)
    assert seen[0] is not seen[1]
    first.save(tmp_path / CHECKPOINT)
    second.load(tmp_path / CHECKPOINT)
    now = second.lessons.env
    for before in seen:
        assert not np.isclose(errors(now), errors(before), rtol=1e-9).any()
        assert not np.isin(now.machines.burst, before.machines.burst).any()


def test_resume_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every look at the clock is half a minute later: a checkpoint after every step.
    steps, step = count(1), Pretraining.step

    def interrupted(training: Pretraining) -> None:
        if next(steps) == 20:
            raise KeyboardInterrupt
        step(training)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain(TINY, tmp_path, clock=ticking(30.0))
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    pretrain(TINY, tmp_path, resume=True)
    written = json.loads((tmp_path / "card.json").read_text())["training"]
    assert written["decisions of single machines"] == 640
    assert written["decisions repeated after interruptions"] > 0


def test_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    Pretraining(TINY).save(tmp_path / CHECKPOINT)
    other = replace(TINY, seed=4, learner=replace(TINY.learner, hidden=9), eval_seed=1)
    with pytest.raises(ConfigError) as error:
        pretrain(other, tmp_path, resume=True)
    assert len(error.value.problems) == 2
    assert "learner.hidden=9" in str(error.value)
    assert "was made with 8" in str(error.value)


def test_finished_work_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        pretrain(TINY, tmp_path, resume=True)
    (tmp_path / WEIGHTS).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"already holds weights\.npz"):
        pretrain(TINY, tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == b"mine"
