"""Our tf.data operations where something ends: iterators, pipelines, functions, processes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
from tensorflow.python.data.ops import dataset_ops  # noqa: E402
from tf_stages import Calls, staged, take  # noqa: E402

from intune_callbacks.pipelines.tf import build as tf_build  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402

pytestmark = pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before")
keys = itertools.count()


@pytest.fixture(scope="module")
def native() -> tf_native.Native:
    return tf_native.load()


@pytest.fixture
def key(native: tf_native.Native) -> Iterator[str]:
    name = f"ends-{next(keys)}"
    yield name
    native.release(name)


def test_an_iterator_with_a_long_queue_ends_soon(native: tf_native.Native, key: str) -> None:
    dataset = staged(native, tf.data.Dataset.range(2000).map(Calls(0.02), 200), key, "calls")
    native.set_workers(key, "calls", 1)
    iterator = iter(dataset)
    take(iterator, 3)
    while native.read(key)[1]["calls"].waiting < 190:
        time.sleep(0.01)
    ended_s = time.monotonic()
    left = native.read(key)[1]["calls"]
    del iterator
    while native.read(key)[1]["calls"].waiting:
        time.sleep(0.01)
    # One after the other they would take 4 s.
    assert time.monotonic() - ended_s < 2.5
    assert native.read(key)[1]["calls"].closures > left.closures


def test_two_iterators_of_one_stage_share_its_workers(native: tf_native.Native, key: str) -> None:
    calls = Calls()
    dataset = staged(native, tf.data.Dataset.range(60).map(calls, 8), key, "calls")
    native.set_workers(key, "calls", 3)
    first, second = iter(dataset), iter(dataset)
    both = [first, second]
    assert calls.most_during(lambda: [take(iterator, 1) for _ in range(20) for iterator in both]) == 3
    assert native.set_window(key, "calls", 12) == 12
    both.clear()
    del second
    assert take(first, 40) == list(range(20, 60))


def test_iterators_that_come_and_go_in_several_threads(native: tf_native.Native, key: str) -> None:
    dataset = staged(native, tf.data.Dataset.range(500).map(lambda number: number + 7, 16), key, "add")
    wrong: list[Any] = []

    def use(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(25):
            native.set_workers(key, "add", choice.randint(0, 4))
            native.set_window(key, "add", choice.randint(1, 64))
            count = choice.randint(0, 60)
            seen = take(iter(dataset), count)
            if seen != list(range(7, 7 + count)):
                wrong.append(seen)
            if choice.random() < 0.2:
                native.release(key)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_an_error_of_the_function_reaches_the_consumer_and_work_goes_on(native: tf_native.Native, key: str) -> None:
    def picky(number: Any) -> Any:
        with tf.control_dependencies(
            [tf.debugging.assert_none_equal(number, tf.constant(5, tf.int64), message="no five")]
        ):
            return tf.identity(number)

    dataset = staged(native, tf.data.Dataset.range(10).map(picky, 3), key, "picky")
    native.set_workers(key, "picky", 2)
    iterator = iter(dataset)
    assert take(iterator, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(tf.errors.InvalidArgumentError, match="no five"):
        next(iterator)
    assert take(iterator, 4) == [6, 7, 8, 9]


def test_released_while_it_runs_it_goes_on(native: tf_native.Native, key: str) -> None:
    dataset = staged(native, tf.data.Dataset.range(100).map(Calls(0.001), 8), key, "calls")
    native.set_workers(key, "calls", 2)
    iterator = iter(dataset)
    seen = take(iterator, 10)
    native.release(key)
    assert seen + take(iterator, 90) == list(range(100))
    assert native.read(key)[1] == {}


def test_work_that_waits_for_its_own_parts_does_not_hang(native: tf_native.Native, key: str) -> None:
    from tensorflow.python.ops import gen_dataset_ops

    # A parallel copy holds its worker until as many parts as TensorFlow has threads were copied, on the same pool.
    source = tf.data.Dataset.range(64).map(lambda number: tf.fill([8192], number))
    spec = tf.TensorSpec([8, 8192], tf.int64)
    variant = gen_dataset_ops.parallel_batch_dataset(
        source._variant_tensor, 8, 2, True, [tf.int64], [spec.shape], parallel_copy=True, deterministic="true"
    )
    dataset = staged(native, dataset_ops._VariantDataset(variant, spec), key, "batch")
    native.set_workers(key, "batch", 1)
    assert [int(batch[0, 0]) for batch in dataset] == list(range(0, 64, 8))


END = """
import os, tensorflow as tf
from intune_callbacks.pipelines.tf import native as tf_native
native = tf_native.load()
# Nothing of Python: a thread that waits for an interpreter on its way out hangs, with our operation and without.
def body(number):
    return tf.cast(tf.reduce_sum(tf.random.stateless_uniform([10**6], [1, number])), tf.int64)
dataset = tf.data.Dataset.range(10**6).map(body, 64)
types, shapes = [tf.int64], [dataset.element_spec.shape]
from tensorflow.python.data.ops import dataset_ops
given = {"pipeline": "end", "stage": "body", "output_types": types, "output_shapes": shapes}
variant = native.ops.intune_stage(dataset._variant_tensor, **given)
dataset = dataset_ops._VariantDataset(variant, dataset.element_spec)
native.set_workers("end", "body", 4)
iterator = iter(dataset)
for _ in range(20):
    next(iterator)
print("ends", flush=True)
"""


CHAINED = """
import sys
import tensorflow as tf
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline
from intune_callbacks.types import Clock

BETWEEN = {
    "nothing": lambda data: data,
    "filter": lambda data: data.filter(lambda x: x % 3 != 0),
    "take": lambda data: data.take(70),
    "repeat": lambda data: data.repeat(2),
    "batch": lambda data: data.batch(2).unbatch(),
    "shuffle": lambda data: data.shuffle(9, seed=1),
}

def pair(x):
    return tf.data.Dataset.range(x, x + 2)

def chained(between):
    first = tf.data.Dataset.range(40).interleave(pair, cycle_length=3, num_parallel_calls=3)
    return between(first).interleave(pair, cycle_length=8, num_parallel_calls=2)

for name, between in BETWEEN.items():
    pipeline = DatasetPipeline(chained(between), clock=Clock())
    tf.random.set_seed(1)
    stock = [int(x) for x in chained(between)]
    tf.random.set_seed(1)
    assert [int(x) for x in pipeline.dataset] == stock, name
    pipeline.close()
    print(name, flush=True)
"""


def test_an_interleave_that_reads_from_another_one_ends() -> None:
    # What ends its input at the last element waits for that one's threads: they were taken for the other's, and held.
    done = subprocess.run([sys.executable, "-c", CHAINED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["nothing", "filter", "take", "repeat", "batch", "shuffle"], done.stderr[-2000:]


def test_a_process_may_end_in_the_middle(native: tf_native.Native) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", END], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr[-2000:]
