"""settle: the word, the guilty stage, the headroom and the sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.measure.verdict import Verdict, settle
from intune_callbacks.types import Observation, Resources, Stage, StageRates

RESOURCES = Resources(cpus=4.0, memory_limit_bytes=1 << 30, memory_used_bytes=1 << 20)


def observation(
    wait_frac: float,
    *,
    batches: int = 50,
    exposed: float | None = None,
    **stages: tuple[float, float],
) -> Observation:
    """A window; each stage is given as (busy fraction, queue fill), in pipeline order."""
    return Observation(
        step=1000,
        at_s=0.0,
        elapsed_s=10.0,
        batches=batches,
        samples=batches,
        batches_per_s=batches / 10,
        samples_per_s=batches / 10,
        wait_frac=wait_frac,
        model_s=(1 - wait_frac) * 10 / max(batches, 1),
        stages=(
            *(Stage(name, "cpu", "workers", 1, 8, 2) for name in stages),
            *(Stage(f"{name}.window", "memory", "items", 1, 8, 2, window_of=name) for name in stages),
            Stage("prefetch", "memory", "items", 1, 8, 2),
        ),
        rates={
            name: StageRates(1, 1.0, 0.1, 0.1, 0.0, busy, 1 - busy, 0.0, fill, 0.0, 0.0)
            for name, (busy, fill) in {**stages, "prefetch": (1.0, 1.0)}.items()
        },
        resources=RESOURCES,
        exposed_wait_frac=exposed,
    )


def verdict(window: Observation) -> Verdict:
    return settle([window])


def test_no_verdict_before_20_steps() -> None:
    short = verdict(observation(0.9, batches=19, decode=(1.0, 0.0)))
    assert short == Verdict("too short", None, 0.0, "behind the warm-up 19 steps were measured in whole windows, a verdict needs 20")
    assert verdict(observation(0.9, batches=20, decode=(1.0, 0.0))).kind == "input-bound"
    assert verdict(observation(0.9, batches=1)).why == "behind the warm-up 1 step was measured in whole windows, a verdict needs 20"
    assert settle([]).why == "behind the warm-up 0 steps were measured in whole windows, a verdict needs 20"


def test_fewer_steps_are_enough_where_each_takes_seconds() -> None:
    assert verdict(observation(0.9, batches=11)).kind == "too short"
    assert settle([observation(0.9, batches=5), observation(0.9, batches=6)]).kind == "input-bound"
    assert settle([observation(0.9, batches=3)] * 2).why == "behind the warm-up 6 steps were measured in whole windows, a verdict needs 8"


def test_what_a_change_was_made_on_is_told_of_fewer_steps_too() -> None:
    assert settle([observation(0.9, batches=8)], is_ground=True).kind == "input-bound"
    assert settle([observation(0.1, batches=8)], is_ground=True).kind == "too short"
    assert settle([], is_ground=True).kind == "too short"


def test_several_short_windows_make_one_verdict() -> None:
    assert settle([observation(0.5, batches=10)]).kind == "too short"
    assert settle([observation(0.5, batches=10)] * 2).kind == "input-bound"


def test_the_sentence_names_the_share_and_the_stage() -> None:
    seen = verdict(observation(0.34, read=(0.5, 0.9), decode=(0.99, 0.1), collate=(0.1, 0.0)))
    assert (seen.kind, seen.stage) == ("input-bound", "decode")
    assert seen.why == "the trainer waited 34 % of each step on 'decode'"
    assert seen.headroom == pytest.approx(0.34 / 0.66)


@pytest.mark.parametrize(
    ("wait_frac", "fill", "kind"),
    [
        (0.20, 1.0, "input-bound"),
        (0.199, 1.0, "balanced"),
        (0.10, 1.0, "balanced"),
        (0.099, 0.5, "compute-bound"),
        (0.099, 0.49, "balanced"),
        (0.0, 0.0, "balanced"),
    ],
)
def test_the_limits_between_the_verdicts(wait_frac: float, fill: float, kind: str) -> None:
    # Only the last worker stage's queue says whether batches are in stock.
    seen = verdict(observation(wait_frac, read=(0.5, 1.0 - fill), decode=(0.9, fill)))
    assert seen.kind == kind
    assert (seen.stage is None) == (kind != "input-bound")


@pytest.mark.parametrize(("wait_frac", "kind"), [(0.049, "compute-bound"), (0.05, "balanced"), (0.2, "input-bound")])
def test_without_a_queue_the_wait_alone_decides(wait_frac: float, kind: str) -> None:
    assert verdict(observation(wait_frac)).kind == kind


def test_without_a_known_stage_the_sentence_says_data() -> None:
    assert verdict(observation(0.5)).why == "the trainer waited 50 % of each step for data"
    assert verdict(observation(0.5, exposed=0.4)).why == "the GPU stood idle 40 % of each step waiting for data"
    idle = verdict(observation(0.5, decode=(0.0, 0.0)))
    assert (idle.stage, idle.why) == (None, "the trainer waited 50 % of each step for data")


def test_stages_about_equally_busy_are_told_apart_by_their_queues() -> None:
    assert verdict(observation(0.5, read=(0.97, 0.9), decode=(0.95, 0.1))).stage == "decode"
    assert verdict(observation(0.5, read=(0.97, 0.9), decode=(0.90, 0.1))).stage == "read"
    assert verdict(observation(0.5, read=(0.95, 0.1), decode=(0.97, 0.1))).stage == "decode"


def test_the_gpu_has_the_last_word() -> None:
    fed = verdict(observation(0.6, exposed=0.02, decode=(0.5, 0.9)))
    assert (fed.kind, fed.why) == (
        "compute-bound",
        "the GPU stood idle 2 % of each step; the input pipeline is not the bottleneck",
    )
    # A loop that never waits for the GPU is ahead of it, and takes each batch as soon as it is there.
    assert verdict(observation(0.9, exposed=0.01, decode=(0.5, 0.0))).kind == "compute-bound"
    starved = verdict(observation(0.6, exposed=0.5, decode=(0.9, 0.0)))
    assert (starved.kind, starved.headroom) == ("input-bound", 1.0)
    assert starved.why == "the GPU stood idle 50 % of each step waiting for 'decode'"
    # One window without the number: what all windows have is compared.
    assert settle([observation(0.6, exposed=0.02), observation(0.6)]).kind == "input-bound"


def test_one_odd_window_does_not_decide() -> None:
    usual = observation(0.02, decode=(0.4, 1.0))
    odd = observation(0.95, decode=(1.0, 0.0))
    assert settle([usual, odd, usual]).kind == "compute-bound"
    assert settle([observation(0.9, exposed=e) for e in (0.02, 0.9, 0.03)]).why.startswith("the GPU stood idle 3 %")
    assert settle([observation(0.02, decode=(0.4, fill)) for fill in (0.1, 0.2, 1.0)]).kind == "balanced"
    starved = [observation(0.5, read=(0.2, 0.1), decode=(0.99, 0.1)) for _ in range(4)]
    assert settle([*starved, observation(0.5, read=(1.0, 0.1), decode=(0.0, 0.1))]).stage == "decode"


def test_few_long_waits_are_judged_by_their_share_of_the_time() -> None:
    usual, long = observation(0.0, decode=(0.4, 1.0)), replace(observation(0.9), elapsed_s=40.0)
    seen = settle([usual] * 8 + [long] * 2)
    assert (seen.kind, seen.stage) == ("input-bound", None)
    assert seen.why == "the trainer waited 30 % of the time for data, but unevenly: 0 % in most windows"
    assert seen.unevenly == pytest.approx(0.3)
    assert settle([usual] * 8 + [long]).kind == "compute-bound", "one is an accident"
    assert settle([usual] * 8 + [replace(long, elapsed_s=15.0)] * 2).kind == "balanced"
    assert settle([observation(0.15), observation(0.22), observation(0.25)]).unevenly == 0.0
    on_gpu = [replace(one, exposed_wait_frac=0.01) for one in [usual] * 8 + [long] * 2]
    assert settle(on_gpu).kind == "compute-bound", "the GPU had work meanwhile"
    # As where 18 workers deliver all at once, and then nothing for a second.
    idle = [replace(one, exposed_wait_frac=one.wait_frac) for one in [usual] * 8 + [long] * 2]
    assert settle(idle).why == "the GPU stood idle 30 % of the time for data, but unevenly: 0 % in most windows"


def test_windows_may_be_the_end_of_a_longer_time() -> None:
    usual = observation(0.01, decode=(0.4, 1.0))
    assert settle([usual] * 4, 0.4).why.startswith("the trainer waited 40 % of the time for data, but unevenly: 1 %")
    assert settle([usual] * 4, 0.02).kind == "compute-bound"


def test_the_stages_of_the_last_window_are_judged() -> None:
    old, new = observation(0.5, gone=(1.0, 0.0)), observation(0.5, decode=(0.6, 0.0))
    assert settle([old, new]).stage == "decode"


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_headroom_is_finite_and_grows_with_the_wait(one: float, other: float, busy: float) -> None:
    low, high = sorted((one, other))
    small, large = (verdict(observation(wait, decode=(busy, 0.5))) for wait in (low, high))
    assert 0 <= small.headroom <= large.headroom <= 1001
    assert verdict(observation(0.5)).headroom == 1.0


def test_an_empty_stage_without_a_window_may_be_fast_enough() -> None:
    seen = observation(0.03, decode=(0.5, 0.0))
    assert verdict(seen).kind == "balanced"
    alone = replace(seen, stages=tuple(stage for stage in seen.stages if stage.window_of is None))
    assert verdict(alone).kind == "compute-bound"


def test_workers_that_stand_idle_are_not_what_the_training_waits_for() -> None:
    starved = verdict(observation(0.8, map=(0.2, 0.0)))
    assert (starved.stage, starved.why) == (None, "the trainer waited 80 % of each step for data")


def test_where_the_windows_differ_from_all_the_time_both_shares_are_said() -> None:
    some = [observation(0.5, decode=(1.0, 0.0))] * 3
    assert settle(some, in_all=0.72).why == "the trainer waited 72 % of the time (50 % in most windows) on 'decode'"
    assert settle(some, in_all=0.52).why == "the trainer waited 50 % of each step on 'decode'"
    few = settle([observation(0.02, decode=(0.1, 0.9))] * 3, in_all=0.58).why
    assert few == (
        "the trainer waited 58 % of the time, but 2 % in most windows: there the input pipeline is not the bottleneck"
    )
    assert "stood idle 50 % of each step" in settle([replace(some[0], exposed_wait_frac=0.5)], in_all=0.9).why
