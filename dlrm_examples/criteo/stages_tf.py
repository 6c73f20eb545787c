"""The stages of the Criteo pipeline as tf.data operations, in the two styles of `pipeline_tf`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dlrm_examples.criteo.blocks import Split, file_key, row_order
from dlrm_examples.criteo.formats import Ref, epoch_order, parse
from dlrm_examples.criteo.parse import warm_up
from dlrm_examples.criteo.reading import Reading
from dlrm_examples.criteo.tsv import CATEGORIES, DENSE

__all__ = ["Skipped", "blocks", "plain"]

SHUFFLE_ROWS = 1 << 14
OPEN_FILES = 16


class Skipped:
    """Counts the malformed rows left out since it was made, in all epochs, those of blocks read ahead included."""

    def __init__(self) -> None:
        self.rows = 0
        self._lock = threading.Lock()

    def add(self, rows: int) -> None:
        """Count some more; any thread may call it."""
        with self._lock:
            self.rows += rows


class _Steps:
    """What the stages of ``blocks`` do in Python."""

    def __init__(self, reading: Reading, refs: Sequence[Ref], skipped: Skipped | None) -> None:
        self.reading, self.refs, self.skipped = reading, refs, skipped
        self.epochs, self.reader = itertools.count(), reading.reader()
        # Here, not in the workers: each of them would wait for the compiler at its first block.
        warm_up(reading.kernel)

    def draw(self) -> npt.NDArray[np.int64]:
        epoch = next(self.epochs)
        order = epoch_order(self.refs, shuffle=self.reading.is_shuffled, seed=self.reading.seed, epoch=epoch)
        return np.stack((np.full(len(order), epoch), order), axis=1)

    def fetch(self, index: int) -> tuple[np.int64, bytes]:
        ref = self.refs[index]
        if self.reading.latency_s and self.reader.cached(ref, checked=False) is None:
            time.sleep(self.reading.latency_s)
        offset, data = self.reader.to_bytes(self.reader(ref))
        return np.int64(offset), data

    def rows(self, index: int, offset: int, data: bytes) -> tuple[npt.NDArray[Any], ...]:
        asked, content = self.reading, self.reader.from_bytes(self.refs[index], int(offset), data)
        parsed = parse(content, asked.moduli, on_bad_row=asked.on_bad_row, split=asked.chosen, kernel=asked.kernel)
        if self.skipped is not None:
            self.skipped.add(parsed.skipped)
        return parsed.labels, parsed.dense, parsed.categories

    def permutation(self, count: int, epoch: int, index: int) -> npt.NDArray[np.int64]:
        return row_order(int(count), self.reading.seed, int(epoch), int(index))


def blocks(reading: Reading, refs: Sequence[Ref], skipped: Skipped | None = None) -> tf.data.Dataset:
    """Return batches made of blocks of thousands of rows: no step of the graph handles a single row.

    Args:
        reading: what to read.
        refs: its blocks.
        skipped: counts the malformed rows that are left out.
    """
    steps = _Steps(reading, refs, skipped)

    def order(_: tf.Tensor) -> tf.data.Dataset:
        drawn = tf.ensure_shape(tf.numpy_function(steps.draw, [], tf.int64), (None, 2))
        return tf.data.Dataset.from_tensor_slices(drawn)

    def read(task: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (task, *tf.numpy_function(steps.fetch, [task[1]], (tf.int64, tf.string)))

    def parse(task: tf.Tensor, offset: tf.Tensor, data: tf.Tensor) -> tuple[tf.Tensor, ...]:
        labels, dense, categories = tf.numpy_function(
            steps.rows, [task[1], offset, data], (tf.float32, tf.float32, tf.int32)
        )
        features = {
            "dense": tf.ensure_shape(dense, (None, DENSE)),
            "categories": tf.ensure_shape(categories, (None, CATEGORIES)),
        }
        return task, features, tf.ensure_shape(labels, (None,))

    def shuffle(task: tf.Tensor, features: dict[str, tf.Tensor], labels: tf.Tensor) -> tuple[Any, tf.Tensor]:
        if not reading.is_shuffled:
            return features, labels
        drawn = tf.ensure_shape(
            tf.numpy_function(steps.permutation, [tf.size(labels), *tf.unstack(task)], tf.int64), (None,)
        )
        return {name: tf.gather(value, drawn) for name, value in features.items()}, tf.gather(labels, drawn)

    dataset = tf.data.Dataset.range(1).flat_map(order)
    for function in (read, parse, shuffle):
        dataset = _mapped(dataset, function, reading)
    return dataset.rebatch(reading.batch_size, drop_remainder=reading.drops_last)


def plain(reading: Reading) -> tf.data.Dataset:
    """Return batches made of single lines, with a function call for each.

    Args:
        reading: what to read.
    """
    keys = np.concatenate([file_key(path, reading.seed) for path in reading.files])
    chosen = reading.chosen

    def wait() -> np.int64:
        time.sleep(reading.latency_s)
        return np.int64(0)

    def locate(state: tuple[tf.Tensor, tf.Tensor], line: tf.Tensor) -> tuple[Any, Any]:
        offset, seen = state
        end = offset + tf.cast(tf.strings.length(line), tf.int64) + 1
        block = (end - 1) // reading.block_bytes
        if reading.latency_s:
            slept = tf.cond(block > seen, lambda: tf.numpy_function(wait, [], tf.int64), lambda: np.int64(0))
            block += tf.ensure_shape(slept, ())
        return (end, block), (offset, line)

    def read(path: tf.Tensor, key: tf.Tensor) -> tf.data.Dataset:
        lines = tf.data.TextLineDataset(path, buffer_size=reading.block_bytes)
        located = lines.scan((np.int64(0), np.int64(-1)), locate)
        if chosen.test_fraction:
            located = located.filter(lambda offset, line: _is_in(chosen, offset, key))
        return located.map(lambda offset, line: line)

    def parse(line: tf.Tensor) -> tuple[tf.Tensor, ...]:
        defaults = [tf.constant([], tf.int64), *[np.int64(0)] * DENSE, *[""] * CATEGORIES]
        fields = tf.io.decode_csv(line, defaults, field_delim="\t", use_quote_delim=False)
        label, categories = fields[0], tf.stack(fields[1 + DENSE :])
        good = tf.reduce_all(tf.strings.regex_full_match(categories, "([0-9a-fA-F]{8})?")) & (label >= 0) & (label <= 1)
        with tf.control_dependencies([tf.debugging.Assert(good, ["not a row of Criteo data:", line])]):
            text = tf.io.decode_raw(tf.where(categories == "", "0" * 8, categories), tf.uint8)
        # A letter's code has bit 6, a digit's has not, and its four low bits are its place in the alphabet.
        digits = tf.cast(text % 16 + 9 * (text // 64), tf.int64)
        hashes = tf.reduce_sum(digits * 16 ** np.arange(7, -1, -1), axis=1)
        return tf.stack(fields[1 : 1 + DENSE]), hashes % reading.moduli, label

    def collate(dense: tf.Tensor, categories: tf.Tensor, labels: tf.Tensor) -> tuple[Any, tf.Tensor]:
        logarithms = tf.math.log(tf.cast(tf.maximum(dense, 0), tf.float32) + 1.0)
        features = {"dense": logarithms, "categories": tf.cast(categories, tf.int32)}
        return features, tf.cast(labels, tf.float32)

    dataset = tf.data.Dataset.from_tensor_slices((np.array(reading.files), keys))
    if reading.is_shuffled:
        dataset = dataset.shuffle(len(reading.files), seed=reading.seed)
    cycle = min(len(reading.files), OPEN_FILES)
    calls = min(reading.threads("read"), cycle) or None
    dataset = dataset.interleave(read, cycle_length=cycle, num_parallel_calls=calls)
    dataset = _mapped(dataset, parse, reading)
    if reading.on_bad_row == "skip":
        dataset = dataset.ignore_errors()
    if reading.is_shuffled:
        dataset = dataset.shuffle(SHUFFLE_ROWS, seed=reading.seed)
    return _mapped(dataset.batch(reading.batch_size, drop_remainder=reading.drops_last), collate, reading)


def _mapped(dataset: tf.data.Dataset, function: Any, reading: Reading) -> tf.data.Dataset:
    """Return `dataset` mapped by a stage's function with that stage's workers; 0 maps in line."""
    return dataset.map(function, num_parallel_calls=reading.threads(function.__name__) or None)


def _is_in(split: Split, offset: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Do for one line what `Split.select` does for many."""
    drawn = tf.bitwise.right_shift(_mix64(tf.bitwise.bitwise_xor(tf.cast(offset, tf.uint64), key)), _word(11))
    test = tf.cast(drawn, tf.float64) < split.test_fraction * 2.0**53
    return test if split.name == "test" else ~test


def _mix64(values: tf.Tensor) -> tf.Tensor:
    """Do what `hashing.mix64` does."""
    mixed = values + _word(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, _word(shift))) * _word(factor)
    return tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, _word(31)))


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
