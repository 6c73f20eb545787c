"""The learner: its targets by hand, its two networks against each other, its memory, and inputs nobody would expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT, features  # noqa: E402
from intune_callbacks.decide.learner import Learner, LearnerConfig, Replay, SharedQ  # noqa: E402
from intune_callbacks.decide.moves import MOVES, STAY, Moved  # noqa: E402
from intune_callbacks.decide.network import PARAMETERS, Network  # noqa: E402
from intune_callbacks.decide.progress import ShellConfig  # noqa: E402
from intune_callbacks.decide.shell import Shell  # noqa: E402
from intune_callbacks.decide.target import target  # noqa: E402
from intune_callbacks.pretrain.env import Env  # noqa: E402
from intune_callbacks.pretrain.lessons import Lessons, LessonsConfig  # noqa: E402
from intune_callbacks.pretrain.machines import SLOTS, sample  # noqa: E402

UP = 3


def states(rng: np.random.Generator, count: int, slots: int) -> tuple[Any, Any, Any]:
    mask = rng.random((count, slots)) < 0.7
    mask[0] = False
    mask[1] = True
    slot = rng.normal(size=(count, slots, len(OF_SLOT))).astype(np.float32)
    return slot, rng.normal(size=(count, len(OF_PIPELINE))).astype(np.float32), mask


def transitions(count: int, slots: int, **changes: Any) -> dict[str, Any]:
    """Return a batch in which everything is zero and every move allowed, but for the changes."""
    replay = Replay(count, slots)
    replay.size = count
    batch = {name: values.copy() for name, values in replay.arrays.items()}
    batch["gains"][:] = np.nan
    batch["mask"][:] = True
    batch["moves"][:] = STAY
    batch["next_legal"][:] = True
    batch["next_weight"][:] = 1.0
    return batch | changes


def says(module: SharedQ, values: list[float]) -> None:
    """Make a network give these values to the five moves of every slot, whatever it sees."""
    with torch.no_grad():
        module.three.weight.zero_()
        module.three.bias.copy_(torch.tensor(values))


def weights(module: SharedQ) -> dict[str, Any]:
    return {name: getattr(module.network(), name) for name in PARAMETERS}


# -- two networks, one function --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "hidden"), [(1, 8), (7, 64), (32, 16)])
def test_numpy_gives_what_torch_gives(slots: int, hidden: int) -> None:
    learner = Learner(LearnerConfig(hidden=hidden), seed=slots)
    with torch.no_grad():
        for part in learner.online.parameters():
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(hidden)) * 0.2)
    slot, pipeline, mask = states(np.random.default_rng(slots), 20, slots)
    with torch.no_grad():
        wanted = learner.online(torch.from_numpy(slot), torch.from_numpy(pipeline), torch.from_numpy(mask)).numpy()
    got = learner.online.network()(slot, pipeline, mask)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got[mask], wanted[mask], atol=1e-5)


def test_slots_that_do_not_exist_change_nothing() -> None:
    network = Learner(LearnerConfig(hidden=16), seed=1).online.network()
    slot, pipeline, mask = states(np.random.default_rng(2), 10, 5)
    other = np.where(mask[..., None], slot, 7.0).astype(np.float32)
    np.testing.assert_array_equal(network(slot, pipeline, mask)[mask], network(other, pipeline, mask)[mask])


def test_weights_survive_numpy_and_the_disk(tmp_path: Any) -> None:
    first, second = (Learner(LearnerConfig(hidden=8), seed=seed).online for seed in (1, 2))
    first.network().save(tmp_path / "weights.npz")
    second.take(Network.load(tmp_path / "weights.npz"))
    for name, values in weights(first).items():
        np.testing.assert_array_equal(values, weights(second)[name])


def test_seed_decides_the_weights_and_leaves_the_programs_own_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (weights(Learner(LearnerConfig(hidden=8), seed=seed).online) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all((one[name] == same[name]).all() for name in PARAMETERS)
    assert (one["w1"] != other["w1"]).any()


# -- targets by hand -------------------------------------------------------------------------------------------------

ONLINE, TARGET = [0.0, 1.0, 2.0, 9.0, 0.0], [10.0, 20.0, 30.0, 40.0, 50.0]


@pytest.mark.parametrize(
    ("free_cpus", "value"),
    [
        # The online network likes +1 best, the target network says it is worth 40.
        (100.0, 40.0),
        # No CPU free: +1 and -1 (9 + 1) beat staying twice (2 + 2); worth (40 + 20) / 2.
        (0.0, 30.0),
        # One CPU free: +1 and stay (9 + 2); worth (40 + 30) / 2.
        (1.0, 35.0),
        # Five too many: -5 and stay (0 + 2) beats -5 and -1 (0 + 1); worth (10 + 30) / 2.
        (-5.0, 20.0),
    ],
)
def test_double_dqn_target(free_cpus: float, value: float) -> None:
    learner = Learner(LearnerConfig(hidden=8))
    says(learner.online, ONLINE)
    says(learner.target, TARGET)
    batch = transitions(
        2,
        2,
        reward=np.array([1.0, -2.0], np.float32),
        discount=np.array([0.9**3, 0.0], np.float32),
        next_free_cpus=np.full(2, free_cpus, np.float32),
    )
    wanted = learner.targets(batch).numpy()
    np.testing.assert_allclose(wanted, [1.0 + 0.729 * value, -2.0], rtol=1e-6)


def test_target_counts_the_slots_that_exist() -> None:
    learner = Learner(LearnerConfig(hidden=8))
    says(learner.online, ONLINE)
    says(learner.target, TARGET)
    batch = transitions(1, 3, discount=np.ones(1, np.float32), next_free_cpus=np.full(1, 9.0, np.float32))
    batch["mask"][0, 1:] = False
    batch["next_legal"][0, 1:] = np.arange(5) == STAY
    batch["next_legal"][0, 0, UP] = False
    # One slot, +1 forbidden: staying (2) is next best, worth 30; missing slots have no part in the mean.
    np.testing.assert_allclose(learner.targets(batch).numpy(), [30.0])


class Kept(Replay):
    """Remembers what it is given, rows that do not count included."""

    def __init__(self, slots: int) -> None:
        super().__init__(1, slots)
        self.seen: list[tuple[Moved, Moved, Any, float]] = []

    def add(self, before: Moved, after: Moved, reward: Any, discount: float, *rest: Any) -> None:
        self.seen.append((before, after, reward, discount))


def test_return_of_n_steps_is_the_discounted_sum() -> None:
    def lessons_of(steps: int) -> list[tuple[Moved, Moved, Any, float]]:
        config = LessonsConfig(
            machines=8, decisions=40, steps=steps, discount=0.8, labelled=0, fresh_share=1.0, resized_share=0.0
        )
        network = Learner(LearnerConfig(hidden=8)).online.network()
        lessons, replay = Lessons(network, config, np.random.default_rng(5)), Kept(SLOTS)
        for _ in range(40):
            lessons.step(replay)
        return replay.seen

    # The replay changes nothing: both runs see the same machines make the same moves.
    one, three = lessons_of(1), lessons_of(3)
    assert len(three) > 30
    for k, (before, after, reward, discount) in enumerate(three):
        np.testing.assert_allclose(reward, one[k][2] + 0.8 * one[k + 1][2] + 0.64 * one[k + 2][2], atol=1e-9)
        assert discount == pytest.approx(0.512)
        assert (before.slots == one[k][0].slots).all()
        assert (after.slots == one[k + 2][1].slots).all()
    assert np.abs([reward for _, _, reward, _ in one]).max() > 0.1


# -- learning ----------------------------------------------------------------------------------------------------------


def test_learns_what_each_move_pays() -> None:
    """A bandit: the next state counts nothing, so that the value of a move is its mean reward."""
    rng, pays = np.random.default_rng(3), np.array([-2.0, 1.0, 0.0, 3.0, -1.0])
    learner = Learner(LearnerConfig(hidden=16, rate=5e-3), seed=3)
    for _ in range(250):
        moves = rng.integers(0, len(MOVES), (64, 1))
        reward = (pays[moves[:, 0]] + rng.normal(0.0, 0.5, 64)).astype(np.float32)
        learner.update(transitions(64, 1, moves=moves.astype(np.int8), reward=reward))
    batch = transitions(1, 1)
    values = learner.online.network()(batch["slots"], batch["pipeline"], batch["mask"])[0, 0]
    np.testing.assert_allclose(values, pays, atol=0.35)


def test_learns_from_the_known_worth_of_single_moves() -> None:
    gains = np.array([-1.0, -0.5, 0.0, 2.0, np.nan], np.float32)
    learner = Learner(LearnerConfig(hidden=16, rate=5e-3, teach=1.0), seed=3)
    batch = transitions(16, 2, gains=np.tile(gains, (16, 2, 1)))
    for _ in range(200):
        learner.update(batch)
    values = learner.online.network()(batch["slots"], batch["pipeline"], batch["mask"])[0, 0]
    # The value of a pipeline is the mean over its two slots.
    np.testing.assert_allclose((values - values[STAY])[:4] / 2.0, gains[:4], atol=0.1)


@pytest.mark.parametrize(("follow", "moved"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_target_network_follows(follow: float, moved: float) -> None:
    learner = Learner(LearnerConfig(hidden=8, follow=follow))
    before = weights(learner.target)
    learner.update(transitions(8, 2, reward=np.ones(8, np.float32)))
    online, target = weights(learner.online), weights(learner.target)
    assert np.abs(online["b3"] - before["b3"]).max() > 1e-4
    for name in PARAMETERS:
        np.testing.assert_allclose(target[name], before[name] + moved * (online[name] - before[name]), atol=1e-7)


def test_anchor_holds_the_weights_where_they_were() -> None:
    start = Learner(LearnerConfig(hidden=8), seed=4).online.network()
    free, held = (Learner(LearnerConfig(anchor=anchor), start=start) for anchor in (0.0, 0.5))
    for learner in (free, held):
        for _ in range(20):
            learner.update(transitions(8, 2, reward=np.full(8, 3.0, np.float32)))
    assert np.abs(held.online.network().b3 - start.b3).max() < 0.2 * np.abs(free.online.network().b3 - start.b3).max()


def test_replay_forgets_the_oldest() -> None:
    replay, rng = Replay(6, 2), np.random.default_rng(0)
    for value in range(4):
        shape = (2, 2)
        moved = Moved(
            slots=np.full((*shape, len(OF_SLOT)), float(value)),
            pipeline=np.zeros((2, len(OF_PIPELINE))),
            mask=np.ones(shape, bool),
            moves=np.full(shape, value),
            legal=np.ones((*shape, 5), bool),
            weight=np.ones(shape),
            free_cpus=np.zeros(2),
            followed=np.ones(2, bool),
        )
        replay.add(moved, moved, np.full(2, float(value)), 0.5, np.array([True, value > 0]))
    # Seven counted; the first one is gone.
    assert replay.size == 6
    drawn = replay.sample(rng, 200)
    assert set(drawn["reward"]) == {1.0, 2.0, 3.0}
    assert (drawn["slots"][:, 0, 0] == drawn["reward"]).all() and (drawn["moves"][:, 0] == drawn["reward"]).all()


# -- absurd inputs -----------------------------------------------------------------------------------------------------

EVERY = (
    "work_s",
    "cpu_share",
    "cv",
    "busy",
    "fill",
    "window",
    "unit_memory",
    "item_memory",
    "rate",
    "demand",
    "memory",
)
ABSURD = (
    [{name: 0.0} for name in (*EVERY, "budget", "weight")]
    + [{name: 1e12} for name in EVERY]
    + [{"demand": np.inf}, {"rate": 1e-300}, {"rate": 1e300}, {"alive": False}, {"mask": False}]
    + [dict.fromkeys(EVERY, 0.0), dict.fromkeys(EVERY, 1e12)]
)


@pytest.mark.parametrize("changes", ABSURD, ids=lambda c: " ".join(f"{k}={v}" for k, v in list(c.items())[:2]))
def test_absurd_measurements_give_finite_states_and_allocations(changes: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    view = Env(sample(6, rng), rng, mixed=True).view
    learner = Learner(LearnerConfig(hidden=8), seed=1)
    says(learner.online, [0.0, 0.0, 0.0, 1.0, 2.0])
    fields = {name: np.full_like(getattr(view, name), value) for name, value in changes.items()}
    network = learner.online.network()
    shell, absurd = Shell(network, ShellConfig(jumps=(2,))), replace(view, **fields)
    for decision in range(16):
        # Half of the decisions measure something sane, so that a jump there and back is among them.
        seen = absurd if decision // 2 % 2 else view
        value, window = shell.act(seen)
        assert np.isfinite(value).all() and np.isfinite(window).all()
        assert shell.track is not None
        aimed, ratio = target(seen, shell.track.curves, 0.97), seen.window / np.maximum(seen.value, 1.0)
        slots, pipeline = features(seen, shell.track, aimed, ratio)
        assert max(np.abs(slots).max(), np.abs(pipeline).max()) <= 5.0
        assert np.isfinite(network(slots, pipeline, seen.mask)).all()


def test_absurd_rewards_leave_the_weights_finite() -> None:
    learner = Learner(LearnerConfig(hidden=8))
    for reward in (0.0, 1e30, -1e30, 1e-30):
        learner.update(transitions(4, 3, reward=np.full(4, reward, np.float32), discount=np.ones(4, np.float32)))
    assert all(np.isfinite(values).all() for values in weights(learner.online).values())
