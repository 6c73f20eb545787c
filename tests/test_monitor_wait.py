"""StepTimer: wait, model and paused time are told apart and add up to the wall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.measure.wait import StepTimer, StepTotals
from intune_callbacks.types import Clock


class Time:
    """A wall clock that only moves when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now_s)


def timer_at(now_s: float = 1000.0) -> tuple[StepTimer, Time]:
    time = Time(now_s)
    return StepTimer(time.clock()), time


def fetch(timer: StepTimer, time: Time, seconds: float, delivered: bool = True) -> None:
    timer.fetch_begin()
    time.now_s += seconds
    timer.fetch_end(delivered)


def seen(timer: StepTimer) -> tuple[float, ...]:
    """Return steps, wait without starts of epochs, starts of epochs, model time, pauses and wall."""
    t = timer.read()
    return t.steps, t.wait_s - t.seam_s, t.seam_s, t.model_s, t.paused_s, t.wall_s


def test_nothing_is_counted_before_the_first_fetch() -> None:
    timer, time = timer_at()
    time.now_s += 5
    timer.pause()
    time.now_s += 5
    timer.resume()
    assert timer.read() == StepTotals()


def test_the_start_up_of_the_pipeline_is_not_a_step() -> None:
    timer, time = timer_at()
    fetch(timer, time, 8)
    assert seen(timer) == (0, 0, 8, 0, 0, 8)
    assert timer.read().first_batch_s == 8


def test_a_step_is_model_time_and_then_wait() -> None:
    timer, time = timer_at()
    fetch(timer, time, 8)
    for _ in range(3):
        time.now_s += 2
        fetch(timer, time, 1)
    time.now_s += 0.5
    assert seen(timer) == (3, 3, 8, 6.5, 0, 17.5)


def test_reading_changes_nothing() -> None:
    timer, time = timer_at()
    fetch(timer, time, 1)
    time.now_s += 2
    assert timer.read() == timer.read()
    timer.fetch_begin()
    time.now_s += 4
    assert timer.read().wait_s == 5
    timer.fetch_end()
    assert seen(timer) == (1, 4, 1, 2, 0, 7)


def test_pauses_are_taken_out_and_nest() -> None:
    timer, time = timer_at()
    fetch(timer, time, 0)
    timer.pause()
    time.now_s += 10
    timer.pause()
    time.now_s += 10
    timer.resume()
    time.now_s += 10
    timer.resume()
    time.now_s += 1
    assert seen(timer) == (0, 0, 0, 1, 30, 31)


def test_a_pause_inside_a_fetch_returns_to_waiting() -> None:
    timer, time = timer_at()
    fetch(timer, time, 0)
    timer.fetch_begin()
    time.now_s += 1
    timer.pause()
    time.now_s += 10
    timer.resume()
    time.now_s += 2
    timer.fetch_end()
    assert seen(timer) == (1, 3, 0, 0, 10, 13)


@pytest.mark.parametrize("end_first", [False, True])
def test_a_lost_resume_ends_at_the_next_fetch(end_first: bool) -> None:
    timer, time = timer_at()
    fetch(timer, time, 0)
    if end_first:
        timer.fetch_begin()
    timer.pause()
    time.now_s += 5
    if end_first:
        timer.fetch_end()
    else:
        fetch(timer, time, 3)
    time.now_s += 1
    assert timer.read().model_s == 1
    assert timer.read().wait_s == (0 if end_first else 3)
    timer.resume()  # the late one must not bring the old state back
    time.now_s += 1
    assert timer.read().model_s == 2


@pytest.mark.parametrize(("open_s", "counted_s"), [(1, 1), (3.5, 3.5), (40, 2)])
def test_what_comes_behind_a_loop_that_was_left_is_no_step(open_s: float, counted_s: float) -> None:
    timer, time = timer_at()
    fetch(timer, time, 1)
    for model_s in (1, 3):
        time.now_s += model_s
        fetch(timer, time, 1)
    time.now_s += open_s
    left = timer.left()
    assert (left.model_s, left.paused_s, left.wall_s) == (4 + counted_s, 0, 7 + counted_s)
    time.now_s += 10
    assert seen(timer) == (2, 2, 1, 4 + counted_s, open_s - counted_s + 10, 17 + open_s)


def test_fetches_longer_than_a_stop_are_told_apart() -> None:
    timer, time = timer_at()
    for wait_s in (3600, 2, 3600, 9, 11):  # the first starts the epoch
        fetch(timer, time, wait_s)
        time.now_s += 60
    totals = timer.read()
    assert (totals.stops, totals.stops_s) == (2, 3611)


def test_a_loop_that_was_left_in_its_first_step_or_before_is_counted_as_it_is() -> None:
    timer, time = timer_at()
    assert timer.left() == StepTotals()
    fetch(timer, time, 1)
    time.now_s += 40
    assert timer.left().model_s == 40


def test_a_resume_too_many_does_nothing() -> None:
    timer, time = timer_at()
    fetch(timer, time, 0)
    timer.resume()
    time.now_s += 1
    assert timer.read().model_s == 1
    timer.pause()  # and the next pause is a pause
    time.now_s += 5
    assert timer.read().paused_s == 5


def test_a_fetch_without_begin_starts_the_wall_or_ends_a_step() -> None:
    timer, time = timer_at()
    timer.fetch_end()
    time.now_s += 4
    timer.fetch_end()
    assert seen(timer) == (1, 0, 0, 4, 0, 4)


def test_the_fetch_that_finds_the_end_is_a_wait_but_no_step() -> None:
    timer, time = timer_at()
    for _ in range(2):  # epochs of three batches
        for _ in range(3):
            fetch(timer, time, 1)
            time.now_s += 2
        fetch(timer, time, 0.5, delivered=False)
        timer.pause()
        time.now_s += 100
    # Six batches; the first of each epoch ended its start.
    assert seen(timer) == (6, 5, 2, 12, 200, 219)


def test_an_empty_first_fetch_is_still_start_up() -> None:
    timer, time = timer_at()
    fetch(timer, time, 1, delivered=False)
    time.now_s += 1
    fetch(timer, time, 1)
    assert seen(timer) == (0, 0, 3, 0, 0, 3)


calls = st.sampled_from(["epoch_begin", "fetch_begin", "fetch_end", "pause", "resume", "stop", "read"])


# Multiples of 1/8 s add up without rounding, so equality is exact.
@given(st.lists(st.tuples(calls, st.integers(0, 1000)), max_size=60))
def test_any_order_of_calls_adds_up_to_the_wall_and_never_goes_back(script: list[tuple[str, int]]) -> None:
    timer, time = timer_at()
    first_s: float | None = None
    before = StepTotals()
    for call, eighths in script:
        if first_s is None and call in ("epoch_begin", "fetch_begin", "fetch_end", "stop"):
            first_s = time.now_s
        if call == "stop":
            timer.fetch_end(delivered=False)
        else:
            getattr(timer, call)()
        time.now_s += eighths / 8
        now = timer.read()
        assert now.wait_s + now.model_s + now.paused_s == now.wall_s
        assert now.wall_s == (0 if first_s is None else time.now_s - first_s)
        for name in ("steps", "wait_s", "model_s", "paused_s", "wall_s", "seam_s", "epochs"):
            assert getattr(now, name) >= getattr(before, name)
        before = now


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=40))
def test_planted_times_are_found_again(steps: list[tuple[int, int, int]]) -> None:
    timer, time = timer_at()
    fetch(timer, time, 3)
    for wait, model, paused in steps:
        time.now_s += model / 8
        timer.pause()
        time.now_s += paused / 8
        timer.resume()
        fetch(timer, time, wait / 8)
    totals = timer.read()
    assert totals.steps == len(steps)
    assert totals.wait_s - totals.seam_s == sum(s[0] for s in steps) / 8
    assert totals.model_s == sum(s[1] for s in steps) / 8
    assert totals.paused_s == sum(s[2] for s in steps) / 8
    assert totals.seam_s == totals.first_batch_s == 3


def test_what_comes_before_an_epochs_first_batch_is_its_start() -> None:
    timer, time = timer_at()
    for start_s, workers_s, batches in ((7, 1, 4), (2, 3, 6), (5, 0, 3)):
        timer.epoch_begin()
        time.now_s += workers_s  # the iterator is made outside of any fetch
        fetch(timer, time, start_s)
        for _ in range(batches - 1):
            time.now_s += 1
            fetch(timer, time, 1)
        timer.pause()
        time.now_s += 50  # validation
    totals = timer.read()
    assert totals.seam_s == 18
    assert (totals.epochs, totals.first_batch_s) == (3, 8)
    assert (totals.epoch_start_s, totals.epoch_batches) == (5, 6), "of the last start, and the last whole epoch"
    assert totals.paused_s == 150
    assert totals.wait_s == 18 + 3 + 5 + 2


def test_the_default_clock_is_the_real_one() -> None:
    timer = StepTimer()
    timer.fetch_begin()
    timer.fetch_end()
    first = timer.read().wall_s
    assert timer.read().wall_s > first >= 0
