"""tf.data with `order="any"`: stages deliver as they finish where all elements come out all the same, else in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
from tensorflow.python.data.experimental.ops import testing  # noqa: E402

from intune_callbacks.pipelines.tf.rewrite import rewrite  # noqa: E402
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402

ROWS = 48


def wait(x: Any) -> Any:
    def slow(x: Any) -> Any:
        time.sleep(0.3 if x == 3 else 0.001)
        return x

    return tf.ensure_shape(tf.numpy_function(slow, [x], tf.int64), [])


def rows() -> Any:
    return tf.data.Dataset.range(ROWS)


def mapped(**options: Any) -> Any:
    return rows().map(wait, num_parallel_calls=4, **options)


def sized() -> Any:
    """Four of one length after the other, so that stock batches fit together."""
    return rows().map(lambda x: tf.fill([x // 4 + 1], wait(x)), num_parallel_calls=4).prefetch(1)


def with_order(dataset: Any) -> Any:
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def opened(x: Any) -> Any:
    return tf.data.Dataset.range(4 * x, 4 * x + 4).map(lambda x: x + 0)


FREE: dict[str, Callable[[], Any]] = {
    "map": lambda: mapped().prefetch(2),
    "map, batch": lambda: mapped().batch(4).prefetch(2),
    "map, shuffle, batch, repeat": lambda: mapped().shuffle(8, seed=1).batch(4).repeat(2),
    "map, filter": lambda: mapped().filter(lambda x: x % 5 != 0),
    "map, concatenate": lambda: mapped().concatenate(rows()),
    "interleave": lambda: (
        rows().interleave(opened, cycle_length=4, num_parallel_calls=4).map(wait, num_parallel_calls=2)
    ),
}
KEPT: dict[str, Callable[[], Any]] = {
    "cache": lambda: mapped().cache().prefetch(1),
    "drop_remainder": lambda: mapped().shuffle(4, seed=1).batch(5, drop_remainder=True),
    "drop_remainder, padded": lambda: mapped().prefetch(1).padded_batch(5, [], drop_remainder=True),
    "batches of elements of several shapes": lambda: sized().batch(4),
    "take": lambda: mapped().take(10),
    "skip": lambda: mapped().skip(10),
    "shard": lambda: mapped().shard(2, 0),
    "enumerate": lambda: mapped().enumerate(),
    "zip": lambda: tf.data.Dataset.zip((mapped(), rows())),
    "window": lambda: mapped().window(4).flat_map(lambda x: x.batch(4)),
    "scan": lambda: mapped().scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s + x)),
    "behind a repeat": lambda: rows().repeat(2).map(wait, num_parallel_calls=4).prefetch(1),
    "a function with a state behind it": lambda: mapped().map(lambda x: tf.numpy_function(abs, [x], tf.int64)),
    "what the user wrote": lambda: mapped(deterministic=True).batch(4),
    "what the user wrote in the options": lambda: with_order(mapped()),
}


def orders(dataset: Any) -> list[bytes]:
    """Whether each parallel map and interleave may deliver as it finishes."""
    found = rewrite(dataset, "key", live=True, in_order=False)
    return [node.attr["deterministic"].s for node in found.graph.nodes() if node.op.startswith("Parallel")]


@pytest.mark.parametrize("name", FREE)
def test_the_same_elements_come_out_and_none_waits_for_a_slower_one(name: str) -> None:
    assert set(orders(FREE[name]())) == {b"false"}
    expected = flat(FREE[name]())
    pipeline = DatasetPipeline(FREE[name](), clock=Clock(), in_order=False)
    for step in range(2):
        got = flat(pipeline.dataset, pipeline if step else None)
        assert sorted(got) == sorted(expected)
        # tf.data makes one operation of a map and the batch behind it, which has a place for each element.
        if not any(word in name for word in ("batch", "shuffle", "interleave")):
            assert got.index(3) > expected.index(3)
    pipeline.close()


def flat(dataset: Any, resized: DatasetPipeline | None = None) -> list[int]:
    found: list[int] = []
    for number, element in enumerate(dataset.as_numpy_iterator()):
        if resized is not None and number in (1, 5):
            resized.resize({stage.name: 1 + number for stage in resized.stages()})
        found += np.reshape(element, -1).tolist()
    return found


@pytest.mark.parametrize("name", KEPT)
def test_the_order_stays_where_something_behind_depends_on_it(name: str) -> None:
    assert b"false" not in orders(KEPT[name]())
    assert list(map(str, KEPT[name]().as_numpy_iterator())) == list(
        map(str, DatasetPipeline(KEPT[name](), clock=Clock(), in_order=False).dataset.as_numpy_iterator())
    )


def opened_slowly(x: Any) -> Any:
    return tf.data.Dataset.range(20 * x, 20 * x + 20).apply(testing.sleep(20_000))


def test_more_files_are_read_at_once_than_the_order_allows() -> None:
    """Twelve of twenty rows, which take .02 s each: 2.4 s two at a time."""
    took_s = {}
    for in_order in (True, False):
        dataset = tf.data.Dataset.range(12).interleave(opened_slowly, cycle_length=2, num_parallel_calls=2)
        pipeline = DatasetPipeline(dataset, clock=Clock(), in_order=in_order)
        before = pipeline.stages()[0]
        assert (before.current, before.high) == (2, 2 if in_order else 16)
        rows = iter(pipeline.dataset)  # by itself: it may wait for the end of an iterator before it
        begin_s = time.monotonic()
        got = [int(next(rows))]
        assert pipeline.resize({before.name: 12})[before.name] == (2 if in_order else 12)
        got += map(int, rows)
        took_s[in_order] = time.monotonic() - begin_s
        assert sorted(got) == list(range(240))
        pipeline.close()
    assert took_s[False] < 0.5 * took_s[True]


def test_of_what_has_no_end_nothing_is_dropped() -> None:
    assert set(orders(mapped().repeat().batch(5, drop_remainder=True))) == {b"false"}


def test_without_consent_every_order_stays() -> None:
    for make in FREE.values():
        found = rewrite(make(), "key", live=True)
        assert all(node.attr["deterministic"].s != b"false" for node in found.graph.nodes())
