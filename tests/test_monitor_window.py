"""rates and Window: differences of counters, checked against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.measure.window import Window, rates
from intune_callbacks.types import Observation, PipelineStats, Resources, Stage, StageStats

RESOURCES = Resources(cpus=4.0, memory_limit_bytes=1 << 30, memory_used_bytes=1 << 20)
READ = Stage("read", "io", "workers", 1, 8, 2)
DECODE = Stage("decode", "cpu", "workers", 1, 8, 3)
WINDOW = Stage("decode.window", "memory", "items", 1, 64, 8, window_of="decode")
STAGES = (READ, DECODE, WINDOW)


def counters(**given: float) -> StageStats:
    zero = StageStats(items=0, busy_s=0.0, busy_s2=0.0, cpu_s=0.0, starved_s=0.0, blocked_s=0.0, queued=0, capacity=0)
    return StageStats(**{**asdict(zero), **given})


def stats(delivered: int, at_s: float = 0.0, **stages: StageStats) -> PipelineStats:
    return PipelineStats(at_s=at_s, delivered=delivered, stages=stages)


def test_rates_of_one_window() -> None:
    before = stats(
        10, decode=counters(items=40, busy_s=8.0, busy_s2=2.0, cpu_s=4.0, starved_s=1.0, blocked_s=1.0, queued=1)
    )
    # Two items of 1 s and two of 3 s: mean 2 s, standard deviation 1 s.
    after = stats(
        12,
        decode=counters(
            items=44, busy_s=16.0, busy_s2=22.0, cpu_s=10.0, starved_s=4.0, blocked_s=6.0, queued=6, capacity=8,
            item_bytes=100.0, worker_bytes=5e6,
        ),
    )  # fmt: skip
    seen = rates(before, after, STAGES)
    assert list(seen) == ["decode"]
    decode = seen["decode"]
    assert (decode.items, decode.items_per_batch) == (4, 2.0)
    assert (decode.service_s, decode.service_cpu_s, decode.service_cv) == (2.0, 1.5, 0.5)
    assert (decode.busy_frac, decode.starved_frac, decode.blocked_frac) == (8 / 16, 3 / 16, 5 / 16)
    assert (decode.queue_fill, decode.item_bytes, decode.worker_bytes) == (0.75, 100.0, 5e6)


def test_a_stage_without_items_has_finite_rates() -> None:
    seen = rates(stats(0), stats(0, read=counters(starved_s=3.0)), STAGES)["read"]
    assert (seen.items_per_batch, seen.service_s, seen.service_cpu_s, seen.service_cv) == (0.0, 0.0, 0.0, 0.0)
    assert (seen.busy_frac, seen.starved_frac, seen.blocked_frac, seen.queue_fill) == (0.0, 1.0, 0.0, 0.0)
    idle = rates(stats(0), stats(0, read=counters()), STAGES)["read"]
    assert (idle.busy_frac, idle.starved_frac, idle.blocked_frac) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("lower", ["items", "busy_s", "busy_s2", "cpu_s", "starved_s", "blocked_s"])
def test_a_counter_that_went_down_was_restarted(lower: str) -> None:
    old = counters(items=4, busy_s=4.0, busy_s2=4.0, cpu_s=4.0, starved_s=4.0, blocked_s=4.0)
    new = counters(**{**asdict(counters(items=8, busy_s=8.0, busy_s2=8.0, cpu_s=8.0, starved_s=8.0, blocked_s=8.0)),
                      lower: 2})  # fmt: skip
    alone = rates(stats(0), stats(10, read=new), STAGES)["read"]
    assert rates(stats(0, read=old), stats(10, read=new), STAGES)["read"] == alone


def test_deliveries_that_went_down_were_restarted() -> None:
    seen = rates(stats(100, read=counters(items=1)), stats(4, read=counters(items=9)), STAGES)["read"]
    assert (seen.items, seen.items_per_batch) == (8, 2.0)


def test_items_without_a_delivery_have_no_ratio() -> None:
    seen = rates(stats(10, read=counters(items=1)), stats(10, read=counters(items=9)), STAGES)["read"]
    assert (seen.items, seen.items_per_batch) == (8, 0.0)


def test_a_stage_that_is_new_counts_from_zero() -> None:
    assert rates(stats(0), stats(1, read=counters(items=3)), STAGES)["read"].items == 3


# Times in whole microseconds, as clocks give them.
times_s = st.integers(0, 10**12).map(lambda us: us / 1e6)
counter_values = st.builds(
    counters,
    items=st.integers(0, 10**6),
    busy_s=times_s,
    busy_s2=times_s,
    cpu_s=times_s,
    starved_s=times_s,
    blocked_s=times_s,
    queued=st.integers(0, 100),
    capacity=st.integers(0, 100),
)


@given(counter_values, counter_values, st.integers(0, 1000), st.integers(0, 1000))
def test_rates_are_always_finite_and_fractions_stay_fractions(
    old: StageStats, new: StageStats, delivered_before: int, delivered_after: int
) -> None:
    seen = rates(stats(delivered_before, read=old), stats(delivered_after, read=new), STAGES)["read"]
    numbers = asdict(seen)
    assert numbers.pop("stored") in (new.queued - old.queued, new.queued)
    assert all(math.isfinite(value) and value >= 0 for value in numbers.values())
    fractions = (seen.busy_frac, seen.starved_frac, seen.blocked_frac)
    assert all(0 <= fraction <= 1 for fraction in (*fractions, seen.queue_fill))
    total = sum(fractions)
    assert total == 0 or total == pytest.approx(1)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_irregularity_is_that_of_the_single_times(times_ms: list[int]) -> None:
    times = [t / 1000 for t in times_ms]
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((t - mean) ** 2 for t in times) / len(times))
    counted = counters(items=len(times), busy_s=sum(times), busy_s2=sum(t * t for t in times))
    seen = rates(stats(0), stats(1, read=counted), STAGES)["read"]
    assert seen.service_cv == pytest.approx(spread / mean, abs=1e-6)


def observe(window: Window, totals: StepTotals, samples: int, delivered: int = 0, exposed_wait_s: float | None = None):  # type: ignore[no-untyped-def]
    return window.observe(
        totals, samples, stats(delivered, at_s=totals.wall_s, read=counters(items=delivered)), STAGES, RESOURCES,
        exposed_wait_s=exposed_wait_s,
    )  # fmt: skip


def test_an_observation_is_what_happened_since_the_last_one() -> None:
    window = Window()
    first = observe(window, StepTotals(10, wait_s=5, model_s=5, paused_s=2, wall_s=12), samples=320, delivered=10)
    assert (first.batches, first.samples, first.elapsed_s) == (10, 320, 10)
    assert first.rates["read"].items_per_batch == 1.0
    seen = observe(window, StepTotals(30, wait_s=8, model_s=12, paused_s=92, wall_s=112), samples=960, delivered=30)
    assert (seen.step, seen.at_s, seen.batches, seen.samples) == (30, 112, 20, 640)
    assert seen.elapsed_s == 10  # 90 s of validation taken out
    assert (seen.batches_per_s, seen.samples_per_s) == (2.0, 64.0)
    assert (seen.wait_frac, seen.model_s, seen.latency_s) == (0.3, 0.35, 0.15)
    assert seen.rates["read"].items == 20
    assert seen.stages == STAGES
    assert seen.resources is RESOURCES
    assert seen.exposed_wait_frac is None


@pytest.mark.parametrize(
    ("work_s", "model_s", "lent"),
    [
        (1.00, 0.1, 1 - 0.1 * 2 / 1.1),  # two CPUs make 1.8 batches/s, which train for 18 % of the time
        (0.10, 0.1, 0.0),  # at its pace of 10 batches/s the model never waits
        (0.00, 0.1, 0.0),
        (1.00, 0.0, 0.0),  # nothing is known of it
    ],
)
def test_a_loop_that_will_go_on_waiting_lends_its_cpu(work_s: float, model_s: float, lent: float) -> None:
    """On two CPUs a stranger's training waited 80 % of the time, with two workers where five were twice as fast."""

    def observed(machine: Resources) -> Observation:
        totals = StepTotals(10, wait_s=20 - 10 * model_s, model_s=10 * model_s, wall_s=20)
        read = counters(items=20, busy_s=10 * work_s, cpu_s=10 * work_s)
        return Window().observe(totals, 10, stats(10, at_s=20, read=read), STAGES, machine)

    small = replace(RESOURCES, cpus=1.0, trainer_cpus=1.0)
    assert observed(small).cpus == pytest.approx(1.0 + lent)
    assert observed(replace(small, trainer_cpus=0.0)).cpus == 1.0


def test_what_is_lent_does_not_move_with_each_window() -> None:
    machine, window, seen = replace(RESOURCES, cpus=1.0, trainer_cpus=1.0), Window(), []
    for at, cpu_s in enumerate([1.0, *[0.5] * 12], 1):
        totals = StepTotals(10 * at, wait_s=9 * at, model_s=1 * at, wall_s=10 * at)
        read = counters(items=10 * at, busy_s=10 * at, cpu_s=5.0 + 10 * cpu_s * at)
        seen.append(window.observe(totals, 10 * at, stats(10 * at, read=read), STAGES, machine).lent_cpus)
    assert seen[0] == max(seen) and len(set(seen[:10])) == 1 and seen[-1] < seen[0]


def test_a_machine_that_shrinks_lends_no_more_than_it_has() -> None:
    window, lent = Window(), []
    for at, trainer_cpus in enumerate([1.0, 0.25], 1):
        totals = StepTotals(10 * at, wait_s=9 * at, model_s=1 * at, wall_s=10 * at)
        read = counters(items=10 * at, busy_s=10 * at, cpu_s=10 * at)
        machine = replace(RESOURCES, cpus=trainer_cpus, trainer_cpus=trainer_cpus)
        lent.append(window.observe(totals, 10 * at, stats(10 * at, read=read), STAGES, machine).lent_cpus)
    assert 0.25 < lent[0] < 1.0 and lent[1] <= 0.25


def test_a_window_in_which_nothing_happened_is_finite() -> None:
    window = Window()
    totals = StepTotals(10, wait_s=5, model_s=5, paused_s=0, wall_s=10)
    observe(window, totals, samples=10, exposed_wait_s=1.0)
    seen = observe(window, totals, samples=10, exposed_wait_s=1.0)
    assert (seen.batches, seen.samples, seen.exposed_wait_frac) == (0, 0, 0)
    assert (seen.elapsed_s, seen.batches_per_s, seen.samples_per_s, seen.wait_frac, seen.model_s) == (0, 0, 0, 0, 0)


def test_exposed_wait_is_a_share_of_the_window() -> None:
    window = Window()
    first = observe(window, StepTotals(10, 5, 5, 0, 10), samples=10, exposed_wait_s=1.0)
    assert first.exposed_wait_frac == 0.1
    second = observe(window, StepTotals(20, 6, 8, 0, 14), samples=20, exposed_wait_s=2.0)
    assert second.exposed_wait_frac == 0.25
    # A gap is read some steps late, so it may end up in a window shorter than itself.
    assert observe(window, StepTotals(21, 6, 9, 0, 15), samples=21, exposed_wait_s=5.0).exposed_wait_frac == 1.0
    assert observe(window, StepTotals(31, 6, 19, 0, 25), samples=31, exposed_wait_s=5.0).exposed_wait_frac == 0.0


def test_exposed_wait_may_be_known_later_only() -> None:
    window = Window()
    assert observe(window, StepTotals(10, 5, 5, 0, 10), samples=10).exposed_wait_frac is None
    assert observe(window, StepTotals(20, 10, 10, 0, 20), samples=20, exposed_wait_s=2.0).exposed_wait_frac == 0.2


def test_restart_leaves_out_what_came_before() -> None:
    window = Window()
    warm_up = StepTotals(20, wait_s=50, model_s=50, paused_s=0, wall_s=100)
    window.restart(warm_up, 20, stats(20, read=counters(items=20)), exposed_wait_s=40.0)
    seen = observe(window, StepTotals(30, 51, 59, 0, 110), samples=30, delivered=30, exposed_wait_s=41.0)
    assert (seen.batches, seen.wait_frac, seen.exposed_wait_frac) == (10, 0.1, 0.1)
    assert seen.rates["read"].items == 10


def test_a_run_that_goes_on_behind_its_length_has_an_unknown_one() -> None:
    window = Window()
    window.expect(10, 30)
    seen = observe(window, StepTotals(20, 10, 10, 0, 20), samples=20)
    assert (seen.epoch_batches, seen.remaining_s) == (10, 10)
    seen = observe(window, StepTotals(31, 15, 16, 0, 31), samples=31)
    assert (seen.epoch_batches, seen.remaining_s) == (None, None)


def test_of_a_dataset_of_unknown_length_the_epochs_left_are_as_long_as_the_last_one() -> None:
    window = Window()
    window.expect(None, None, 5)
    first = observe(window, StepTotals(10, 5, 5, 0, 10, epochs=1, epoch_steps=10), samples=10)
    window.expect(None, None, 4)
    known = StepTotals(40, 20, 20, 0, 40, epochs=2, epoch_batches=30, epoch_steps=10)
    longer = StepTotals(200, 100, 100, 0, 200, epochs=2, epoch_batches=30, epoch_steps=170)
    left = [observe(window, totals, samples=totals.steps).remaining_s for totals in (known, longer)]
    assert [first.remaining_s, *left] == [None, 110, None]


def test_of_a_loop_whose_epochs_nobody_knows_as_much_is_left_as_has_passed_or_this_epoch() -> None:
    """A stranger's epochs of 2 s: at the end of each the run seemed to be over, and nothing was changed for five."""
    window = Window()
    window.expect(50, None)
    early = observe(window, StepTotals(10, 1, 1, 0, 2, epochs=1, epoch_steps=10), samples=10)
    last = observe(window, StepTotals(98, 10, 10, 0, 20, epochs=2, epoch_batches=50, epoch_steps=48), samples=98)
    assert [early.remaining_s, last.remaining_s] == [40 * 0.2, 20]


def test_epochs_are_as_short_as_the_loop_makes_them() -> None:
    window = Window()
    window.expect(100, 300)
    first = observe(window, StepTotals(10, 5, 5, 0, 10, epochs=1, epoch_steps=10), samples=10)
    left = observe(window, StepTotals(40, 20, 20, 0, 40, epochs=4, epoch_batches=12, epoch_steps=4), samples=40)
    longer = observe(window, StepTotals(60, 30, 30, 0, 60, epochs=4, epoch_batches=12, epoch_steps=24), samples=60)
    assert [seen.epoch_batches for seen in (first, left, longer)] == [100, 12, 100]


def test_totals_that_went_down_were_restarted() -> None:
    window = Window()
    observe(window, StepTotals(100, 10, 90, 0, 100), samples=100, exposed_wait_s=9.0)
    seen = observe(window, StepTotals(10, 1, 9, 5, 15), samples=10, exposed_wait_s=0.5)
    assert (seen.batches, seen.samples, seen.elapsed_s, seen.wait_frac) == (10, 10, 10, 0.1)
    assert seen.exposed_wait_frac == 0.05
    later = observe(window, StepTotals(5, 2, 8, 90, 100), samples=5)  # fewer steps, more wall
    assert (later.batches, later.samples, later.wait_frac) == (5, 5, 0.2)
