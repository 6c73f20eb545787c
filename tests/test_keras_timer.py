"""The wall time of a loop split in two, on a virtual clock; also where fetch and computation overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.session.keras_timer import LoopReading, LoopTimer
from intune_callbacks.types import Clock


class Loop:
    """Loops of `together` steps, each of which fetches ahead of its computation, as TensorFlow's compiled ones do."""

    def __init__(self, together: int) -> None:
        self.now_s, self.delivered, self.fetched_s, self.computed_s = 5.0, 0, 0.0, 0.0
        self.timer = LoopTimer(self.read, Clock(wall=lambda: self.now_s), together)
        self.timer.resume()
        self.together = together

    def read(self) -> LoopReading:
        return LoopReading(self.delivered, self.fetched_s, 8 * self.delivered)

    def run(self, fetch_s: float, step_s: float, delay_s: float = 0.0) -> None:
        ready_s = done_s = self.now_s
        for _ in range(self.together):
            ready_s += fetch_s
            done_s = max(done_s, ready_s) + step_s
        self.now_s = done_s + delay_s
        self.delivered += self.together
        self.fetched_s += self.together * fetch_s
        self.computed_s += self.together * step_s


@given(st.integers(1, 50), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.integers(1, 5))
def test_what_overlaps_is_no_wait(together: int, fetch_s: float, step_s: float, loops: int) -> None:
    loop = Loop(together)
    for _ in range(loops):
        loop.run(fetch_s, step_s)
        totals = loop.timer.read()
    wall_s = loop.now_s - 5.0
    assert totals.steps == together * loops
    assert totals.wait_s + totals.model_s == pytest.approx(wall_s)
    # Where it hardly waits, what it fetches meanwhile still counts: less than a tenth.
    assert totals.model_s == pytest.approx(loop.computed_s, abs=0.1 * wall_s + 1e-9)
    if fetch_s >= step_s:
        assert totals.model_s == pytest.approx(loop.computed_s, rel=1e-6)


def test_what_a_fed_loop_took_is_remembered() -> None:
    loop = Loop(10)
    for _ in range(5):
        loop.run(0.0001, 0.01)
        loop.timer.read()
    before = loop.timer.read()
    for fetch_s in (0.02, 0.002, 0.05, 0.03):  # irregular: no loop is like another
        loop.run(fetch_s, 0.01)
    totals = loop.timer.read()
    assert totals.model_s - before.model_s == pytest.approx(4 * 10 * 0.01, rel=0.02)


@pytest.mark.parametrize("first", ["starved", "fed"])
def test_loops_delayed_by_other_work_do_not_make_every_step_look_slow(first: str) -> None:
    # On a busy machine .02 s beside each loop of 5 steps counted as .02 s of each step: a wait of .25 where it was .7.
    loop = Loop(5)
    loop.run(0.06 if first == "starved" else 0.0001, 0.01, 0.2)
    for k in range(20):
        loop.run(0.06, 0.01, 0.02 if k % 4 else 0.0)
        loop.timer.read()
    totals = loop.timer.read()
    assert totals.wait_s + totals.model_s == pytest.approx(loop.now_s - 5.0)
    assert totals.wait_s / (loop.now_s - 5.0) > 0.6


def test_what_comes_before_the_first_epoch_is_of_the_run_and_of_no_step() -> None:
    now_s, delivered = 7.0, 0
    clock = Clock(wall=lambda: now_s)
    timer = LoopTimer(lambda: LoopReading(delivered, 0.0, 8 * delivered), clock, begin_s=5.0)
    now_s = 9.0
    timer.epoch_begin()
    timer.resume()
    now_s, delivered = 10.0, 4
    totals = timer.read()
    assert (totals.wall_s, totals.paused_s, totals.steps) == (5.0, 4.0, 4)
    assert totals.wait_s + totals.model_s == 1.0
