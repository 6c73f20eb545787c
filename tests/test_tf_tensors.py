"""Tensors that a dataset holds: shared where they can be, and left alone where a copy of them would take long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from intune_callbacks.pipelines.tf import build as tf_build  # noqa: E402
from intune_callbacks.pipelines.tf import graph as tf_graph  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.graph import CannotRewrite, DatasetGraph  # noqa: E402
from intune_callbacks.pipelines.tf.objects import held, made  # noqa: E402
from intune_callbacks.pipelines.tf.rewrite import rewrite  # noqa: E402

pytestmark = pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before")


@pytest.fixture(autouse=True, scope="module")
def _operations() -> None:
    tf_native.load()


def dataset_of(found):
    """Return a dataset made from an edited graph."""
    return made(found.graph.maker(), found.graph.dataset)


def test_large_tensors_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.zeros([1000, 100])).map(lambda x: x, num_parallel_calls=2)
    DatasetGraph(dataset)
    monkeypatch.setattr(tf_graph, "LARGEST_HELD_BYTES", 399_999)
    with pytest.raises(CannotRewrite, match="from_tensor_slices"):
        DatasetGraph(dataset)


@pytest.mark.parametrize("kind", [tf.float32, tf.string, tf.bfloat16, tf.bool])
def test_large_tensors_are_neither_in_the_graph_nor_copied(kind: Any) -> None:
    """TensorFlow looks through what is in the graph: 21 MB of file names took 3.3 s."""
    numbers = tf.where(tf.range(20_000) % 7 == 0, float("nan"), tf.range(20_000, dtype=tf.float32))
    given = tf.strings.as_string(numbers) if kind is tf.string else tf.cast(numbers, kind)
    slices = tf.data.Dataset.from_tensor_slices
    dataset = slices((given, tf.reverse(given, [0]))).map(lambda one, other: (one, other), num_parallel_calls=2)
    dataset = tf.data.Dataset.zip(dataset, slices(given)).batch(64).prefetch(1)
    edited = rewrite(dataset, "key", live=True)
    shared = list(edited.graph._captures.values())
    assert len(shared) == 3 and all(any(one is tensor for tensor in held(dataset)) for one in shared)
    assert edited.graph.graph.ByteSize() < 10_000
    expected = [[part.numpy().tolist() for part in tf.nest.flatten(element)] for element in dataset]
    assert repr([[part.numpy().tolist() for part in tf.nest.flatten(each)] for each in dataset_of(edited)]) == repr(
        expected
    )


def test_ragged_rows_stay_in_the_graph() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.RaggedTensor.from_row_lengths(tf.range(6000), [1] * 6000))
    dataset = dataset.map(lambda row: row, num_parallel_calls=2).prefetch(1)
    built = dataset_of(rewrite(dataset, "key", live=True))
    assert [row.numpy().tolist() for row in built] == [[number] for number in range(6000)]


def test_what_would_take_seconds_to_copy_before_the_first_step_is_refused() -> None:
    slices = tf.data.Dataset.from_tensor_slices
    with pytest.raises(CannotRewrite, match="72 MB of tensors"):
        DatasetGraph(slices(tf.zeros([18_000, 1000])).batch(10))
    with pytest.raises(CannotRewrite, match="72 MB of tensors"):
        DatasetGraph(slices([b"a" * 7200] * 10_000).batch(10))
    with pytest.raises(CannotRewrite, match="9000 ragged rows"):
        DatasetGraph(slices(tf.RaggedTensor.from_row_lengths(tf.range(9000), [1] * 9000)).batch(10))
    captured, rows, again = (
        slices(tf.fill([18_000_000], 1.5)),
        np.ones([5_000_000], np.float32),
        tf.data.Dataset.range(9),
    )
    with pytest.raises(CannotRewrite, match="72 MB of tensors"):
        DatasetGraph(again.flat_map(lambda _: captured.batch(2**21).take(1)).prefetch(1))
    with pytest.raises(CannotRewrite, match="20 MB of tensors"):
        DatasetGraph(again.flat_map(lambda _: slices(rows).batch(2**21).take(1)).prefetch(1))
