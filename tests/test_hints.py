"""What is odd about a pipeline is said in a sentence with its numbers, and nothing is said of a plain one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402
from torch.utils.data.datapipes.iter import IterableWrapper  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.tf import build as tf_build  # noqa: E402
from intune_callbacks.pipelines.tf.graph import DatasetGraph  # noqa: E402
from intune_callbacks.pipelines.tf.hints import hints_of  # noqa: E402

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE


def read(path):
    return tf.data.TextLineDataset(path)


def parse(x):
    return tf.strings.length(x)


def python(x):
    return tf.numpy_function(len, [x], tf.int64)


def paths(n: int):
    return Dataset.from_tensor_slices([f"{k}.txt" for k in range(n)])


def untuned(dataset):
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


ODD = {
    "3 files": lambda: paths(3).interleave(read, cycle_length=8, num_parallel_calls=8),
    "cycle_length for 3": lambda: paths(3).interleave(read, cycle_length=8, num_parallel_calls=AUTOTUNE),
    "whole epoch of 5000": lambda: Dataset.range(5000).map(lambda x: x).shuffle(8000).batch(4),
    "filled with 60000": lambda: (
        paths(3).interleave(read, cycle_length=3, num_parallel_calls=AUTOTUNE).shuffle(60000).batch(4)
    ),
    "same num_parallel_calls=8": lambda: (
        paths(9)
        .interleave(read, cycle_length=8, num_parallel_calls=8)
        .map(parse, num_parallel_calls=8)
        .map(lambda x: x, num_parallel_calls=8)
    ),
    "two prefetches follow": lambda: Dataset.range(9).prefetch(2).prefetch(AUTOTUNE),
    "3 prefetches": lambda: Dataset.range(9).prefetch(2).batch(1).prefetch(2).batch(1).prefetch(2),
    "no prefetch at the end": lambda: untuned(Dataset.range(9).batch(2)),
    "map(python) computes one": lambda: paths(9).map(python).prefetch(1),
    "one file is read at a time": lambda: paths(9).flat_map(read).map(parse, num_parallel_calls=2).prefetch(1),
    "4 datasets in turn": lambda: paths(9).interleave(read, cycle_length=4).prefetch(1),
    "3 datasets in turn": lambda: paths(3).interleave(read, cycle_length=16).prefetch(1),
}


@pytest.mark.parametrize("words", ODD)
def test_odd_dataset(words: str) -> None:
    hints = hints_of(DatasetGraph(ODD[words]()))
    assert len(hints) == 1 and words in hints[0].what, hints
    assert hints[0].line


def test_a_smaller_shuffle_is_smaller_than_the_epoch_and_knows_where_the_rows_come_from() -> None:
    rows = Dataset.range(3000).map(lambda x: x)
    (hint,) = hints_of(DatasetGraph(rows.shuffle(100_000).batch(4)))
    assert hint.line.startswith(".shuffle(1000)  # or all of them in front of the map") and "files" not in hint.line
    (hint,) = hints_of(DatasetGraph(rows.cache().shuffle(100_000).batch(4)))
    assert hint.line == ".shuffle(1000)"
    (hint,) = hints_of(DatasetGraph(ODD["filled with 60000"]()))
    assert hint.line.startswith(".shuffle(6000)") and "list_files" in hint.line


def test_plain_dataset() -> None:
    lines = paths(8).shuffle(8).interleave(read, cycle_length=4, num_parallel_calls=AUTOTUNE)
    dataset = lines.map(parse, num_parallel_calls=AUTOTUNE).shuffle(1000).batch(8).prefetch(AUTOTUNE)
    assert hints_of(DatasetGraph(dataset)) == ()
    assert hints_of(DatasetGraph(Dataset.range(100).shuffle(100).batch(8))) == ()


def test_what_several_parts_read_is_one_stage_of_the_user() -> None:
    def folds(base):
        first, *others = [base.shard(4, k) for k in range(4)]
        for other in others:
            first = first.concatenate(other)
        return hints_of(DatasetGraph(first.batch(4).prefetch(1)))

    assert folds(paths(9).map(parse, num_parallel_calls=2).batch(1, num_parallel_calls=2)) == ()
    assert folds(paths(9).map(parse, num_parallel_calls=2).prefetch(2)) == ()
    (hint,) = folds(paths(9).map(python))
    assert "map(python) computes one" in hint.what
    apart = [paths(9).map(parse, num_parallel_calls=3) for _ in range(3)]
    (hint,) = hints_of(DatasetGraph(Dataset.zip(tuple(apart)).prefetch(1)))
    assert "3 stages have the same num_parallel_calls=3" in hint.what


@pytest.mark.parametrize("at_once", [None, 1])
def test_records_that_are_read_one_file_at_a_time(at_once: int | None) -> None:
    def records(files: int, at_once: int | None) -> Any:
        names = [f"{k}.tfrecord" for k in range(files)]
        read = tf.data.TFRecordDataset(names, num_parallel_reads=at_once)
        return hints_of(DatasetGraph(read.map(parse, num_parallel_calls=2).prefetch(1)))

    (hint,) = records(9, at_once)
    assert hint.line.startswith("num_parallel_reads=8  # where reads are slow")
    assert records(1, at_once) == records(9, 2) == ()


def test_records_are_given_the_argument_of_what_reads_them(tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"{k}.tfrecord").touch()
    features = {"x": tf.io.FixedLenFeature([], tf.float32)}
    made = tf.data.experimental.make_batched_features_dataset(f"{tmp_path}/*", 4, features, num_epochs=1)
    assert "reader_num_threads=8  # where reads are slow: gives another order" in [
        hint.line for hint in hints_of(DatasetGraph(made))
    ]


def test_lines_can_be_pasted_also_of_functions_without_a_name() -> None:
    def line(dataset: Any) -> str:
        (hint,) = hints_of(DatasetGraph(dataset.prefetch(1)))
        return hint.line.partition("  #")[0]

    cycle = "cycle_length=8, num_parallel_calls=8"  # of its own choice tf.data reads one file at a time on few CPUs
    assert line(paths(9).flat_map(read)) == f".interleave(read, {cycle})"
    assert line(paths(9).flat_map(tf.data.TFRecordDataset)) == f".interleave(..., {cycle})"
    calls = "num_parallel_calls=tf.data.AUTOTUNE"
    assert line(paths(9).interleave(read, cycle_length=4)) == f".interleave(read, ..., {calls})"
    assert line(paths(9).interleave(lambda x: read(x), cycle_length=4)) == f".interleave(..., {calls})"
    assert line(paths(9).map(lambda x: tf.numpy_function(str, [x], tf.string))) == f".map(..., {calls})"


def test_found_with_the_dataset() -> None:
    found = find(ODD["3 files"]())
    assert found.pipeline is not None and "3 files" in found.hints[0].what
    found.pipeline.close()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(9)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loaders() -> None:
    cpus = len(os.sched_getaffinity(0))
    (crowded,) = find(DataLoader(list(range(9)), num_workers=cpus + 3)).hints
    assert f"{cpus + 3} workers on {cpus} CPU" in crowded.what
    (stream,) = find(DataLoader(Stream())).hints
    assert "Stream is read with num_workers=0" in stream.what and stream.line.startswith("num_workers=")
    (pipe,) = find(DataLoader(IterableWrapper(range(9)))).hints
    assert "num_workers=0" in pipe.what
    assert find(DataLoader(list(range(9)))).hints == ()


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda: DataLoader(Stream(), num_workers=1), "the dataset is iterable-style, so num_workers stays 1"),
        (lambda: StatefulDataLoader(list(range(9)), num_workers=1), "StatefulDataLoader keeps a state per worker"),
    ],
)
def test_workers_that_stay_as_they_are(loader: Callable[[], Any], told: str) -> None:
    (hint,) = find(loader()).hints
    assert (hint.kind, hint.stage, hint.line) == ("order", "load", "")
    assert hint.what.startswith(told) and "it is yours to set" in hint.what
    # What makes the workers of the one live, with the order kept, has no place in the other.
    assert ("`later` around the function" in hint.what) == told.startswith("the dataset")


@pytest.mark.parametrize(("cpus", "line"), [(2, "num_workers=1"), (8, "num_workers=4  # if the dataset gives each")])
def test_a_single_worker_needs_no_share_of_its_own(monkeypatch: pytest.MonkeyPatch, cpus: int, line: str) -> None:
    monkeypatch.setattr("intune_callbacks.pipelines.find.cpus_allowed", lambda: cpus)
    (hint,) = find(DataLoader(Stream())).hints
    assert hint.line.startswith(line) and ("share" in hint.line) == (cpus > 2)


@pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before")
def test_the_card_names_the_line_for_a_python_function_that_feeds_a_live_stage() -> None:
    """It said that more workers for the other one had brought nothing."""

    def load(number: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(slept, [number], tf.int64), [])

    def slept(number: Any) -> Any:
        time.sleep(0.003)
        return number

    tf_build.build()
    pace: dict[str, Any] = {"decide_every_s": 0.1, "decide_every_batches": 5, "warmup_batches": 2, "show_card": False}
    dataset = tf.data.Dataset.range(400).map(load).map(lambda one: one * 2, num_parallel_calls=2).batch(4)
    loader = live(dataset, mode="observe", **pace)
    for _ in loader:
        pass
    line = ".map(load, num_parallel_calls=tf.data.AUTOTUNE)  # if its results do not depend on the order"
    assert loader.close()["next"].splitlines()[-1] == line


def test_a_generator_in_python_is_a_source_that_makes_one_element_at_a_time() -> None:
    def rows() -> Any:
        yield from range(8)

    dataset = Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.int64))
    (hint,) = hints_of(DatasetGraph(dataset.map(lambda x: x + 1, num_parallel_calls=2).batch(2)))
    assert (hint.kind, hint.stage, hint.line) == ("serial", "from_generator", "")
    assert hint.what.startswith("from_generator runs a Python generator, which makes one element at a time; ")
    assert hints_of(DatasetGraph(dataset.cache().batch(2))) == ()  # it runs in the first epoch only
