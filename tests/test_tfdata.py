"""A tf.data pipeline that is being resized delivers what the untouched one does, and counts what it did."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from busy_machine import slept

tf = pytest.importorskip("tensorflow")


from benchmarks.tfdata_kinds import KINDS, elements, parse, plain, rows, ten  # noqa: E402
from intune_callbacks.pipelines.check import check_pipeline  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    try:
        tf_native.load()
    except Exception as error:
        pytest.skip(f"the operations cannot be compiled here: {error}")


def tuned(dataset, **options) -> DatasetPipeline:
    return DatasetPipeline(dataset, clock=Clock(), **options)


def sleeper(seconds: float):
    """Return a map function that sleeps, and the meter of how many of them slept at once."""
    lock, meter = threading.Lock(), {"now": 0, "most": 0}

    def body(x):
        with lock:
            meter["now"] += 1
            meter["most"] = max(meter["most"], meter["now"])
        time.sleep(seconds)
        with lock:
            meter["now"] -= 1
        return x

    def sleep(x):
        return tf.ensure_shape(tf.numpy_function(body, [x], tf.int64), x.shape)

    return sleep, meter


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_random_changes_leave_the_elements_alone(kind: str, seed: int) -> None:
    stock = KINDS[kind]()
    expected = [elements(stock) for _ in range(3)]
    pipeline, generator = tuned(KINDS[kind]()), random.Random(seed)
    assert pipeline.stages(), pipeline.why
    for epoch in expected:
        delivered = []
        for element in pipeline.dataset:
            delivered.append(plain(element))
            wanted = {s.name: generator.randint(s.low, min(s.high, 9)) for s in pipeline.stages()}
            applied, after = pipeline.resize(wanted), pipeline.stages()
            assert applied == {s.name: s.current for s in after}
            late = {s.name for s in after if s.when == "epoch"}  # an interleave whose files are all open
            assert all(applied[name] == wanted[name] for name in wanted if name not in late)
        assert delivered == epoch
    assert pipeline.stats().delivered == sum(map(len, expected))
    pipeline.close()


@pytest.mark.parametrize("kind", ["map", "map+batch", "interleave", "shuffle and repeat", "no AUTOTUNE"])
def test_watched_pipeline_counts_and_changes_nothing(kind: str) -> None:
    expected = elements(KINDS[kind]())
    pipeline = tuned(KINDS[kind](), live=False)
    before = {s.name: s.current for s in pipeline.stages()}
    assert pipeline.resize(dict.fromkeys(before, 7)) == before
    assert elements(pipeline.dataset) == expected
    stats = pipeline.stats()
    assert stats.delivered == len(expected)
    assert all(reading.items > 0 and reading.busy_s > 0.0 for reading in stats.stages.values())
    assert {s.name: s.current for s in pipeline.stages()} == before
    pipeline.close()


@pytest.mark.parametrize("kind", ["map", "AUTOTUNE", "interleave", "cache", "zip"])
def test_contract_of_a_pipeline(kind: str) -> None:
    def build():
        pipeline = tuned(KINDS[kind]())
        return pipeline, iter(pipeline.dataset)

    check_pipeline(build, elements(KINDS[kind]()), resizes=20, key=plain)


def test_workers_and_window_are_apart() -> None:
    sleep, meter = sleeper(0.005)
    pipeline = tuned(rows(400).map(sleep, num_parallel_calls=2))
    stream = iter(pipeline.dataset)
    for workers, window in ((2, 2), (3, 12), (1, 12), (6, 24)):
        assert pipeline.resize({"sleep": workers, "sleep.window": window}) == {"sleep": workers, "sleep.window": window}
        for _ in range(8):
            next(stream)
        meter["most"] = 0
        for _ in range(30):
            next(stream)
        assert meter["most"] == workers
    time.sleep(0.15)  # the window fills behind a consumer that does not ask
    (reading,) = pipeline.stats().stages.values()
    assert reading.queued == reading.capacity == 24
    pipeline.close()


def test_counters_tell_work_from_waiting() -> None:
    sleep, _ = sleeper(0.004)
    pipeline = tuned(rows(80).map(sleep, num_parallel_calls=2))
    stream = iter(pipeline.dataset)
    next(stream)
    pipeline.resize({"sleep": 2, "sleep.window": 4})
    begin_s = time.perf_counter()
    before = pipeline.stats().stages["sleep"]
    for _ in range(50):
        next(stream)
    busy = pipeline.stats().stages["sleep"]
    elapsed_s = time.perf_counter() - begin_s
    assert busy.items - before.items == pytest.approx(50, abs=4)
    busy_s = busy.busy_s - before.busy_s
    # What the two workers had begun before counts as a whole when it is done.
    assert 0.7 * 2 * elapsed_s < busy_s <= 1.05 * 2 * elapsed_s + 2 * busy_s / 50
    assert busy.cpu_s - before.cpu_s < 0.5 * busy_s
    assert busy.item_bytes == 8.0
    time.sleep(0.05)
    filled = pipeline.stats().stages["sleep"]
    slept_s = slept(0.2)  # nobody asks: the two workers wait for room
    after = pipeline.stats().stages["sleep"]
    assert after.blocked_s - filled.blocked_s == pytest.approx(2 * slept_s, rel=0.3)
    assert after.starved_s == filled.starved_s
    pipeline.close()


def test_starved_stage_is_told_from_a_blocked_one() -> None:
    sleep, _ = sleeper(0.01)
    pipeline = tuned(rows(60).map(sleep, num_parallel_calls=1).map(parse, num_parallel_calls=2))
    stream = iter(pipeline.dataset)
    next(stream)
    before = pipeline.stats().stages["parse"]
    for _ in range(20):
        next(stream)
        pipeline.stats()
    after = pipeline.stats().stages["parse"]
    assert after.starved_s - before.starved_s > 4 * (after.blocked_s - before.blocked_s)
    pipeline.close()


def test_stage_is_not_starved_for_the_end_of_a_short_epoch() -> None:
    """A window ends with it, and so did a reading of the stages, where nothing is left that a worker could take."""
    sleep, _ = sleeper(0.001)
    pipeline = tuned(rows(40).map(sleep, num_parallel_calls=2).prefetch(2))
    stream = iter(pipeline.dataset)
    next(stream)
    before = pipeline.stats().stages["sleep"]
    for _ in range(39):
        time.sleep(0.025)
        pipeline.waits()  # as the loop asks all the time
        next(stream)
    after = pipeline.stats().stages["sleep"]
    assert after.blocked_s - before.blocked_s > 2 * (after.starved_s - before.starved_s)
    pipeline.close()


def test_interleave_is_timed_where_its_threads_read() -> None:
    sleep, _ = sleeper(0.003)
    dataset = rows(6).interleave(lambda i: rows(10).map(sleep), cycle_length=3, num_parallel_calls=3)
    pipeline = tuned(dataset.batch(2))
    assert len(elements(pipeline.dataset)) == 30
    reading = pipeline.stats().stages["interleave"]
    assert reading.items == 60
    assert reading.busy_s > 60 * 0.003
    pipeline.close()


def test_waits_are_those_of_the_consumer() -> None:
    sleep, _ = sleeper(0.02)
    slow, fast = tuned(rows(10).map(sleep, num_parallel_calls=1)), tuned(rows(10).map(parse, num_parallel_calls=1))
    for pipeline in (slow, fast):
        for _ in pipeline.dataset:
            time.sleep(0.01)
    assert slow.waits().delivered == fast.waits().delivered == 10
    assert slow.waits().wait_s > 0.08
    assert fast.waits().wait_s < 0.5 * slow.waits().wait_s
    slow.close(), fast.close()


def test_error_of_the_users_function_comes_through() -> None:
    def below_seven(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(7, tf.int64))]):
            return tf.identity(x)

    pipeline, delivered = tuned(rows(20).map(below_seven, num_parallel_calls=2)), []

    def train():
        for element in pipeline.dataset:
            delivered.append(int(element))
            pipeline.resize({"below_seven": 3, "below_seven.window": 5})

    with pytest.raises(tf.errors.InvalidArgumentError):
        train()
    assert delivered == list(range(7))
    pipeline.close()


def test_release_gives_the_users_dataset_back() -> None:
    dataset = rows(30).map(parse, num_parallel_calls=2)
    pipeline = tuned(dataset)
    stream = iter(pipeline.dataset)
    first = [int(next(stream)) for _ in range(5)]
    pipeline.release()
    assert pipeline.dataset is dataset
    assert first + [int(x) for x in stream] == [int(x) for x in dataset]
    assert pipeline.resize({"parse": 5})["parse"] == 2
    pipeline.close()


def test_datasets_made_of_one_interleave_are_all_live() -> None:
    files = rows(6).interleave(ten, cycle_length=2, num_parallel_calls=2)
    pipelines = [tuned(files.batch(size)) for size in (2, 3)]
    for pipeline, size in zip(pipelines, (2, 3), strict=True):
        assert "ten" in [stage.name for stage in pipeline.stages()], pipeline.why
        assert elements(pipeline.dataset) == elements(files.batch(size))
        pipeline.close()


def test_what_cannot_be_taken_apart_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune_callbacks.pipelines.tf.graph.LARGEST_HELD_BYTES", 10)
    dataset = tf.data.Dataset.from_tensor_slices(np.zeros(100)).map(lambda x: x, num_parallel_calls=2)
    found = find(dataset)
    assert found.pipeline is None
    assert "from_tensor_slices" in found.why
    pipeline = tuned(dataset)
    assert pipeline.stages() == () and pipeline.resize({"map": 3}) == {} and pipeline.stats().stages == {}
    assert elements(pipeline.dataset) == elements(dataset) and pipeline.waits().delivered == 100
    pipeline.close()
    assert pipeline.dataset is dataset


@pytest.mark.timeout(120)
def test_a_map_that_does_nothing_does_not_hang_the_next_epoch() -> None:
    """tf.data would remove it, and two of our operations would be behind one stage."""
    dataset = rows().map(parse, num_parallel_calls=2).map(lambda x: x, num_parallel_calls=2)
    dataset = dataset.map(parse, num_parallel_calls=2)
    pipeline, expected = tuned(dataset), elements(dataset)
    for workers in (3, 4):
        pipeline.resize({s.name: workers for s in pipeline.stages()})
        assert elements(pipeline.dataset) == expected
    pipeline.close()


def test_upper_limit_and_users_own_number() -> None:
    dataset = rows().map(parse, num_parallel_calls=12).map(parse, num_parallel_calls=2)
    pipeline = tuned(dataset, max_workers=8)
    high = {s.name: s.high for s in pipeline.stages() if s.unit == "workers"}
    assert high == {"parse": 12, "parse#2": 8}
    assert pipeline.resize({"parse#2": 50})["parse#2"] == 8
    pipeline.close()


def test_found_by_find_and_why_names_the_stages() -> None:
    found = find(rows().map(parse, num_parallel_calls=2).prefetch(2))
    assert isinstance(found.pipeline, DatasetPipeline)
    assert found.why == "workers and window of parse and the prefetch depth are live"
    found.pipeline.close()


def test_spread_dataset_is_answered_with_a_reason() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    spread = strategy.experimental_distribute_dataset(rows().batch(4))
    found = find(spread)
    assert found.pipeline is None and "distribution strategy" in found.why
