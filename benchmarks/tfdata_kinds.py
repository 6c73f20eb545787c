"""Kinds of tf.data pipelines, built anew with the same seeds at each call, and their elements as plain values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["KINDS", "elements", "parse", "plain"]

Dataset = tf.data.Dataset
LENGTHS = [0, 3, 7, 1, 9, 2]


def parse(x):
    return x * 3 + 1


def spread(x):
    return tf.cast(x, tf.float32) + tf.random.stateless_uniform([3], [x, 1])


def ten(i):
    return Dataset.range(i * 10, i * 10 + 10)


def uneven(i):
    return Dataset.range(i * 100, i * 100 + tf.gather(tf.constant(LENGTHS, tf.int64), i % len(LENGTHS)))


def python(x):
    return tf.ensure_shape(tf.numpy_function(lambda y: np.int64(y * 2), [x], tf.int64), [])


def rows(n: int = 60) -> Any:
    return Dataset.range(n)


def files() -> list[str]:
    folder = Path(tempfile.mkdtemp())
    for k, length in enumerate(LENGTHS):
        with tf.io.TFRecordWriter(str(folder / f"{k}.tfrecord")) as writer:
            for i in range(length):
                writer.write(f"{k}-{i}".encode())
    return [str(folder / f"{k}.tfrecord") for k in range(len(LENGTHS))]


FILES = files()
OFFSET = tf.Variable(3, dtype=tf.int64)
WORDS = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(500, dtype=tf.int64), tf.range(500, dtype=tf.int64) * 7), -1
)


def offset(x):
    return x + OFFSET


def look_up(x):
    return WORDS.lookup(x)


def generated():
    def numbers():
        yield from range(50)

    source = Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.int64))
    return source.map(parse, num_parallel_calls=2).batch(3)


def no_autotune():
    options = tf.data.Options()
    options.autotune.enabled = False
    return rows().map(parse, num_parallel_calls=2).batch(4).with_options(options)


KINDS: dict[str, Callable[[], Any]] = {
    "map": lambda: rows().map(parse, num_parallel_calls=2).map(spread, num_parallel_calls=3).prefetch(2),
    "AUTOTUNE": lambda: rows().map(parse, num_parallel_calls=-1).batch(4, num_parallel_calls=-1).prefetch(-1),
    "sequential map": lambda: rows().map(parse).map(spread).batch(4),
    "map+batch": lambda: rows().map(parse, num_parallel_calls=2).batch(4),
    "interleave": lambda: rows(12).interleave(ten, cycle_length=4, num_parallel_calls=2).batch(4, num_parallel_calls=2),
    "sequential interleave": lambda: rows(9).interleave(uneven, cycle_length=3, block_length=2).map(parse).batch(4),
    "interleave behind interleave": lambda: (
        rows(12)
        .interleave(ten, cycle_length=4, num_parallel_calls=2)
        .filter(lambda x: x % 3 != 0)
        .interleave(uneven, cycle_length=3, num_parallel_calls=3)
    ),
    "shuffle": lambda: rows().map(parse, num_parallel_calls=2).shuffle(20, seed=5).batch(4),
    "shuffle and repeat": lambda: rows().shuffle(20, seed=5).repeat(2).map(parse, num_parallel_calls=2).batch(4),
    "cache": lambda: rows().map(parse, num_parallel_calls=2).cache().map(spread, num_parallel_calls=2),
    "zip": lambda: Dataset.zip((rows().map(parse, num_parallel_calls=2), rows().map(spread))).batch(4),
    "flat_map": lambda: rows(10).flat_map(lambda i: ten(i).map(parse, num_parallel_calls=2)).batch(4).map(parse),
    "from_generator": generated,
    "numpy_function": lambda: rows().map(python, num_parallel_calls=3).map(python).batch(4),
    "TFRecord": lambda: (
        Dataset.list_files(FILES, shuffle=False)
        .interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=3)
        .map(tf.strings.length, num_parallel_calls=2)
        .batch(3)
    ),
    "TFRecord, parallel reads": lambda: tf.data.TFRecordDataset(FILES, num_parallel_reads=3).batch(3),
    "ragged": lambda: rows().map(lambda x: tf.ragged.range(x % 5), num_parallel_calls=2).batch(4),
    "sparse": lambda: rows().map(lambda x: tf.sparse.from_dense(tf.one_hot(x % 3, 3)), num_parallel_calls=2).batch(4),
    "dictionary": lambda: rows().map(lambda x: ({"a": x, "b": spread(x)}, parse(x)), num_parallel_calls=2).batch(4),
    "slices": lambda: (
        Dataset.from_tensor_slices((np.arange(50), np.arange(50) * 2.0))
        .map(lambda a, b: (a + 1, b), num_parallel_calls=2)
        .shuffle(50, seed=1)
        .batch(8)
    ),
    "variable and table": lambda: rows().map(offset, num_parallel_calls=2).map(look_up, num_parallel_calls=2).batch(4),
    "filter, skip, take": lambda: (
        rows().map(parse, num_parallel_calls=2).filter(lambda x: x % 2 == 0).skip(3).take(20).enumerate()
    ),
    "window": lambda: rows().map(parse, num_parallel_calls=2).window(4).flat_map(lambda w: w.batch(4)),
    "sampled": lambda: Dataset.sample_from_datasets([rows().map(parse, num_parallel_calls=2), rows()], seed=1).batch(4),
    "padded": lambda: rows().map(lambda x: tf.fill([x % 5], x), num_parallel_calls=2).padded_batch(4).prefetch(1),
    "no AUTOTUNE": no_autotune,
}


def plain(element: Any) -> Any:
    """Return an element as Python values."""

    def value(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return part.to_list()
        dense = tf.sparse.to_dense(part) if isinstance(part, tf.SparseTensor) else part
        return np.asarray(dense.numpy()).tolist()

    return tf.nest.map_structure(value, element)


def elements(dataset: Any) -> list[Any]:
    """Return all elements of one epoch."""
    return [plain(element) for element in dataset]
