"""Our tf.data operations on running pipelines: live workers and windows, counters, order."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
from tf_stages import Calls, ended, numbers, staged, take  # noqa: E402

from intune_callbacks.pipelines.tf import build as tf_build  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.stats import SinkReading  # noqa: E402

pytestmark = pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before")
keys = itertools.count()


@pytest.fixture(scope="module")
def native() -> tf_native.Native:
    return tf_native.load()


@pytest.fixture
def key(native: tf_native.Native) -> Iterator[str]:
    name = f"test-{next(keys)}"
    yield name
    native.release(name)


def take_into(seen: list[int], iterator: Any, count: int) -> None:
    seen += take(iterator, count)


def test_workers_and_window_change_while_it_runs(native: tf_native.Native, key: str) -> None:
    calls = Calls()
    dataset = ended(native, staged(native, tf.data.Dataset.range(2000).map(calls, 4), key, "calls"), key)
    native.set_workers(key, "calls", 2)
    iterator, seen = iter(dataset), []
    for workers, window in ((2, 4), (8, 32), (1, 8), (6, 6), (3, 64)):
        native.set_workers(key, "calls", workers)
        assert native.set_window(key, "calls", window) == window
        seen += take(iterator, 8)
        assert calls.most_during(functools.partial(take_into, seen, iterator, 40)) == workers
        reading = native.read(key)[1]["calls"]
        assert (reading.limit, reading.window) == (workers, window)
        assert reading.running <= workers
    assert seen == list(range(len(seen)))


def test_the_window_bounds_what_is_ahead_of_the_consumer(native: tf_native.Native, key: str) -> None:
    dataset = staged(native, tf.data.Dataset.range(200).map(Calls(0.001), 4), key, "calls")
    native.set_workers(key, "calls", 3)
    iterator = iter(dataset)
    for window in (5, 23, 9):
        assert native.set_window(key, "calls", window) == window
        take(iterator, 30)
        time.sleep(0.3)
        assert native.read(key)[1]["calls"].queued == window


def test_counters_say_what_was_computed(native: tf_native.Native, key: str) -> None:
    function = Calls(0.02)
    source = tf.data.Dataset.range(40).map(function, 4).map(lambda number: tf.fill([1000], number))
    dataset = ended(native, staged(native, source, key, "calls"), key)
    native.set_workers(key, "calls", 4)
    began_s, slept_s = time.monotonic(), 0.0
    for _ in dataset:
        asleep_s = time.monotonic()
        time.sleep(0.001)
        slept_s += time.monotonic() - asleep_s
    passed_s = time.monotonic() - began_s
    sink, stages = native.read(key)
    calls = stages["calls"]
    assert (sink.delivered, sink.iterators, calls.items, calls.queued, calls.waiting) == (40, 1, 40, 0, 0)
    assert calls.item_bytes == 8000
    # The calls, and little more; what a stall adds is in both.
    assert 0.95 <= calls.busy_s / function.spent_s < 1.5
    assert 0.95 <= calls.busy_s2 / function.spent_s2 < 2.0
    assert calls.cpu_s < 0.5 * calls.busy_s
    # While this thread was kept from running between two elements, nobody waited.
    assert 0.02 < sink.wait_s < passed_s - slept_s


def test_wanted_values_hold_for_later_iterators_until_released(native: tf_native.Native, key: str) -> None:
    calls = Calls()
    dataset = ended(native, staged(native, tf.data.Dataset.range(40).map(calls, 2), key, "calls"), key)
    native.set_workers(key, "calls", 5)
    assert native.set_window(key, "calls", 16) == 16
    for epoch in range(1, 3):
        assert calls.most_during(lambda: numbers(dataset)) == 5
        assert native.read(key)[1]["calls"].items == 40 * epoch
    native.release(key)
    assert native.read(key) == (SinkReading(), {})
    assert calls.most_during(lambda: numbers(dataset)) == 2
    assert native.read(key)[1]["calls"].items == 40


def test_values_a_stage_does_not_take(native: tf_native.Native, key: str) -> None:
    source = tf.data.Dataset.range(8).interleave(
        lambda number: tf.data.Dataset.range(number, number + 3), cycle_length=4, num_parallel_calls=2
    )
    dataset = staged(native, staged(native, source, key, "interleave").prefetch(3), key, "prefetch")
    iterator = iter(ended(native, dataset, key))
    assert native.set_window(key, "interleave", 9) == 4
    assert native.set_window(key, "prefetch", -5) == 1
    assert native.set_window(key, "unheard of", 7) == 7
    assert sorted(take(iterator, 24)) == sorted(numbers(source))


def test_a_set_window_is_left_alone_by_autotune(native: tf_native.Native, key: str) -> None:
    source = tf.data.Dataset.range(10**6).map(lambda number: number + 1, tf.data.AUTOTUNE)
    iterator = iter(ended(native, staged(native, source, key, "add"), key))
    take(iterator, 50)
    assert native.set_window(key, "add", 3) == 3
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        take(iterator, 50)
    assert native.read(key)[1]["add"].window == 3


def test_without_a_model_there_is_no_window_but_there_are_workers(native: tf_native.Native, key: str) -> None:
    calls = Calls()
    options = tf.data.Options()
    options.autotune.enabled = False
    source = tf.data.Dataset.range(60).map(calls, 8).with_options(options)
    dataset = staged(native, source, key, "calls")
    native.set_workers(key, "calls", 3)
    iterator = iter(dataset)
    assert calls.most_during(lambda: take(iterator, 30)) == 3
    assert native.read(key)[1]["calls"].window is None


def test_random_changes_from_two_threads_keep_the_order(native: tf_native.Native, key: str) -> None:
    def build(wrap: Callable[[Any, str], Any]) -> Any:
        dataset = tf.data.Dataset.range(60).interleave(
            lambda number: tf.data.Dataset.range(number * 30, number * 30 + 30), 6, num_parallel_calls=3
        )
        dataset = wrap(wrap(dataset, "interleave").map(lambda number: number * 3, 4), "triple")
        dataset = wrap(dataset.batch(5, num_parallel_calls=2), "batch")
        return wrap(wrap(dataset.map(lambda number: number - 1, 3), "less").prefetch(2), "prefetch")

    expected = numbers(build(lambda dataset, _: dataset))
    dataset = build(lambda dataset, name: staged(native, dataset, key, name))
    stop, changes = threading.Event(), [0, 0]

    def turn(thread: int) -> None:
        choice = random.Random(thread)
        while not stop.is_set():
            stage = choice.choice(("interleave", "triple", "batch", "less", "prefetch"))
            native.set_window(key, stage, choice.randint(1, 40))
            native.set_workers(key, stage, choice.randint(0, 6))
            native.read(key)
            changes[thread] += 2
            time.sleep(0.0005)

    threads = [threading.Thread(target=turn, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert numbers(dataset) == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert min(changes) > 100
    assert native.read(key)[1]["batch"].items == 3 * len(expected)


def test_an_empty_stage_keeps_functions_off_the_next_stages_workers(native: tf_native.Native, key: str) -> None:
    inner = tf.data.Dataset.range(30).map(Calls(0.005))
    dataset = staged(native, staged(native, inner, key, "").map(lambda number: number, 2), key, "same")
    native.set_workers(key, "same", 1)
    assert numbers(dataset) == list(range(30))
    stages = native.read(key)[1]
    assert set(stages) == {"same"}
    assert stages["same"].busy_s < 0.1


def test_inside_an_interleave_the_calls_are_timed(native: tf_native.Native, key: str) -> None:
    calls = Calls(0.01)

    def slow(number: Any) -> Any:
        inner = tf.data.Dataset.range(number * 5, number * 5 + 5).map(calls)
        return staged(native, inner, key, "slow", role=tf_native.INSIDE)

    source = tf.data.Dataset.range(6).interleave(slow, cycle_length=3, num_parallel_calls=3)
    dataset = ended(native, staged(native, source, key, "slow"), key)
    assert sorted(numbers(dataset)) == list(range(30))
    reading = native.read(key)[1]["slow"]
    assert reading.items == 30
    # Three of them share one interpreter: a call takes longer than its sleep.
    assert 0.95 <= reading.busy_s / calls.spent_s < 3.3


def test_iterator_states_can_be_exchanged_with_the_untouched_pipeline(
    native: tf_native.Native, key: str, tmp_path: Path
) -> None:
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_and_batch_fusion = False
    plain = tf.data.Dataset.range(50).map(lambda number: number * 2, 4).batch(2).with_options(options)
    ours = tf.data.Dataset.range(50).map(lambda number: number * 2, 4)
    ours = ended(native, staged(native, ours, key, "double").batch(2), key)
    for index, (before, after) in enumerate(((plain, ours), (ours, plain))):
        iterator = iter(before)
        next(iterator), next(iterator)
        path = tf.train.Checkpoint(it=iterator).write(str(tmp_path / f"state{index}"))
        restored = iter(after)
        tf.train.Checkpoint(it=restored).read(path).assert_consumed()
        assert next(restored).numpy().tolist() == next(iterator).numpy().tolist() == [8, 10]


def test_functions_and_cardinality_see_the_same_dataset(native: tf_native.Native, key: str) -> None:
    source = tf.data.Dataset.range(20).map(lambda number: number + 1, 2)
    dataset = ended(native, staged(native, source, key, "add"), key)
    assert dataset.cardinality() == 20
    assert dataset.element_spec == source.element_spec
    assert numbers(dataset.skip(4).take(3)) == [5, 6, 7]

    @tf.function
    def total() -> Any:
        result = tf.constant(0, tf.int64)
        for number in dataset:
            result += number
        return result

    assert int(total()) == 210


def test_a_set_and_a_read_are_quick(native: tf_native.Native, key: str) -> None:
    dataset = ended(native, staged(native, tf.data.Dataset.range(10**6).map(abs, 4), key, "abs"), key)
    iterator = iter(dataset)
    times_s: dict[str, list[float]] = {"set": [], "read": []}
    for turn in range(200):
        next(iterator)
        began_s = time.perf_counter()
        native.set_window(key, "abs", 2 + turn % 7)
        native.set_workers(key, "abs", 1 + turn % 3)
        between_s = time.perf_counter()
        native.read(key)
        times_s["set"].append(between_s - began_s)
        times_s["read"].append(time.perf_counter() - between_s)
    assert {name: sorted(values)[100] < 0.0005 for name, values in times_s.items()} == {"set": True, "read": True}
