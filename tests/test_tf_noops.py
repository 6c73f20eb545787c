"""What TensorFlow's optimiser makes of a tf.data graph is made of ours, too: else it shows in what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from benchmarks.tfdata_kinds import elements, parse, rows  # noqa: E402
from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.rewrite import rewrite  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    try:
        tf_native.load()
    except Exception as error:
        pytest.skip(f"the operations cannot be compiled here: {error}")


def same(*x: Any) -> Any:
    return x


def printed(x: Any) -> Any:
    tf.print(x, output_stream="file:///dev/null")
    return x


def shuffled() -> Any:
    return rows(30).map(parse, num_parallel_calls=2).shuffle(30, seed=1).batch(4)


def with_wish(dataset: Any, **wish: bool) -> Any:
    options = tf.data.Options()
    for name, value in wish.items():
        setattr(options.experimental_optimization, name, value)
    return dataset.with_options(options)


BEYOND = tf.range(200, dtype=tf.int64)  # so many that a function captures them


CASES: dict[str, Callable[[], Any]] = {
    "repeat(1)": lambda: shuffled().repeat(1),
    "behind and in front": lambda: rows(30).shuffle(9, seed=2).repeat(1).map(parse).repeat(1).prefetch(1),
    "two of one": lambda: tf.data.Dataset.zip((shuffled().repeat(1),) * 2),
    "all kinds": lambda: shuffled().repeat(1).take(-1).skip(0).shard(1, 0).map(lambda x: x, num_parallel_calls=2),
    "pairs": lambda: tf.data.Dataset.zip((shuffled(), shuffled())).map(same).repeat(1).map(lambda a, b: a + b),
    "not wanted": lambda: with_wish(shuffled().repeat(1), noop_elimination=False),
    "no defaults": lambda: with_wish(shuffled().repeat(1), apply_default_optimizations=False),
    "wanted alone": lambda: with_wish(shuffled().repeat(1), apply_default_optimizations=False, noop_elimination=True),
    "threads of its own": lambda: rows(30).map(parse, num_parallel_calls=2, use_unbounded_threadpool=True).batch(4),
    "errors ignored": lambda: rows(30).map(parse, num_parallel_calls=2).ignore_errors(),
    "given beside": lambda: rows(9).map(lambda x: (x, BEYOND)).map(lambda x, b: (x, b), num_parallel_calls=2).batch(3),
    "not the same": lambda: rows(9).map(lambda x: (x, x + 1)).map(lambda a, b: (b, a)).batch(2),
}


@pytest.mark.parametrize("mode", ["tune", "observe"])
@pytest.mark.parametrize("name", CASES)
def test_later_epochs_are_those_of_stock(name: str, mode: str) -> None:
    stock = CASES[name]()
    loader = live(CASES[name](), mode=mode, show_card=False)
    assert [elements(loader) for _ in range(3)] == [elements(stock) for _ in range(3)]
    assert loader.close()["frozen"] is None


@pytest.mark.parametrize("name", ["all kinds", "pairs", "threads of its own", "errors ignored", "no defaults"])
@pytest.mark.parametrize("modes", [("off", "tune"), ("tune", "off"), ("observe", "off"), ("off", "observe")])
def test_a_saved_iterator_goes_on_in_any_mode(name: str, modes: tuple[str, str], tmp_path: Path) -> None:
    saving, going_on = (iter(live(CASES[name](), mode=mode, show_card=False)) for mode in modes)
    next(saving)
    path = tf.train.Checkpoint(iterator=saving).write(str(tmp_path / "saved"))
    tf.train.Checkpoint(iterator=going_on).read(path).assert_consumed()
    assert elements(going_on) == elements(saving)


@pytest.mark.parametrize("mode", ["off", "observe", "tune"])
def test_no_batch_is_read_ahead_where_tensorflow_reads_none(mode: str) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    dataset = with_wish(rows(8).map(lambda x: step).batch(2), apply_default_optimizations=False)
    seen = []
    for batch in live(dataset, mode=mode, show_card=False):
        seen += batch.numpy().tolist()
        step.assign_add(1)
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_the_user_keeps_stays() -> None:
    kept = with_wish(shuffled().repeat(1).map(lambda x: x), noop_elimination=False)
    ops = {node.op for node in rewrite(kept, "key", live=True).graph.nodes()}
    assert {"RepeatDataset", "ParallelMapDatasetV2"} <= ops
    assert "MapDataset" in {node.op for node in rewrite(rows().map(printed), "key", live=True).graph.nodes()}
    left = rewrite(rows().repeat(1).take(-1).skip(0).shard(1, 0).map(same), "key", live=True).graph
    assert {node.op for node in left.nodes()} == {"RangeDataset", "PrefetchDataset"}


@pytest.mark.parametrize("mode", ["tune", "observe"])
def test_a_map_with_a_state_and_its_batch_are_one_as_in_tensorflow(mode: str) -> None:
    """Its calls run beside what reads the batches, and its errors name no iterator."""

    def failing(x: Any) -> Any:
        raise ValueError(f"row {x}")

    made = rows(30).map(lambda x: tf.ensure_shape(tf.numpy_function(failing, [x], tf.int64), []))
    dataset = made.batch(4).map(parse, num_parallel_calls=2)
    told = []
    for loader in (dataset, live(dataset, mode=mode, show_card=False)):
        # An error that is kept holds the iterator, in a cycle. A thread of TensorFlow's that still calls it may
        # run the collector: that would wait for its own call for ever, and nothing is collected in this process again.
        try:
            elements(loader)
        except tf.errors.InvalidArgumentError as error:
            told.append(str(error))
    assert "row 0" in told[0] and told[0] == told[1]
