"""Online fine-tuning: it learns beside the training, never in its way, and never far from where it began."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fakes import FakeLoop, FakeMachine, FakePipeline, Work, best_static  # noqa: E402
from views import a_network  # noqa: E402

from intune_callbacks.config import TunerConfig  # noqa: E402
from intune_callbacks.decide import online  # noqa: E402
from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT  # noqa: E402
from intune_callbacks.decide.moves import Moved  # noqa: E402
from intune_callbacks.decide.network import PARAMETERS, Network  # noqa: E402
from intune_callbacks.decide.online import FEWEST, UPDATES, WAITING, FineTuner  # noqa: E402
from intune_callbacks.decide.policies import make_policy  # noqa: E402
from intune_callbacks.session.tuner import Tuner  # noqa: E402

NAME = "intune-fine-tuning"
START = a_network(1, 0.1)


@pytest.fixture(autouse=True)
def one_cpu() -> Iterator[None]:
    """So small an update is many times slower on several threads where other work runs beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def short_idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No learning thread outlives its test."""
    monkeypatch.setattr(online, "IDLE_S", 0.05)
    yield
    for thread in learners():
        thread.join(10.0)
    assert not learners()


def learners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def until(done: Any, seconds: float = 20.0) -> None:
    end_s = time.perf_counter() + seconds
    while not done():
        assert time.perf_counter() < end_s, "nothing happened in time"
        time.sleep(0.002)


def decision(seed: int, slots: int = 3, followed: bool = True) -> Moved:
    rng, shape = np.random.default_rng(seed), (1, slots)
    return Moved(
        slots=rng.normal(size=(*shape, len(OF_SLOT))).astype(np.float32),
        pipeline=rng.normal(size=(1, len(OF_PIPELINE))).astype(np.float32),
        mask=np.ones(shape, bool),
        moves=rng.integers(0, 5, shape),
        legal=np.ones((*shape, 5), bool),
        weight=np.ones(shape),
        free_cpus=np.full(1, 9.0),
        followed=np.full(1, followed),
    )


def lessons(tuner: FineTuner, count: int, slots: int = 3, pay: float = 0.05) -> None:
    """Let a tuner see so many decisions; a raise of the first slot pays."""
    worth = 0.0
    for k in range(count + 1):
        moved = decision(k, slots)
        tuner.record(moved, np.full(1, worth))
        worth += pay * (moved.moves[0, 0] - 2)


def distance(network: Network, start: Network = START) -> float:
    return max(float(np.abs(getattr(network, name) - getattr(start, name)).max()) for name in PARAMETERS)


def test_learns_in_a_thread_of_its_own() -> None:
    seen: list[str] = []
    tuner = FineTuner(START)
    update = tuner._learner.update

    def spy(*args: Any) -> float:
        seen.append(threading.current_thread().name)
        return update(*args)

    tuner._learner.update = spy  # type: ignore[method-assign]
    lessons(tuner, FEWEST + 4)
    until(lambda: tuner.updates >= 5 * UPDATES)
    assert set(seen) == {NAME} and tuner.failed is None
    assert distance(tuner.network) > 0.0


def test_thread_goes_when_there_is_nothing_to_learn_and_comes_again() -> None:
    tuner = FineTuner(START)
    assert not learners()
    lessons(tuner, FEWEST)
    assert learners() and all(thread.daemon for thread in learners())
    until(lambda: not learners())
    before = tuner.updates
    lessons(tuner, 3)
    until(lambda: tuner.updates > before)


def test_never_waits_for_the_learner() -> None:
    tuner, free = FineTuner(START), threading.Event()
    started = threading.Event()

    def busy(*lesson: Any) -> None:
        started.set()
        free.wait(20.0)

    tuner._learn = busy  # type: ignore[method-assign]
    begin_s = time.perf_counter()
    lessons(tuner, 1)
    assert started.wait(10.0)
    lessons(tuner, 3 * WAITING)
    elapsed_s, waiting = time.perf_counter() - begin_s, tuner._queue.qsize()
    free.set()
    # What is too much is dropped: more than a few milliseconds each would be waiting.
    assert waiting == WAITING
    assert elapsed_s < 5.0


@pytest.mark.parametrize("pay", [0.05, 1e6])
def test_weights_stay_near_the_start(pay: float) -> None:
    tuner = FineTuner(START, threaded=False)
    lessons(tuner, 200, pay=pay)
    moved = distance(tuner.network)
    assert tuner.updates > 300
    # Adam's steps of 1e-4 with a pull of 2 % cannot lead further than 1e-4 / .02.
    assert 0.0 < moved < 0.02
    # Nothing of what it was is lost.
    state = decision(1)
    before, after = (net(state.slots, state.pipeline, state.mask) for net in (START, tuner.network))
    assert np.abs(before - after).max() < 0.5 * np.abs(before).max() + 0.1


def test_a_failure_stops_the_learning_only() -> None:
    tuner = FineTuner(START)

    def broken(*args: Any) -> float:
        raise RuntimeError("no such update")

    tuner._learner.update = broken  # type: ignore[method-assign]
    lessons(tuner, FEWEST + 2)
    until(lambda: tuner.failed is not None)
    assert tuner.failed == "RuntimeError: no such update"
    until(lambda: not learners())
    lessons(tuner, 5)
    assert not learners()
    state = decision(7)
    wanted = START(state.slots, state.pipeline, state.mask)
    np.testing.assert_array_equal(tuner(state.slots, state.pipeline, state.mask), wanted)


def test_synchronous_mode_is_deterministic() -> None:
    one, same, other = (FineTuner(START, seed, threaded=False) for seed in (1, 1, 2))
    for tuner in (one, same, other):
        lessons(tuner, FEWEST + 10)
    assert not learners()
    assert one.updates == UPDATES * 11
    assert distance(one.network, same.network) == 0.0
    assert distance(one.network, other.network) > 0.0


def test_learns_which_moves_pay() -> None:
    """Raising the first slot pays, cutting it costs: its values tell after a while, as far as the anchor lets them."""

    def advantage(network: Network) -> float:
        values = [
            network(state.slots, state.pipeline, state.mask)[0, 0] for state in (decision(k) for k in range(1000, 1050))
        ]
        return float(np.mean([v[4] - v[0] for v in values]))

    tuner = FineTuner(START, threaded=False)
    lessons(tuner, 150)
    assert advantage(tuner.network) > advantage(START) + 0.02
    # What pays nothing teaches nothing of the kind.
    even = FineTuner(START, threaded=False)
    lessons(even, 150, pay=0.0)
    assert advantage(tuner.network) > advantage(even.network) + 0.02


def test_only_what_was_followed_counts() -> None:
    tuner = FineTuner(START, threaded=False)
    for k in range(40):
        tuner.record(decision(k, followed=False), np.zeros(1))
    assert tuner.updates == 0
    # Two decisions in a row make a lesson; a pause between them does not.
    for k in range(40):
        tuner.record(decision(k), np.zeros(1))
        tuner.record(None, np.zeros(1))
    assert tuner.updates == 0


def test_a_pipeline_of_other_stages_teaches_nothing_wrong() -> None:
    tuner = FineTuner(START, threaded=False)
    lessons(tuner, FEWEST + 1, slots=3)
    before = tuner.updates
    tuner.record(None, np.zeros(1))
    lessons(tuner, 30, slots=5)
    assert tuner.updates - before <= UPDATES and tuner.failed is None
    tuner.record(None, np.zeros(1))
    lessons(tuner, 3, slots=3)
    assert tuner.updates > before


def test_fine_tunes_a_live_run() -> None:
    costs = {"read": 0.02, "decode": 0.12, "batch": 0.06}
    work = {name: Work(s, workers=10, window=20, high=128) for name, s in costs.items()}
    loop = FakeLoop(pipeline := FakePipeline(work, machine := FakeMachine(32.0)))
    policy = make_policy("dqn", fine_tune=True)
    tuner = Tuner(pipeline, TunerConfig(fine_tune=True), policy=policy, probe=machine, clock=machine.clock())
    loop.run(tuner, 90.0)
    assert tuner.frozen is None and loop.throughput >= 0.9 * best_static(pipeline)
