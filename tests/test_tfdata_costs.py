"""What a tf.data pipeline that can be resized costs: at a call, at a read, in its model of itself, and afterwards."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from tensorflow.python.eager import context  # noqa: E402

from benchmarks.tfdata_kinds import KINDS, elements, parse, plain, rows, ten  # noqa: E402
from intune_callbacks.pipelines.tf import graph as tf_graph  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.rewrite import rewrite  # noqa: E402
from intune_callbacks.pipelines.tf.stats import SinkReading  # noqa: E402
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


def test_a_set_and_a_read_are_cheap() -> None:
    pipeline = tuned(rows(1000).map(parse, num_parallel_calls=2).prefetch(2))
    stream = iter(pipeline.dataset)
    next(stream)
    times = []
    for i in range(50):
        begin_s = time.perf_counter()
        pipeline.resize({"parse": 1 + i % 3, "parse.window": 4 + i % 3})
        times.append(time.perf_counter() - begin_s)
    assert min(times) < 0.0005
    waits = []
    for _ in range(200):
        begin_s = time.perf_counter()
        pipeline.waits()
        waits.append(time.perf_counter() - begin_s)
    assert sorted(waits)[100] < 0.00005
    pipeline.close()


def test_what_is_behind_a_stage_is_no_part_of_the_model_that_autotune_uses() -> None:
    def model(dataset) -> list[str]:
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
        nodes = tf.data.experimental.get_model_proto(iterator).nodes.values()
        return sorted(f"{node.name}({len(node.inputs)})" for node in nodes)

    def stock():
        mapped = tf.data.Dataset.range(10**6).map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE)
        return mapped.shuffle(10).map(lambda x: x * 2, num_parallel_calls=2).batch(4).prefetch(2)

    pipeline = tuned(stock())
    # The last operation, which counts what is delivered, is one, under the name of what reads from it.
    assert model(pipeline.dataset) == sorted([*model(stock()), "Root(1)"])
    del pipeline.dataset
    pipeline.close()


def seconds_of(iterator: Any, batches: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return time.perf_counter() - begin_s


def times_of_a_resized_one() -> float:
    """Return how many times longer small calls take after down and up than in a twin that nobody resized."""
    small = tf.data.Dataset.range(10**9).map(lambda v: tf.cast(v % 31, tf.float32) * tf.ones(8), num_parallel_calls=2)
    pipeline, twin = tuned(small.batch(32)), tuned(small.batch(32))
    resized, untouched = iter(pipeline.dataset), iter(twin.dataset)
    seconds_of(resized, 500), seconds_of(untouched, 500)
    start = {stage.name: stage.current for stage in pipeline.stages()}
    ratios = []
    for turn in range(10):
        pipeline.resize({"map": 1})
        seconds_of(resized, 50)
        pipeline.resize(start)
        seconds_of(resized, 50)
        # Pairs, and in turns: the machine's speed moves, and what it favours is not to be always the same.
        first, second = (resized, untouched) if turn % 2 else (untouched, resized)
        ratio = seconds_of(first, 300) / seconds_of(second, 300)
        ratios.append(ratio if turn % 2 else 1 / ratio)
    pipeline.close()
    twin.close()
    return statistics.median(ratios)


def test_small_calls_are_as_fast_again_after_down_and_up() -> None:
    """With threads of our own they took half as long again, also with the number that was there at the start."""
    # The machine's own speed moves by a third within a second: three attempts.
    assert any(times_of_a_resized_one() < 1.25 for _ in range(3))


def test_a_pipeline_without_workers_is_looked_at_at_its_end_only() -> None:
    even = tf.data.Dataset.range(100).filter(lambda v: v % 2 == 0).batch(5).prefetch(2)
    inserted = [node for node in rewrite(even, "key", live=True).graph.graph.node if node.op == tf_native.STAGE_OP]
    assert [node.input[0].split("/")[0].split(":")[0] for node in inserted] == ["PrefetchDataset"]


def test_what_tensorflow_was_told_of_a_pipeline_is_forgotten_with_it() -> None:
    def train() -> set[str]:
        dataset = rows(6).interleave(ten, cycle_length=2, num_parallel_calls=2).map(lambda x: x + 1, 2).batch(4)
        pipeline = tuned(dataset)
        stream, expected = iter(pipeline.dataset), elements(dataset)
        first = plain(next(stream))
        pipeline.close()
        del pipeline, dataset
        gc.collect()
        assert [first, *elements(stream)] == expected  # an iterator has what it calls
        del stream
        gc.collect()
        return set(context.context().list_function_names())

    train()
    known = train()
    assert train() == known


def test_what_an_iterator_opens_behind_the_release_is_not_kept_for_ever() -> None:
    """Who trains in short fits would leave a little of each in memory."""
    dataset = rows(6).interleave(ten, cycle_length=2, num_parallel_calls=2).map(parse, num_parallel_calls=2).repeat(3)
    pipeline = tuned(dataset)
    stream, key = iter(pipeline.dataset), pipeline._key
    first = [int(next(stream)) for _ in range(5)]
    pipeline.close()
    assert first + [int(x) for x in stream] == [int(x) for x in dataset]
    assert tf_native.load().read(key) == (SinkReading(), {})


@pytest.mark.parametrize("kind", ["map", "zip", "numpy_function"])
def test_a_dataset_is_taken_apart_once_for_many_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of short fits spent half of its time on that."""
    init, taken_apart = tf_graph.DatasetGraph.__init__, []
    monkeypatch.setattr(
        tf_graph.DatasetGraph, "__init__", lambda self, dataset: (taken_apart.append(1), init(self, dataset))[1]
    )
    stock, dataset = KINDS[kind](), KINDS[kind]()
    for run in range(3):
        pipeline = tuned(dataset)
        expected = elements(stock)
        pipeline.resize({stage.name: 3 + run for stage in pipeline.stages()})
        assert elements(pipeline.dataset) == expected
        assert pipeline.stats().delivered == len(expected)  # nothing is left of the run before
        pipeline.close()
    assert len(taken_apart) == 1
    one, two = tuned(dataset), tuned(dataset)  # at the same time: each counts for itself
    assert len(taken_apart) == 2
    delivered = len(elements(one.dataset))
    assert (one.stats().delivered, two.stats().delivered) == (delivered, 0)
    one.close(), two.close()
    gone = weakref.ref(dataset)
    del one, two, pipeline, dataset
    gc.collect()
    assert gone() is None
