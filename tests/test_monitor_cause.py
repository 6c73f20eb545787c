"""Why the input is slow: the kind, the sentence with its numbers, the line that mends it, and what it promises."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cause_windows import INTERLEAVE, LOADER, MAP, rate, stage, window
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.measure.cause import advice, causes
from intune_callbacks.measure.evidence import Evidence
from intune_callbacks.measure.measured import measured
from intune_callbacks.measure.predict import LEAST_GAIN, promised
from intune_callbacks.record.before_after import describe
from intune_callbacks.types import Hint


def test_starts_of_epochs_are_spread_over_the_batches() -> None:
    seen = window((stage("load", 2, knob=LOADER), rate(0.02, 0.01)), seam_s=3.0)
    assert seen.seam_s == pytest.approx(0.03) and seen.cpus_busy == pytest.approx(1.0)
    # Of 8 CPUs, 16 would be busy: most of it was computed while the epochs began.
    assert replace(seen, rates={"load": rate(0.2, 0.16)}).cpus_busy == pytest.approx(8.0)


def test_what_a_summary_keeps_is_enough_for_the_causes() -> None:
    loop = FakeLoop(FakePipeline({"decode": Work(0.1)}, FakeMachine()), model_s=0.02)
    windows = [loop.observe() for _ in range(3)]
    (cause,), (same,) = causes(describe(windows).measured), causes(measured(windows))
    assert cause == same


def test_too_short_or_empty_windows_say_nothing() -> None:
    seen = window((stage("load", 2), rate(0.02, 0.02)))
    assert measured([]) is None and causes(None) == () and advice(None).gain == 1.0
    assert causes(replace(seen, verdict="too short")) == ()
    assert advice(replace(seen, verdict="too short")).allocation == {}


def test_storage() -> None:
    seen = window((stage("interleave", 2, kind="io", knob=INTERLEAVE), rate(0.001413, 13e-6, items=14.0)))
    cause, *rest = causes(seen)
    assert not rest
    assert (cause.kind, cause.stage) == ("storage", "interleave")
    assert cause.sentence == (
        "each item of 'interleave' waits 1.4 ms for its reads and computes 13 us: more workers overlap the waits, more "
        "CPUs do not help"
    )
    workers = advice(seen).allocation["interleave"]
    assert cause.line == f".interleave(..., num_parallel_calls={workers})  # was 2"
    assert workers > 8  # more than there are CPUs: the waits overlap
    assert 2.0 < cause.gain <= promised(10.0)


def test_workers_that_wait_for_reads_get_their_share_of_a_machine_that_others_keep_busy() -> None:
    seen = window((stage("load", 1, knob=LOADER), rate(0.030, 0.0015)), period_s=0.030, idle=0.0)
    (cause,) = causes(seen)
    assert (cause.kind, cause.line) == ("storage", "DataLoader(num_workers=8)  # was 1")
    assert cause.gain == advice(seen).gain > 2.0
    assert cause.sentence == (
        "each batch of 'load' waits 28 ms for its reads and computes 1.5 ms: more workers overlap the waits, more CPUs "
        "do not help"
    )


def test_a_short_wait_on_a_machine_that_others_keep_busy_may_be_one_for_a_cpu() -> None:
    seen = window((stage("load", 2, knob=LOADER), rate(0.0093, 0.0008)), period_s=0.0047, idle=0.0)
    (cause,) = causes(seen)
    assert (cause.line, cause.gain) == ("", 1.0)
    assert "waits 8.5 ms for its reads or a CPU, for 0.0 CPUs are idle, and" in cause.sentence  # items that sleep, too


def test_workers_that_helped_are_said_to_overlap_the_waits() -> None:
    load = (stage("load", 1, knob=LOADER), rate(0.030, 0.0015, worker_bytes=1e9))
    seen = window(load, period_s=0.030, idle=0.0, memory=(4 * GB, int(3.1 * GB)))  # no room for more
    (cause,) = causes(seen, Evidence(first={"load": 1}, tried={"load": 7.0}))
    assert cause.sentence.endswith("computes 1.5 ms: more workers overlap the waits, more CPUs do not help")
    (cause,) = causes(seen, Evidence(first={"load": 4}, tried={"load": 7.0}))
    assert cause.sentence.endswith(" for its reads and computes 1.5 ms")


def test_of_waits_that_may_be_for_a_cpu_nobody_says_that_cpus_would_not_help() -> None:
    seen = window((stage("load", 1, knob=LOADER), rate(0.659, 0.095)), period_s=0.494, idle=0.0)
    (cause,) = causes(seen, Evidence(first={"load": 1}, tried={"load": 1.32}))
    assert cause.sentence == (
        "each batch of 'load' waits 564 ms for its reads or a CPU, for 0.0 CPUs are idle, and computes 95 ms: more "
        "workers overlap the waits"
    )


def test_no_more_workers_than_an_epoch_has_items() -> None:
    """Of epochs of 3 batches; where the items are a fourth of a batch, they are 12."""
    loads = (
        (stage("load", 2, knob=LOADER), rate(0.080, 0.001)),
        (stage("load", 2, knob=LOADER), rate(0.02, 0.0002, items=4.0)),
    )
    few, more = (window(load, period_s=0.040, wait=0.9, epoch=3) for load in loads)
    assert advice(few).allocation["load"] == 3
    assert 3 < advice(more).allocation["load"] <= 12


def test_storage_at_the_end_of_its_cycle_has_nothing_to_paste() -> None:
    seen = window((stage("interleave", 8, 8, kind="io", knob=INTERLEAVE), rate(0.0056, 13e-6, items=14.0)))
    (cause,) = causes(seen)
    assert (cause.kind, cause.line, cause.gain) == ("storage", "", 1.0)
    assert "it reads 8 files at once, as many as its cycle_length" in cause.sentence
    assert "changes the order" in cause.sentence
    for cpu_s, kind in ((13e-6, "storage"), (0.0050, "workers")):
        one = (stage("interleave", 1, 1, kind="io", knob=INTERLEAVE), rate(0.0056, cpu_s, items=14.0))
        (cause,) = causes(window(one, period_s=0.08))
        assert (cause.kind, cause.line) == (kind, "")
        assert "it reads 1 file at once, as many as its cycle_length: a longer one" in cause.sentence


def test_calls_that_share_too_few_threads_are_told_so_and_not_of_the_cycle() -> None:
    of_two = replace(stage("interleave", 4, 4, kind="io", knob=INTERLEAVE), threads=2)
    read = (of_two, rate(0.0085, 3e-5, items=8.0))
    (cause,) = causes(window(read, period_s=0.017, wait=0.9, epoch=None))
    assert cause.sentence.endswith("; its 4 calls share the 2 threads TensorFlow has for all")
    assert "private_threadpool_size = 4" in cause.line and cause.gain == pytest.approx(1.7, abs=0.05)
    (crowded,) = causes(window(read, period_s=0.017, wait=0.9, epoch=None, cpus=2.0, idle=0.0))
    assert (crowded.line, crowded.gain) == ("", 1.0) and "cycle" not in crowded.sentence
    enough = (replace(of_two, threads=4), read[1])
    assert "cycle_length" in causes(window(enough, period_s=0.017, wait=0.9, epoch=None))[0].sentence


def test_on_a_crowded_machine_an_item_that_hardly_computes_waits_for_reads() -> None:
    """50 us of CPU in 4 ms; a neighbour has all CPUs."""
    load = (stage("load", 1, knob=LOADER), rate(0.004, 0.00005))
    crowded = window(load, period_s=0.005, wait=0.8, cpus=2.0, idle=0.0)
    (cause,) = causes(crowded)
    assert cause.kind == "storage"
    assert "waits" in cause.sentence and "CPUs are taken" not in cause.sentence


def test_cpus_are_short_only_where_they_are_measured_to_be_busy() -> None:
    busy = window((stage("decode", 4, knob=MAP), rate(0.04, 0.039)), cpus=4.0)
    (cause,) = causes(busy)
    assert (cause.kind, cause.line) == ("cpu", "")
    assert cause.sentence.startswith(
        "the input keeps 3.9 of 4 CPUs busy; with twice as many CPUs, or 'decode' half as "
    )
    assert advice(busy).allocation == {}
    idle = window((stage("decode", 4, knob=MAP), rate(0.04, 0.039)), cpus=6.0)
    assert "CPUs busy" not in causes(idle)[0].sentence
    small = window((stage("decode", 4, knob=MAP), rate(0.04, 0.039)), cpus=1.5)
    assert causes(small)[0].sentence == "the input keeps 3.9 CPUs busy, and can count on 1.5"


def test_on_a_crowded_machine_it_is_not_known_what_long_items_wait_for() -> None:
    """12 ms of CPU in 58 ms: with idle CPUs it waits for reads; without, for these or a CPU: nothing is promised."""
    load = (stage("load", 2, knob=LOADER), rate(0.058, 0.012))
    free, crowded = (window(load, period_s=0.029, wait=0.8, cpus=2.0, idle=idle) for idle in (1.5, 0.05))
    assert causes(free)[0].kind == "storage"
    assert advice(free).allocation["load"] > 2
    (cause,) = causes(crowded)
    assert (cause.kind, cause.line, cause.gain) == ("storage", "", 1.0)
    assert cause.sentence == (
        "each batch of 'load' waits 46 ms for its reads or a CPU, for 0.1 CPUs are idle, and computes 12 ms"
    )
    assert advice(crowded).allocation == {}
    computes = (stage("load", 2, knob=LOADER), rate(0.058, 0.040))
    (cause,) = causes(window(computes, period_s=0.029, wait=0.8, cpus=2.0, idle=0.05))
    assert cause.kind == "cpu" and cause.sentence.startswith("the CPUs are taken by the training and others: the input")


def test_what_has_no_workers_at_all_is_named_by_what_is_odd_about_it() -> None:
    """A `map` without `num_parallel_calls`, and a prefetch: no stage holds workers."""
    seen = window((stage("prefetch", 2, kind="memory"), rate(0.01, 0.0)))
    assert causes(seen) == ()
    hint = Hint("map(f) computes one element at a time", ".map(f, num_parallel_calls=4)", "order", "f")
    (cause,) = causes(seen, Evidence(hints=[hint]))
    assert (cause.kind, cause.stage, cause.sentence, cause.line) == ("serial", "f", hint.what, hint.line)


def test_a_wait_shorter_than_any_read_is_no_read() -> None:
    """Workers that compute for 36 us and hand on for a CPU 41 us: nothing is read in that."""
    tiny = window((stage("tok", 2, knob=MAP), rate(77e-6, 36e-6, items=250.0)), idle=6.0)
    (cause,) = causes(tiny)
    assert cause.kind == "workers" and "reads" not in cause.sentence


def test_workers_nobody_can_look_into_are_named_all_the_same() -> None:
    stays = Hint("its 3 workers stay as they are", kind="order", stage="load")
    blind = replace(window((stage("load", 3, 3, sequential=True), rate(0.02, 0.01))), rates={}, stage=None)
    assert [(c.kind, c.sentence) for c in causes(blind, Evidence((stays,)))] == [("order", stays.what)]
    assert causes(blind) == ()


def test_too_few_workers_for_the_cpus() -> None:
    (cause,) = causes(window((stage("decode", 1, knob=MAP), rate(0.0099, 0.0095))))
    assert (cause.kind, cause.stage) == ("workers", "decode")
    assert cause.sentence == "each batch of 'decode' computes for 9.5 ms in 1 worker, while 7.0 of 8 CPUs are free"
    assert cause.line.startswith(".map(decode, num_parallel_calls=") and cause.line.endswith(")  # was 1")
    assert cause.gain > 2.0
    (cause,) = causes(window((stage("decode", 1, knob=MAP), rate(0.0099, 0.0095)), cpus=2.69265))
    assert cause.sentence.endswith("in 1 worker, while 1.7 of 2.7 CPUs are free"), "part of them is only lent"


def test_what_a_loader_makes_is_called_a_batch_also_where_some_were_made_in_vain() -> None:
    (cause,) = causes(window((stage("load", 2, knob=LOADER), rate(0.02, 0.001, items=1.4))))
    assert cause.sentence.startswith("each batch of 'load' waits 19 ms")
    (cause,) = causes(window((stage("read", 2, knob=MAP), rate(0.02, 0.001, items=1.4))))
    assert cause.sentence.startswith("each item of 'read' waits 19 ms")


def test_where_cpu_seconds_are_unknown_nothing_is_said_of_cpus() -> None:
    watched = stage("load", 2, knob=LOADER, when="epoch")
    (cause,) = causes(window((watched, rate(0.02, 0.02)), cpus=2.0))
    assert (cause.kind, cause.sentence) == ("workers", "each batch of 'load' takes 20 ms in 2 workers")


def test_memory() -> None:
    veto = "70.00 GB needed with full windows, soft limit 57.60 of 64.00 GB: clipped to 57.00 GB"
    found = causes(window((stage("decode", 4), rate(0.04, 0.03))), Evidence(vetoes=("5 workers asked", veto)))
    assert [c.sentence for c in found if c.kind == "memory"] == [f"memory holds the input back: {veto}"]
    full = window((stage("decode", 4), rate(0.04, 0.03, worker_bytes=2e9)), memory=(64 * GB, 50 * GB))
    assert advice(full).allocation == {}  # one more worker would not fit


def test_the_model() -> None:
    (cause,) = causes(window((stage("decode", 4), rate(0.02, 0.02, 0.4)), wait=0.02))
    assert (cause.kind, cause.gain, cause.line) == ("model", 1.0, "")
    assert cause.sentence == (
        "the training waits 2 % of the time for data, and computes 9.8 ms for each batch: the model is the limit"
    )


def test_a_gpu_that_has_work_does_not_wait() -> None:
    loop = FakeLoop(FakePipeline({"decode": Work(0.1)}, FakeMachine()), model_s=0.02)
    fed = [replace(loop.observe(), exposed_wait_frac=0.01) for _ in range(3)]
    assert [c.kind for c in causes(measured(fed))] == ["model"]
    assert advice(measured(fed)).allocation == {}


def test_what_is_not_the_input_is_not_promised() -> None:
    seen = window((stage("decode", 1, knob=MAP), rate(0.0099, 0.0095)))
    known = Evidence(whole={"wall_s": 100.0, "paused_s": 60.0})
    assert advice(seen, known).gain < 1.0 / 0.6
    assert promised(1000.0, 0.4) < 1.0 / 0.6
    assert promised(2.0) == pytest.approx(1.7) and promised(0.5) == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_pasted_advice_brings_at_least_half_of_its_promise(seed: int) -> None:
    """On pipelines of many kinds, whose formulas know nothing of the prediction's; never below the user's numbers."""
    draw, promises = random.Random(seed), []
    for _ in range(60):
        work = {}
        for number in range(draw.randint(1, 4)):
            workers = draw.choice([1, 1, 2, 4, 8])
            work[f"s{number}"] = Work(
                10 ** draw.uniform(-3, -1),
                cpu_share=draw.choice([0.01, 0.3, 0.7, 1.0]),
                serial=draw.choice([0.0, 0.03, 0.05, 0.08]),
                cv=draw.choice([0.0, 0.3, 0.8]),
                workers=workers,
                window=workers * draw.choice([1, 2, 4]),
                items_per_batch=draw.choice([1, 4, 32]),
            )
        machine = FakeMachine(cpus=draw.choice([2.0, 4.0, 16.0, 64.0]))
        loop = FakeLoop(FakePipeline(work, machine, depth=2), model_s=10 ** draw.uniform(-3, 0))
        found = advice(measured([loop.observe() for _ in range(3)]))
        before, values = loop.throughput, dict(loop.pipeline.values)
        assert all(n > values[name] for name, n in found.allocation.items())
        if found.gain == 1.0:
            assert not found.allocation
            continue
        assert found.gain >= LEAST_GAIN
        loop.pipeline.resize(found.allocation)
        got = loop.throughput / before
        assert got - 1.0 >= 0.5 * (found.gain - 1.0), (work, machine.cpus, loop.model_s, found)
        promises.append(found.gain)
    assert len(promises) > 10
