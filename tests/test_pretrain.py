"""Pre-training: it solves machines whose best allocation is known, repeats itself, goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune_callbacks import Clock, cli  # noqa: E402
from intune_callbacks.decide.learner import Learner, LearnerConfig, Replay  # noqa: E402
from intune_callbacks.decide.network import Network  # noqa: E402
from intune_callbacks.decide.progress import ShellConfig  # noqa: E402
from intune_callbacks.decide.shell import Shell  # noqa: E402
from intune_callbacks.errors import ConfigError, install_line  # noqa: E402
from intune_callbacks.pretrain import model_card as card  # noqa: E402
from intune_callbacks.pretrain.env import Env  # noqa: E402
from intune_callbacks.pretrain.lessons import Lessons, LessonsConfig  # noqa: E402
from intune_callbacks.pretrain.machines import SLOTS, Machines, sample  # noqa: E402
from intune_callbacks.pretrain.oracle import best  # noqa: E402
from intune_callbacks.pretrain.scenarios import Run, make  # noqa: E402
from intune_callbacks.pretrain.training import CHECKPOINT, WEIGHTS, PretrainConfig, Pretraining, pretrain  # noqa: E402

TOY_LESSONS = LessonsConfig(machines=64, decisions=32, labelled=16, fresh_share=1.0, resized_share=0.0)
TOY = PretrainConfig(
    decisions=200 * 64,
    replay=50_000,
    replay_first=1_000,
    learner=LearnerConfig(hidden=32, rate=2e-3, batch=128, follow=0.02),
    lessons=TOY_LESSONS,
)
TINY = PretrainConfig(
    seed=3,
    decisions=40 * 16,
    replay=500,
    replay_first=100,
    learner=LearnerConfig(hidden=8, batch=16),
    lessons=LessonsConfig(machines=16, decisions=31, labelled=4, fresh_share=1.0, resized_share=0.0),
    eval_static=0,
    eval_resize=0,
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


def weights(network: Network) -> dict[str, Any]:
    return {name: getattr(network, name) for name in ("w1", "b1", "w2", "b2", "w3", "b3")}


def same(one: Network, other: Network) -> bool:
    return all((a == b).all() for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


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


# -- what it writes --------------------------------------------------------------------------------------------------


def test_card_says_what_the_numbers_say(tmp_path: Path) -> None:
    network = pretrain(replace(TINY, eval_static=2), tmp_path, date="2026-01-31")
    assert same(network, Network.load(tmp_path / WEIGHTS))
    numbers, text = json.loads((tmp_path / "card.json").read_text()), (tmp_path / "card.md").read_text()
    assert numbers["date"] == "2026-01-31"
    assert numbers["training"]["seed"] == 3
    assert numbers["config"]["learner.hidden"] == 8
    assert set(numbers["versions"]) >= {"python", "torch", "numpy"}
    assert numbers["population"]["shares"]["several stages share one lock"] == pytest.approx(0.2, abs=0.04)
    (result,) = numbers["results"]
    assert (result["scenario"], result["machines"], result["seed"]) == ("static", 2, 5001)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["DQN", "jump + hold", "even split"]
    assert rows["even split"]["mean"] < rows["jump + hold"]["mean"] <= 1.0
    assert rows["even split"]["move_share"] == 0.0
    pairs = {pair["against"]: pair for pair in result["paired"]}
    assert pairs["even split"]["mean"] == pytest.approx(rows["DQN"]["mean"] - rows["even split"]["mean"])
    for value in (*(row["mean"] for row in rows.values()), pairs["jump + hold"]["low"]):
        assert f"| {value:.3f} |" in text
    assert card.text(numbers) == text


def test_fewer_than_100_kb() -> None:
    network = Learner().online.network()
    assert sum(values.nbytes for values in weights(network).values()) < 98_000


def test_score_by_hand() -> None:
    rate = np.zeros((20, 2))
    rate[:, 0] = 0.5
    rate[10:, 0], rate[:, 1] = 1.0, 0.8
    moved = np.zeros((20, 2), bool)
    moved[9, 0] = True
    row, mean = card.score(Run(rate, moved, np.array([False, True])), np.ones((20, 2)))
    assert mean == pytest.approx([0.75, 0.8])
    assert (row["mean"], row["median"], row["oom_share"], row["move_share"]) == pytest.approx(
        (0.775, 0.775, 0.5, 0.025)
    )
    # Only one of two machines gets there: the median is never.
    assert row["decisions_to_90"] is None
    rate = np.concatenate([rate, np.ones((20, 1))], 1)
    row, _ = card.score(Run(rate, moved, np.zeros(3, bool)), np.ones((20, 3)))
    # The mean of five counts; from the eleventh decision on the rate is the oracle's: (.5 + 4) / 5 is .9.
    assert (row["decisions_to_90"], row["decisions_to_95"]) == (14, 15)


def test_paired_interval_holds_the_difference() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.uniform(0.5, 1.0, 400)
    found = card.paired(theirs + rng.normal(0.02, 0.1, 400), theirs)
    assert found["low"] < 0.02 < found["high"]
    # Twice the standard error to each side.
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.15)
    assert card.paired(theirs, theirs) == {"mean": 0.0, "low": 0.0, "high": 0.0}


# -- configuration and command ---------------------------------------------------------------------------------------


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        PretrainConfig(seed=-1, eval_static=2.5, eval_resize=-1)  # type: ignore[arg-type]
    named = [problem.split("=")[0] for problem in error.value.problems]
    assert named == ["decisions", "seed", "eval_static", "eval_resize"]
    with pytest.raises(ConfigError, match="only one"):
        PretrainConfig(decisions=100, minutes=1.0)


def test_trained_names_every_setting_but_the_evaluation() -> None:
    named = TINY.trained()
    assert named["lessons.machines"] == 16
    settings = asdict(TINY)
    of_learner, of_lessons = settings.pop("learner"), settings.pop("lessons")
    assert len(named) == len(settings) - 3 + len(of_learner) + len(of_lessons)


def test_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "--decisions", "512", "--seed", "7", "--eval-static", "0", "--eval-resize", "0"]
    assert cli.main([*words, "--out", str(tmp_path), "--date", "2026-01-31"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "512 decisions" in printed and "updates, loss" in printed and "min left" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "card.md", CHECKPOINT, WEIGHTS]
    assert json.loads((tmp_path / "card.json").read_text())["training"]["seed"] == 7
    assert cli.main([*words, "--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert cli.main([*words, "--out", str(tmp_path), "--resume"]) == 0


def test_without_torch_the_error_is_the_line_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "intune_callbacks.pretrain.training")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["pretrain", "--quick", "--out", str(tmp_path)]) == 2
    assert f"torch is not installed; run: {install_line('lightning')}" in capsys.readouterr().err
