"""The guard: whatever is asked, CPUs and memory are kept, and a refusal says why in numbers."""

from __future__ import annotations

import pytest
from fakes import GB, MB, observation
from hypothesis import given, settings
from hypothesis import strategies as st

from intune_callbacks.config import TunerConfig
from intune_callbacks.guard.guard import Guard
from intune_callbacks.pipelines.base import busy_limit
from intune_callbacks.types import Observation, Resources, Stage, StageRates


def rates(share: float = 1.0, item_bytes: float = 1.0 * MB, worker_bytes: float = 0.0, fill: float = 0.0) -> StageRates:
    return StageRates(100, 1.0, 0.1, 0.1 * share, 0.0, 1.0, 0.0, 0.0, fill, item_bytes, worker_bytes)


def stage(name: str, current: int, high: int = 512) -> Stage:
    return Stage(name, "cpu", "workers", 1, high, current)


def window(name: str, current: int) -> Stage:
    return Stage(f"{name}.window", "memory", "items", 1, 4096, current, window_of=name)


def machine(cpus: float = 8.0, used: float = 1 * GB, limit: float = 10 * GB) -> Resources:
    return Resources(cpus, int(limit), int(used))


def seen(*, workers: int = 2, width: int = 4, resources: Resources | None = None, **kind: float) -> Observation:
    return observation(
        [stage("decode", workers), window("decode", width)], resources or machine(), rates={"decode": rates(**kind)}
    )


def test_what_fits_is_left_alone() -> None:
    ruling = Guard(TunerConfig()).check({"decode": 6, "decode.window": 12}, seen())
    assert ruling.allocation == {"decode": 6, "decode.window": 12}
    assert ruling.vetoes == ()


def test_stages_left_out_stay_and_unknown_ones_are_dropped() -> None:
    assert Guard(TunerConfig()).check({"decode": 3, "nonsense": 9}, seen()).allocation == {
        "decode": 3,
        "decode.window": 4,
    }


def test_busy_workers_stay_within_the_cpus_a_little_more_for_bursts_and_one_per_stage() -> None:
    ruling = Guard(TunerConfig()).check({"decode": 40}, seen())
    assert ruling.allocation["decode"] == 10
    assert ruling.vetoes == ("40.0 busy CPUs asked, 10.2 allowed on 8: 10.0 granted",)


def test_workers_that_wait_for_io_need_no_cpu() -> None:
    assert Guard(TunerConfig()).check({"decode": 40}, seen(share=0.1)).allocation["decode"] == 40


def test_the_largest_recent_cpu_share_counts() -> None:
    guard = Guard(TunerConfig())
    guard.watch(observation([stage("decode", 2)], machine(), rates={"decode": rates(1.0)}, at_s=1.0))
    # Crowded: each worker now gets a fifth of a CPU. With more of them it would not be five times as many.
    crowded = observation([stage("decode", 2)], machine(), rates={"decode": rates(0.2)}, at_s=2.0)
    assert guard.check({"decode": 40}, crowded).allocation["decode"] == 10


def test_a_stage_never_measured_counts_as_busy() -> None:
    assert Guard(TunerConfig()).check({"a": 40}, observation([stage("a", 1)], machine())).allocation["a"] == 10


def test_growth_is_cut_before_what_is_there() -> None:
    stages = [stage("a", 4), stage("b", 4)]
    ruling = Guard(TunerConfig()).check({"b": 30}, observation(stages, machine(), rates={"a": rates(), "b": rates()}))
    assert ruling.allocation == {"a": 4, "b": 7}


def test_max_workers() -> None:
    ruling = Guard(TunerConfig(max_workers=3)).check({"decode": 6}, seen())
    assert ruling.allocation["decode"] == 3
    assert ruling.vetoes == ("decode: 6 workers asked, max_workers=3",)


def test_memory_is_planned_with_full_windows() -> None:
    # 9 GB soft limit, 1 used, .1 GB a result: 80 results fit; those already queued (half of 4) are in the 1 GB.
    ruling = Guard(TunerConfig()).check({"decode.window": 400}, seen(item_bytes=100 * MB, fill=0.5))
    assert 70 <= ruling.allocation["decode.window"] <= 82
    assert "soft limit 9.00 of 10.00 GB" in ruling.vetoes[0]
    assert "40.80 GB needed" in ruling.vetoes[0]


def test_windows_give_way_before_workers() -> None:
    small = seen(item_bytes=500 * MB, worker_bytes=500 * MB)
    ruling = Guard(TunerConfig()).check({"decode": 8, "decode.window": 40}, small)
    assert ruling.allocation["decode"] == 8
    assert ruling.allocation["decode.window"] < 40


def test_new_process_workers_need_memory() -> None:
    ruling = Guard(TunerConfig()).check({"decode": 9}, seen(item_bytes=1.0, worker_bytes=1.9 * GB))
    assert ruling.allocation["decode"] == 6  # four more at 1.9 GB beside the 1 GB in use


def test_while_the_size_of_a_result_is_unknown_a_window_at_most_doubles() -> None:
    ruling = Guard(TunerConfig()).check({"decode.window": 100}, seen(item_bytes=0.0))
    assert ruling.allocation["decode.window"] == 8
    assert "100 asked, 8 until" in ruling.vetoes[0]


def test_an_unmeasured_buffer_is_taken_to_hold_the_largest_items() -> None:
    depth = Stage("prefetch", "memory", "items", 1, 64, 2)
    there = observation([stage("decode", 2), depth], machine(), rates={"decode": rates(item_bytes=1 * GB)})
    assert Guard(TunerConfig()).check({"prefetch": 32}, there).allocation["prefetch"] <= 8


def test_no_alarm_below_the_soft_limit() -> None:
    assert Guard(TunerConfig()).alarm(seen(resources=machine(used=8.9 * GB))) is None


def test_alarm_shrinks_windows_then_workers_down_to_low() -> None:
    guard = Guard(TunerConfig())
    workers, width, path = 8, 32, []
    for at_s in range(8):
        there = observation(
            [stage("decode", workers), window("decode", width)],
            machine(used=9.5 * GB),
            rates={"decode": rates(item_bytes=200 * MB)},
            at_s=float(at_s),
        )
        ruling = guard.alarm(there)
        if ruling is None:
            break
        assert "9.50 of 10.00 GB used" in ruling.vetoes[0]
        workers, width = ruling.allocation["decode"], ruling.allocation["decode.window"]
        path.append((workers, width))
    assert path == [(8, 8), (4, 4), (2, 2), (1, 1)]


def test_alarm_leaves_a_pipeline_that_holds_nothing() -> None:
    # Somebody else fills the memory: shrinking would cost throughput and free nothing.
    assert Guard(TunerConfig()).alarm(seen(item_bytes=1000.0, resources=machine(used=9.5 * GB))) is None


def test_what_an_alarm_took_of_the_users_numbers_is_given_back_once_it_fits_for_a_while() -> None:
    guard, own = Guard(TunerConfig()), {"decode": 8, "decode.window": 32}

    def at(at_s: float, used: float, workers: int = 2, width: int = 2) -> Observation:
        stages = [stage("decode", workers), window("decode", width)]
        known = {"decode": rates(item_bytes=100 * MB)}
        return observation(stages, machine(cpus=4.0, used=used * GB), rates=known, at_s=at_s)

    assert guard.restored(at(0.0, 1.0), own) is None, "no alarm took it"
    for at_s, width in ((0.5, 32), (1.0, 8)):
        assert guard.alarm(at(at_s, 9.5, 8, width)) is not None
    assert guard.restored(at(8.0, 2.0), own) is None, "too soon"
    assert guard.restored(at(12.0, 7.0), own) is None, "32 results of 100 MB have no room"
    ruling = guard.restored(at(13.0, 2.0), own)
    assert ruling is not None and ruling.allocation == own
    assert guard.restored(at(40.0, 2.0), own) is None, "once"
    for at_s, width in ((49.0, 32), (50.0, 8)):
        assert guard.alarm(at(at_s, 9.5, 8, width)) is not None
    assert guard.restored(at(62.0, 2.0), own) is None, "later each time"
    resumed = Guard(TunerConfig())
    resumed.load_state_dict(guard.state_dict())
    for known in (guard, resumed):
        ruling = known.restored(at(71.0, 2.0), own)
        assert ruling is not None and ruling.allocation == own


@pytest.mark.parametrize("ranks", [1, 8])
def test_ranks_of_a_node_share_the_memory_that_is_left(ranks: int) -> None:
    node = Resources(8.0, int(64 * GB), int(20 * GB), local_ranks=ranks)
    each = Guard(TunerConfig()).check(
        {"decode": 8, "decode.window": 400},
        seen(workers=4, width=8, resources=node, item_bytes=100 * MB, worker_bytes=500 * MB, fill=1.0),
    )
    grown = (each.allocation["decode.window"] - 8) * 100 * MB + (each.allocation["decode"] - 4) * 500 * MB
    assert 0.8 * (0.9 * 64 - 20) * GB < ranks * grown <= (0.9 * 64 - 20) * GB


def test_a_window_that_was_granted_and_does_not_fit_any_more_is_taken_back_but_not_below_the_users_own() -> None:
    guard, own = Guard(TunerConfig()), {"decode": 2, "decode.window": 4}
    fits = seen(width=60, item_bytes=100 * MB, fill=0.1, resources=machine(used=2 * GB))
    assert guard.again(fits, own) is None
    # Somebody else took 4 GB: 3 are left for a window that would grow by 5.4 GB.
    ruling = guard.again(seen(width=60, item_bytes=100 * MB, fill=0.1, resources=machine(used=6 * GB)), own)
    assert ruling is not None
    assert 30 <= ruling.allocation["decode.window"] <= 36
    assert ruling.allocation["decode"] == 2
    full = guard.again(seen(width=60, item_bytes=100 * MB, fill=0.0, resources=machine(used=8.9 * GB)), own)
    assert full is not None and full.allocation["decode.window"] == 4
    assert guard.again(seen(width=4, item_bytes=100 * MB, resources=machine(used=8.9 * GB)), own) is None


def test_memory_without_a_limit_is_not_limited() -> None:
    free = seen(item_bytes=1 * GB, resources=machine(limit=0))
    guard = Guard(TunerConfig())
    assert guard.alarm(free) is None
    assert guard.check({"decode.window": 400}, free).vetoes == ()


def test_what_was_learnt_survives_a_checkpoint() -> None:
    old, new = Guard(TunerConfig()), Guard(TunerConfig())
    old.watch(seen(share=0.1, item_bytes=100 * MB))
    new.load_state_dict(old.state_dict())
    blank = observation([stage("decode", 2), window("decode", 4)], machine(), at_s=0.0)
    ruling = new.check({"decode": 40, "decode.window": 400}, blank)
    assert ruling.allocation["decode"] == 40
    assert 70 <= ruling.allocation["decode.window"] <= 80


numbers = st.integers(1, 300)


@settings(max_examples=150)
@given(
    stages=st.lists(
        st.tuples(numbers, numbers, numbers, numbers, st.floats(0.0, 1.0), st.sampled_from([0.0, 1e3, 3e7, 2e9])),
        min_size=1,
        max_size=4,
    ),
    cpus=st.floats(0.5, 128.0),
    used=st.floats(0.0, 1.0),
    worker_bytes=st.sampled_from([0.0, 3e8]),
)
def test_any_proposal_ends_inside_the_budgets(
    stages: list[tuple[int, int, int, int, float, float]], cpus: float, used: float, worker_bytes: float
) -> None:
    there, asked, measured = [], {}, {}
    for i, (now, width, more, wider, share, item_bytes) in enumerate(stages):
        name = f"s{i}"
        there += [stage(name, now), window(name, width)]
        asked |= {name: more, f"{name}.window": wider}
        measured[name] = rates(share, item_bytes, worker_bytes, fill=0.5)
    resources = machine(cpus, used * 10 * GB)
    view = observation(there, resources, rates=measured)
    got = Guard(TunerConfig()).check(asked, view).allocation
    now_values = view.allocation

    assert set(got) == set(now_values)
    assert all(1 <= value <= 4096 for value in got.values())
    busy = sum(got[n] * r.service_cpu_s / r.service_s for n, r in measured.items())
    at_low = all(got[n] == 1 or r.service_cpu_s == 0.0 for n, r in measured.items())
    assert busy <= busy_limit(cpus, len(measured)) + 1e-6 or at_low
    for name, r in measured.items():
        if not r.item_bytes and got[f"{name}.window"] > now_values[f"{name}.window"]:
            assert got[f"{name}.window"] <= 2 * now_values[f"{name}.window"]
    needed = resources.memory_used_bytes + sum(
        max(0.0, got[f"{n}.window"] - 0.5 * now_values[f"{n}.window"]) * r.item_bytes
        + max(0, got[n] - now_values[n]) * r.worker_bytes
        for n, r in measured.items()
    )
    if needed > 0.9 * resources.memory_limit_bytes and got != now_values:
        # Nothing more can be given up: no growth, windows as narrow as their workers.
        for name in measured:
            assert got[name] <= now_values[name]
            assert got[f"{name}.window"] <= max(1, min(got[name], now_values[f"{name}.window"]))


@pytest.mark.parametrize("soft_limit", [0.5, 0.9])
def test_the_soft_limit_is_the_users(soft_limit: float) -> None:
    guard = Guard(TunerConfig(memory_soft_limit=soft_limit))
    width = guard.check({"decode.window": 400}, seen(item_bytes=100 * MB)).allocation["decode.window"]
    assert width == pytest.approx((10 * soft_limit - 1) * 10, abs=8)
