"""Why more workers would not help: what feeds them, what takes from them, and what trials of more have shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cause_windows import LOADER, MAP, rate, stage, window

from intune_callbacks.measure.cause import advice, causes
from intune_callbacks.measure.evidence import Cause, Evidence, measured_hints
from intune_callbacks.types import Hint, Stage, StageRates


def test_what_feeds_a_stage_and_has_no_number_to_set_is_named_with_the_line_for_it() -> None:
    one = Hint("map(load) computes one element at a time", ".map(load, num_parallel_calls=8)", "order", "load")
    live = Hint("decode reads in turn", ".map(decode, num_parallel_calls=8)", "workers", "decode")
    seen = window((stage("decode", 4, knob=MAP), rate(0.004, 0.004, 0.1)))
    (cause,) = causes(seen, Evidence(hints=(live, one), tried={"decode": 1.01}))
    assert (cause.kind, cause.line) == ("serial", one.line)
    assert (
        cause.sentence
        == "the workers of 'decode' stand idle 90 % of the time: map(load) computes one element at a time"
    )


def test_a_source_that_makes_one_element_at_a_time_is_named() -> None:
    source = Hint("from_generator makes one element at a time", "", "serial", "from_generator")
    starved = window((stage("decode", 4, knob=MAP), rate(0.004, 0.004, 0.1)))
    (cause,) = causes(starved, Evidence(hints=(source,)))
    assert (cause.kind, cause.stage, cause.line) == ("serial", "from_generator", "")
    assert cause.sentence == f"the workers of 'decode' stand idle 90 % of the time: {source.what}"
    (cause,) = causes(window(wait=0.5), Evidence(hints=(source,)))  # no stage holds workers
    assert (cause.kind, cause.sentence) == ("serial", source.what)
    busy = window((stage("decode", 4, knob=MAP), rate(0.04, 0.001)))
    assert causes(busy, Evidence(hints=(source,)))[0].kind == "storage"


def test_workers_whose_results_are_not_taken_do_not_limit() -> None:
    one = Hint("map(crop) computes one element at a time", ".map(crop, num_parallel_calls=8)", "order", "crop")
    done = replace(rate(0.004, 0.0002, 0.2, starved=0.0, blocked=0.8), queue_fill=0.9)
    seen = window((stage("read", 8, knob=MAP), done))
    wait = "the workers of 'read' wait 80 % of the time until what they made is taken"
    (cause,) = causes(seen, Evidence(hints=(one,)))
    assert (cause.kind, cause.stage, cause.line) == ("serial", "crop", one.line)
    assert cause.sentence == f"{wait}: map(crop) computes one element at a time"
    (cause,) = causes(seen)
    assert (cause.kind, cause.stage, cause.line) == ("serial", "", "")
    assert cause.sentence == f"{wait}: what comes behind them is slower and has no workers of its own"
    assert seen.stage is None and advice(seen).allocation == {}
    # Where the order fills the window, or what is in it is not seen from inside, nothing is said of what is behind.
    for other in (replace(done, service_cv=2.0), replace(done, held_frac=0.3), replace(done, queue_fill=0.1)):
        assert [one.kind for one in causes(window((stage("read", 8, knob=MAP), other)))][:1] == ["storage"]
    (cause,) = causes(window((stage("load", 8, knob=LOADER, when="epoch"), done)))
    assert cause.kind == "storage"


@pytest.mark.parametrize(
    ("limit", "rates", "known", "told"),
    [
        (stage("read", 1, 1, sequential=True), rate(0.01, 0.01), Evidence(), "does one item at a time: only a cheaper"),
        (stage("decode", 4), rate(0.04, 0.01), Evidence(tried={"decode": 1.01}), "brought nothing when tried (× 1.01)"),
        (stage("decode", 4), rate(0.004, 0.004, 0.1), Evidence(), "stand idle 90 % of the time, for what feeds them"),
        (
            stage("decode", 4, knob="ParallelMapper(map_fn=decode, num_workers={})"),
            rate(0.04, 0.01),
            Evidence(),
            "the 4 threads of 'decode' keep 1 CPU busy between them, for Python lets one run at a time",
        ),
    ],
    ids=["sequential", "tried", "starved", "threads"],
)
def test_serial(limit: Stage, rates: StageRates, known: Evidence, told: str) -> None:
    seen = window((limit, rates))
    (cause,) = causes(seen, known)
    assert (cause.kind, cause.stage, cause.line, cause.gain) == ("serial", limit.name, "", 1.0)
    assert told in cause.sentence
    assert advice(seen, known).allocation == {}


def test_a_trial_of_workers_that_each_epoch_starts_is_told_as_one() -> None:
    load = (stage("load", 4, knob=LOADER, when="now", startup_s=0.5), rate(0.04, 0.01))
    known = Evidence(tried={"load": 0.57})
    cause, *rest = causes(window(load, seam_s=5.0), known)
    assert cause.sentence.endswith("brought nothing when tried (× 0.57), while each epoch started them anew")
    assert [one.kind for one in rest] == ["startup"]
    cause, *rest = causes(window(load), known)
    assert cause.sentence.endswith("brought nothing when tried (× 0.57)") and rest == []


@pytest.mark.parametrize(
    ("wanted", "kind", "kept"),
    [
        ({}, "cpu", 3),
        ({"load": 2}, "workers", 3),
        ({"load": 13, "load.window": 26}, "workers", 2),
        ({"load": 1, "load.window": 8}, "cpu", 3),
        ({}, "storage", 2),
    ],
)
def test_fewer_workers_are_not_advised_where_more_were_measured(wanted: dict[str, int], kind: Any, kept: int) -> None:
    hints = [
        Hint("4 workers on 2 CPUs", "num_workers=2  # more only where they wait for reads", "workers"),
        Hint("a shuffle", ".shuffle(2048)", "shuffle"),
        Hint("a map", ".map(f, num_parallel_calls=tf.data.AUTOTUNE)", "workers", "f"),
    ]
    assert measured_hints(hints, wanted, [Cause(kind, "load", "")]) == tuple(hints[3 - kept :])


def test_what_brought_something_is_not_serial() -> None:
    (cause,) = causes(window((stage("decode", 4), rate(0.04, 0.03))), Evidence(tried={"decode": 1.4}))
    assert cause.kind == "workers"


def test_processes_that_keep_one_cpu_busy_are_no_threads() -> None:
    mapper = stage("decode", 4, knob="ParallelMapper(map_fn=decode, num_workers={})")
    (cause,) = causes(window((mapper, rate(0.04, 0.01, worker_bytes=1e8))))
    assert cause.kind == "storage"
