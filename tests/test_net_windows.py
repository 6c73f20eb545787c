"""The net, window by window: what proves that an allocation is better or worse, and what trials may cost."""

from __future__ import annotations

import pytest
from fakes import seen

from intune_callbacks.guard.net import ENOUGH, IDLE, MOST_HARM, Net
from intune_callbacks.measure.steady import MOST_UNSTEADY
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.types import Resources, StageRates


def window(
    net: Net,
    current: int,
    batches: int,
    made: int,
    cv: float = 0.1,
    cpus: float = 8.0,
    evaluated_s: float = 0.0,
    stopped_s: float = 0.0,
    left_s: float = 600.0,
) -> None:
    """One second in which so many batches were delivered, and so many items made; a step or a fetch may take longer."""
    rates = StageRates(made, made / batches, 0.1, 0.001, cv, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    before = net._totals
    wall_s, model_s = before.wall_s + 1.0 + evaluated_s + stopped_s, before.model_s + 0.2 + evaluated_s
    stops = {"stops": before.stops + (stopped_s > 0.0), "stops_s": before.stops_s + stopped_s}
    totals = StepTotals(before.steps + batches, before.wait_s + 0.8 + stopped_s, model_s, 0.0, wall_s, **stops)
    machine = Resources(cpus, 1 << 34, 1 << 30)
    known = {"batches": batches, "elapsed_s": 1.0 + evaluated_s + stopped_s, "remaining_s": left_s}
    net.watch(seen(current, rates=rates, resources=machine, **known), totals)


def started(current: int = 4, cv: float = 0.1) -> Net:
    net = Net()
    for _ in range(4):
        window(net, current, 10, 10, cv)
    return net


def test_windows_that_fill_buffers_are_no_failure() -> None:
    net = started()
    net.changed({"load": 16})
    for _ in range(3):
        window(net, 16, 1, 30)
        assert net.back() is None
    for _ in range(3):
        window(net, 16, 40, 40)
    assert net.best == {"load": 16}


def test_what_another_allocation_made_does_not_count() -> None:
    net = started()
    net.changed({"load": 2})
    for _ in range(3):
        window(net, 2, 50, 2)
    assert net.best == {"load": 4}, "fifty batches a second came out of the buffers"
    for _ in range(3):
        window(net, 2, 5, 5)
    back = net.back()
    assert back is not None and back.allocation == {"load": 4}


def test_slow_items_are_counted_though_some_are_under_way_at_the_ends_of_a_window() -> None:
    net = Net()
    for _ in range(4):
        window(net, 4, 4, 4)
    net.changed({"load": 8})
    for made in (3, 0):
        assert net.back() is None
        window(net, 8, 1, made)
    assert net.back() is not None


def test_a_pipeline_that_is_never_steady_is_caught_all_the_same() -> None:
    net = started()
    net.changed({"load": 16})
    took = 0
    while net.back() is None:
        window(net, 16, 1, 30)
        took += 1
    assert ENOUGH < took <= MOST_UNSTEADY + ENOUGH


@pytest.mark.parametrize(("cv", "windows"), [(0.1, ENOUGH), (0.9, IDLE)])
def test_windows_of_few_unequal_items_prove_less(cv: float, windows: int) -> None:
    # Ten items that differ by nine tenths of their mean: a fifth more or fewer of them in a second is luck.
    net, took = started(cv=cv), 0
    net.changed({"load": 8})
    while net.back() is None:
        window(net, 8, 8, 8, cv)
        took += 1
        assert took < 40
    assert took == windows


def test_what_turned_out_better_was_no_harm() -> None:
    net = started()
    net.changed({"load": 8})
    for _ in range(5):  # a slow item, of before the change
        window(net, 8, 1, 1)
    assert net.harm_s > 4.0
    for _ in range(8):
        window(net, 8, 14, 14)
    assert net.best == {"load": 8}
    assert net.harm_s == 0.0


def test_what_failed_and_was_the_best_when_it_was_tried_again_is_kept() -> None:
    """Somebody goes back to it before it is known whether the machine was slow meanwhile."""
    net = started()
    net.changed({"load": 8})
    for _ in range(2):
        window(net, 8, 5, 5)
    assert net.back() is not None
    net.changed({"load": 4})
    window(net, 4, 10, 10)
    net.changed({"load": 8})
    for _ in range(8):
        window(net, 8, 40, 40)
    assert net.best == {"load": 8}
    net.changed({"load": 4})
    for _ in range(3):
        window(net, 4, 10, 10)
    back = net.back()
    assert back is not None and back.allocation == {"load": 8}


def test_a_model_that_becomes_slower_all_the_time_does_not_lead_to_and_fro() -> None:
    net, workers, tries = Net(), 4, 0
    for second in range(300):
        batches = round(4000 * 0.995**second)
        window(net, workers, batches, batches)
        back, again = net.back(), net.again()
        if back is not None:
            workers = back.allocation["load"]
            net.changed(back.allocation)
        elif second == 30 or again is not None:
            workers, tries = 8, tries + 1
            net.changed({"load": 8})
    assert 1 <= tries <= 6


def test_unequal_items_do_not_excuse_a_lasting_loss() -> None:
    net = Net()
    for _ in range(12):
        window(net, 4, 20, 20, cv=1.3)
    net.changed({"load": 3})
    took = 0
    while net.back() is None:
        window(net, 3, 17, 17, cv=1.3)
        took += 1
        assert took < 20


def test_an_evaluation_inside_the_loop_does_not_use_up_what_trials_may_cost() -> None:
    net = started()
    for _ in range(100):
        window(net, 4, 10, 10)
    net.changed({"load": 8})
    window(net, 8, 14, 14)
    window(net, 8, 2, 2, evaluated_s=10.0, left_s=0.0)
    assert net.back() is None
    assert not net.permit.is_spent
    for _ in range(4):
        window(net, 8, 14, 14)
        assert net.back() is None
    assert net.best == {"load": 8}


def test_a_process_stopped_in_one_fetch_does_not_use_up_what_trials_may_cost() -> None:
    net = started()
    net.changed({"load": 8})
    window(net, 8, 100, 100, stopped_s=1000.0, left_s=0.0)
    assert not net.permit.is_spent


def test_a_machine_that_changed_is_adapted_to_whatever_trials_have_cost_before() -> None:
    net = started()
    net.changed({"load": 8})
    for _ in range(20):
        window(net, 8, 1, 1)
    assert net.permit.is_spent
    for _ in range(2):
        window(net, 8, 1, 1, cpus=32.0)
    assert not net.permit.is_spent


def test_a_machine_that_keeps_changing_gives_no_new_allowance_each_time() -> None:
    net = Net()
    for second in range(600):
        now = 4 if second % 30 < 4 or net.permit.is_spent else 8
        net.changed({"load": now})
        window(net, now, 10 if now == 4 else 1, 10 if now == 4 else 1, cpus=8.0 if second // 30 % 2 else 32.0)
    # The first machine may use what all of the run would allow; each later one is expected to stay as long as the last.
    assert net.harm_s <= MOST_HARM * (30 + 600) + 19 * (MOST_HARM * 60 + 1.0)
