"""The net: whatever the policy wants and the pipeline does, the run ends where it was measured to be best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work, observation
from hypothesis import given, settings
from hypothesis import strategies as st

from intune_callbacks.config import POLICIES, TunerConfig
from intune_callbacks.guard.net import ENOUGH, IDLE, MOST_HARM, Net
from intune_callbacks.guard.permit import Permit
from intune_callbacks.measure.steady import MOST_UNSTEADY
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.tuner import Tuner
from intune_callbacks.types import Allocation, Observation, Proposal, Resources, Stage, StageRates


class Wish:
    """Wants one thing, and wants it again at every decision; remembers what was taken back."""

    name = "wish"

    def __init__(self, **wanted: int) -> None:
        self.wanted, self.failed = wanted, []  # type: ignore[var-annotated]

    def decide(self, seen: Observation) -> Proposal:
        return Proposal(self.wanted, "as always")

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        self.failed.append((failed, ratio))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class NeverRises(FakePipeline):
    """What was lowered once stays as slow as it was then, whatever `stages` says: an interleave of tf.data."""

    lowest = math.inf

    def capacity(self, name: str, values: Mapping[str, int]) -> float:
        self.lowest = min(self.lowest, self.values[name])
        return super().capacity(name, {**values, name: min(values[name], int(self.lowest))})


class Thrashes(FakePipeline):
    """More than eight workers are ten times slower."""

    def capacity(self, name: str, values: Mapping[str, int]) -> float:
        return super().capacity(name, values) * (0.1 if values[name] > 8 else 1.0)


class Lies(FakePipeline):
    """Says that its workers hardly do anything, and CPU seconds that are none."""

    def stats(self) -> Any:
        seen = super().stats()
        wrong = {
            n: replace(s, busy_s=s.busy_s / 50, busy_s2=s.busy_s2 / 2500, cpu_s=0.0) for n, s in seen.stages.items()
        }
        return replace(seen, stages=wrong)


def tuned(pipeline: FakePipeline, wish: Any = None, **config: Any) -> Tuner:
    machine = pipeline.machine
    return Tuner(pipeline, TunerConfig(**config), policy=wish, probe=machine, clock=machine.clock())


def ioish(kind: type[FakePipeline], workers: int = 8, **machine: Any) -> FakePipeline:
    work = Work(0.1, cpu_share=0.01, workers=workers, window=4 * workers, cv=0.1)
    return kind({"read": work}, FakeMachine(**({"cpus": 8.0} | machine)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [NeverRises, Thrashes, Lies])
def test_no_policy_ends_below_the_start(kind: type[FakePipeline], policy: str) -> None:
    pipeline = ioish(kind)
    loop = FakeLoop(pipeline, model_s=0.002)
    start = loop.throughput
    tuner = tuned(pipeline, policy=policy)
    begin_s = pipeline.machine.now_s
    loop.run(tuner, seconds=120.0)
    tuner.end(loop.totals)
    assert loop.throughput >= 0.98 * start, "where it ends"
    whole = loop.totals.steps / (pipeline.machine.now_s - begin_s)
    assert whole >= 0.97 * start, "all of it, trials included"
    assert tuner.frozen is None


def test_a_failed_trial_is_left_after_two_windows_and_the_policy_learns_of_it() -> None:
    pipeline, wish = ioish(Thrashes), Wish(read=16)
    loop = FakeLoop(pipeline, model_s=0.002)
    decisions = loop.run(tuned(pipeline, wish), seconds=12.0)
    tried = [d for d in decisions if d.before["read"] == 16]
    assert 1 <= len(tried) <= 2
    assert tried[-1].after["read"] == 8
    assert "back to the best allocation measured: this one gave 20 % of its throughput" in tried[-1].reason
    ((failed, ratio),) = wish.failed
    assert failed["read"] == 16 and ratio == pytest.approx(0.2, rel=0.1)


def test_what_failed_is_tried_half_as_far_once_and_then_no_more() -> None:
    pipeline = ioish(Thrashes)
    loop = FakeLoop(pipeline, model_s=0.002)
    decisions = loop.run(tuned(pipeline, Wish(read=32)), seconds=3000.0)
    tried = [d.after["read"] for d in decisions if d.applied and d.after["read"] > 8]
    assert tried == [32, 16], "the geometric middle of 8 and 32"
    assert pipeline.values["read"] == 8


def test_trials_that_fail_cost_no_more_than_a_fiftieth_of_the_run() -> None:
    class Restless(Wish):
        def decide(self, seen: Observation) -> Proposal:
            self.wanted = {"read": 2 if seen.step % 7 else 9 + seen.step % 11, "read.window": 4 + seen.step % 40}
            return super().decide(seen)

    pipeline = ioish(Thrashes)
    loop = FakeLoop(pipeline, model_s=0.002)
    start, begin_s = loop.throughput, pipeline.machine.now_s
    tuner = tuned(pipeline, Restless())
    loop.run(tuner, seconds=600.0)
    lost_s = (pipeline.machine.now_s - begin_s) - loop.totals.steps / start
    # The trial that uses up the allowance is seen at its end.
    assert lost_s <= MOST_HARM * 600.0 + 1.5
    assert tuner._net.harm_s <= MOST_HARM * 600.0 + 1.5


@pytest.mark.parametrize("stalled", ["at the start", "in a trial"])
def test_a_machine_that_stalls_for_a_minute_does_not_end_the_tuning(stalled: str) -> None:
    pipeline = ioish(FakePipeline, workers=2)
    loop = FakeLoop(pipeline, model_s=0.002)
    tuner = tuned(pipeline)
    if stalled == "in a trial":
        loop.run(tuner, seconds=60.0, until=lambda: any(d.applied for d in loop.decisions))
    fine = pipeline.work["read"]
    pipeline.work["read"] = replace(fine, service_s=10 * fine.service_s)
    loop.run(tuner, seconds=60.0)
    pipeline.work["read"] = fine
    loop.run(tuner, seconds=200.0)
    assert loop.throughput >= 4 * 2 / 0.1


def test_a_neighbour_that_comes_and_goes_leaves_the_run_no_slower_than_the_start() -> None:
    pipeline = FakePipeline({"decode": Work(0.1, workers=4, window=16)}, FakeMachine(cpus=8.0))
    machine = pipeline.machine
    loop = FakeLoop(pipeline, model_s=0.002)
    tuner = Tuner(pipeline, TunerConfig(cpus=8.0), probe=_Blind(machine), clock=machine.clock())
    for _ in range(6):
        machine.cpus = 3.0
        loop.run(tuner, seconds=17.0)
        machine.cpus = 8.0
        loop.run(tuner, seconds=13.0)
    assert loop.throughput >= 0.98 * 40.0


class _Blind:
    """A probe that does not see the neighbour."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def read(self) -> Resources:
        return replace(self._machine.read(), cpus=8.0)


def test_starts_of_epochs_count_against_an_allocation() -> None:
    """Sixteen workers are faster in an epoch of ten batches, and take longer to start than they save."""
    net, seconds = Net(), {4: (0.1, 0.2), 16: (0.05, 1.0)}
    stage = Stage("load", "cpu", "workers", 1, 64, 4, startup_s=0.05)
    totals = StepTotals(epochs=1)

    def epoch(workers: int) -> None:
        nonlocal totals
        batch_s, start_s = seconds[workers]
        active_s = 10 * batch_s + start_s
        totals = replace(
            totals,
            steps=totals.steps + 10,
            wait_s=totals.wait_s + active_s,
            wall_s=totals.wall_s + active_s,
            seam_s=totals.seam_s + start_s,
            epochs=totals.epochs + 1,
            epoch_start_s=start_s,
            epoch_batches=10,
        )
        now = replace(stage, current=workers)
        seen = observation((now,), elapsed_s=active_s, batches=10, seam_s=start_s, epoch_batches=10)
        net.watch(seen, totals)

    for _ in range(100):
        epoch(4)
    net.changed({"load": 16})
    epoch(16)
    assert net.back() is None, "one window proves nothing"
    epoch(16)
    back = net.back()
    assert back is not None and back.allocation == {"load": 4}
    assert back.ratio == pytest.approx((1.2 / 10) / (1.5 / 10), rel=0.02)


def test_the_best_follows_work_that_became_heavier() -> None:
    pipeline = ioish(FakePipeline, workers=2)
    loop = FakeLoop(pipeline, model_s=0.002)
    tuner = tuned(pipeline)
    loop.run(tuner, seconds=60.0)
    pipeline.work["read"] = replace(pipeline.work["read"], service_s=0.4)
    loop.run(tuner, seconds=120.0)
    held = pipeline.values["read"]
    assert held / 0.4 > 0.5 * 1 / 0.002 or held >= 60, "it went on growing although all became slower"


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=30),
    st.dictionaries(st.integers(1, 64), st.floats(0.2, 5.0), max_size=64),
)
def test_whatever_is_tried_the_end_is_as_good_as_the_start(wishes: list[int], factors: dict[int, float]) -> None:
    """Any answer of a pipeline to any number of workers."""

    class Odd(FakePipeline):
        def capacity(self, name: str, values: Mapping[str, int]) -> float:
            return 40.0 * factors.get(values[name], 1.0) if values[name] != 8 else 40.0

    class Wishes(Wish):
        def decide(self, seen: Observation) -> Proposal:
            self.wanted = {"read": wishes.pop(0)} if wishes else {}
            return super().decide(seen)

    pipeline = ioish(Odd)
    loop = FakeLoop(pipeline, model_s=0.001, jitter=0.02)
    loop.run(tuned(pipeline, Wishes()), seconds=300.0)
    assert loop.throughput >= 0.97 * 40.0


# -- what may be tried -------------------------------------------------------------------------------------------------


def seen(current: int = 4, wait: float = 0.8, **more: Any) -> Observation:
    rates = more.pop("rates", StageRates(100, 1.0, 0.1, 0.001, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    stage = Stage("load", "cpu", "workers", 0, 64, current, startup_s=more.pop("startup_s", 0.0))
    known = {"wait_frac": wait, "remaining_s": 600.0, "latency_s": 0.1, "rates": {"load": rates}}
    return observation((stage,), **(known | more))


def window(net: Net, current: int, batches: int, made: int, cv: float = 0.1, cpus: float = 8.0) -> None:
    """One second in which so many batches were delivered, and so many items made."""
    rates = StageRates(made, made / batches, 0.1, 0.001, cv, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    before = net._totals
    totals = StepTotals(before.steps + batches, before.wait_s + 0.8, before.model_s + 0.2, 0.0, before.wall_s + 1.0)
    machine = Resources(cpus, 1 << 34, 1 << 30)
    net.watch(seen(current, batches=batches, elapsed_s=1.0, rates=rates, resources=machine), totals)


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


def test_a_run_that_settled_long_ago_holds_no_more_than_before() -> None:
    import tracemalloc

    pipeline = FakePipeline({"decode": Work(0.01)}, FakeMachine())
    loop, tuner = FakeLoop(pipeline), tuned(pipeline, Wish(), decide_every_s=0.0, decide_every_batches=1)

    def held_after(decisions: int) -> int:
        while decisions:
            loop.step()
            decisions -= tuner.batch(loop.totals, 32) is not None
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = held_after(2_000)  # by then the history has what it keeps
        assert held_after(4_000) - first < 40_000
    finally:
        tracemalloc.stop()


def test_the_only_stage_keeps_the_users_number_while_the_machine_is_the_same() -> None:
    """A stranger's eight workers that read and compute were cut to six for the CPUs of nobody: .9 of the speed."""
    rules, busy = permit(), StageRates(100, 1.0, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    granted, why = rules.grant({"load": 2}, seen(rates=busy))
    assert granted == {} and "not below 4" in why
    now = seen(rates=busy)
    smaller = replace(now, resources=replace(now.resources, cpus=now.resources.cpus / 2))
    assert rules.grant({"load": 2}, smaller) == ({"load": 2}, "")
