"""What may be tried: only what is worth it in the time that is left, and never for nobody's CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import seen

from intune_callbacks.guard.permit import Permit
from intune_callbacks.types import Resources, Stage, StageRates


def permit(own: int = 4) -> Permit:
    rules = Permit()
    rules.begin(seen(own).stages)
    return rules


def test_below_the_users_number_only_where_cpus_are_short() -> None:
    assert permit().grant({"load": 2}, seen()) == ({}, "load not below 4, where it began: nobody else needs its CPUs")
    busy = StageRates(100, 1.0, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    both = seen(rates=busy)
    both = replace(both, stages=(*both.stages, Stage("read", "cpu", "workers", 1, 64, 4)))
    assert permit().grant({"load": 2}, both) == ({"load": 2}, "")
    assert permit().grant({"load": 4}, seen(9)) == ({"load": 4}, ""), "down to it always"


def test_nothing_grows_where_nothing_can_be_gained() -> None:
    granted, why = permit().grant({"load": 8}, seen(wait=0.03))
    assert granted == {} and why == "the training waits 3 % of the time: nothing to gain"
    assert permit().grant({"load": 8}, seen(wait=0.5, exposed_wait_frac=0.01))[0] == {}, "the GPU has work"
    assert permit().grant({"load": 8}, seen(wait=0.01, exposed_wait_frac=0.5))[0] == {"load": 8}


def test_workers_that_start_with_each_epoch_do_not_grow_for_its_start() -> None:
    """A stranger's epochs waited 27 % of the time, all of it for the first batch: more workers only started later."""
    granted, why = permit().grant({"load": 8}, seen(wait=0.27, seam_s=2.6, elapsed_s=10.0, startup_s=0.05))
    assert granted == {} and why == "the training waits 1 % of the time, starts of epochs left out: nothing to gain"
    assert permit().grant({"load": 8}, seen(wait=0.27, seam_s=1.0, elapsed_s=10.0, startup_s=0.05))[0] == {"load": 8}
    # Threads fill the first batch of an epoch together.
    assert permit().grant({"load": 8}, seen(wait=0.27, seam_s=2.6, elapsed_s=10.0))[0] == {"load": 8}


def test_nothing_grows_where_the_pipeline_has_all_cpus_in_use() -> None:
    busy = StageRates(60, 1.0, 2.0, 0.2, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    two = Resources(1.0, 1, 0)  # and one for the training
    granted, why = permit().grant({"load": 8}, seen(wait=0.1, elapsed_s=10.0, rates=busy, resources=two))
    assert granted == {} and why == "the pipeline has all CPUs in use: more workers would share them"
    # A training that waits leaves its CPU to the pipeline.
    assert permit().grant({"load": 8}, seen(wait=0.4, elapsed_s=10.0, rates=busy, resources=two))[0] == {"load": 8}


def test_a_run_too_short_to_earn_a_change_back_is_only_observed() -> None:
    assert permit().grant({"load": 8}, seen(remaining_s=2.0))[0] == {}
    assert permit().grant({"load": 8}, seen(remaining_s=20.0, startup_s=0.5))[0] == {"load": 8}
    assert permit().grant({"load": 60}, seen(remaining_s=20.0, startup_s=0.5))[0] == {}, "sixty workers take 30 s"
    unknown = permit()
    assert unknown.grant({"load": 8}, seen(remaining_s=None))[0] == {}
    unknown.wall_s = 30.0
    assert unknown.grant({"load": 8}, seen(remaining_s=None))[0] == {"load": 8}


@pytest.mark.parametrize(("wait", "fetch_s", "leaves"), [(0.5, 0.01, True), (0.5, 0.004, False), (0.08, 0.01, False)])
def test_work_leaves_the_training_loop_only_where_that_pays(wait: float, fetch_s: float, leaves: bool) -> None:
    granted, _ = permit(0).grant({"load": 2}, seen(0, wait=wait, latency_s=fetch_s))
    assert granted == ({"load": 2} if leaves else {})


def test_workers_that_start_in_each_epoch_are_no_more_than_their_start_is_worth() -> None:
    # 50 batches of .1 s are 5 worker seconds: sqrt(5 / .05) = 10 workers, 1 s an epoch; 11 would take longer.
    granted, why = permit().grant({"load": 40}, seen(epoch_batches=50, startup_s=0.05))
    assert granted == {"load": 10} and why == "load not above 10"
    each_s = {n: 5.0 / n + 0.05 * n for n in (9, 10, 11)}
    assert min(each_s, key=lambda n: each_s[n]) == 10
    assert permit().grant({"load": 40}, seen(epoch_batches=50))[0] == {"load": 40}, "persistent workers"


def test_the_only_stage_keeps_the_users_number_while_the_machine_is_the_same() -> None:
    """A stranger's eight workers that read and compute were cut to six for the CPUs of nobody: .9 of the speed."""
    rules, busy = permit(), StageRates(100, 1.0, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    granted, why = rules.grant({"load": 2}, seen(rates=busy))
    assert granted == {} and "not below 4" in why
    now = seen(rates=busy)
    smaller = replace(now, resources=replace(now.resources, cpus=now.resources.cpus / 2))
    assert rules.grant({"load": 2}, smaller) == ({"load": 2}, "")
