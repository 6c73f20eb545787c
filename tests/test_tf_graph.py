"""A dataset taken apart and put together again: stages found and named, numbers edited, the output what it was."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")
from tensorflow.python.data.ops import debug_mode  # noqa: E402

from benchmarks.tfdata_kinds import (  # noqa: E402
    FILES,
    KINDS,
    LENGTHS,
    OFFSET,
    WORDS,
    elements,
    parse,
    python,
    rows,
    ten,
)
from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.tf import build as tf_build  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.graph import CannotRewrite, DatasetGraph  # noqa: E402
from intune_callbacks.pipelines.tf.objects import made  # noqa: E402
from intune_callbacks.pipelines.tf.rewrite import rewrite  # noqa: E402

EPOCHS = 2
pytestmark = pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before")


@pytest.fixture(autouse=True, scope="module")
def _operations() -> None:
    tf_native.load()


def names(dataset, **options):
    return [stage.name for stage in rewrite(dataset, "key", **{"live": True, **options}).stages]


def dataset_of(found):
    """Return a dataset made from an edited graph."""
    return made(found.graph.maker(), found.graph.dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_edited_graph_delivers_what_the_dataset_does(kind: str) -> None:
    stock, found = KINDS[kind](), rewrite(KINDS[kind](), "key", live=True)
    built = dataset_of(found)
    assert built.element_spec == stock.element_spec
    assert int(built.cardinality()) == int(stock.cardinality())
    expected = [elements(stock) for _ in range(EPOCHS)]
    assert [elements(built) for _ in range(EPOCHS)] == expected


class Twice:
    def __call__(self, x):
        return 2 * x

    def method(self, x):
        return 3 * x


def add(x, k):
    return x + k


def test_stages_have_the_names_of_the_users_functions() -> None:
    dataset = rows(20).interleave(ten, cycle_length=4, num_parallel_calls=2)
    for function in (parse, parse, lambda x: x + 1, Twice(), Twice().method, functools.partial(add, k=1)):
        dataset = dataset.map(function, num_parallel_calls=2)
    dataset = dataset.batch(2, num_parallel_calls=2).prefetch(1).prefetch(tf.data.AUTOTUNE)
    assert names(dataset) == [
        *("ten", "parse", "parse#2", "map", "Twice", "method", "add", "batch", "prefetch", "prefetch#2")
    ]


def test_autotune_stays_as_long_as_tf_data_may_choose() -> None:
    dataset = rows().map(parse, num_parallel_calls=tf.data.AUTOTUNE).batch(2).prefetch(tf.data.AUTOTUNE)
    (parsed, prefetch) = rewrite(dataset, "key", live=True, cpus=6).stages
    assert (parsed.workers, parsed.value, prefetch.value) == (6, -1, 1)
    (parsed, prefetch) = rewrite(dataset, "key", live=False).stages
    assert (parsed.value, prefetch.value) == (-1, -1)
    options = tf.data.Options()
    options.autotune.enabled = False
    (parsed, prefetch) = rewrite(dataset.with_options(options), "key", live=True, cpus=6).stages
    assert (parsed.value, prefetch.value) == (6, 1)


def test_interleave_takes_no_more_than_its_cycle_length() -> None:
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = rows(9).interleave(ten, cycle_length=3, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)
    (interleave, _) = rewrite(dataset.with_options(options), "key", live=True, cpus=16).stages
    assert (interleave.value, interleave.high) == (3, 3)


def test_sequential_map_is_made_parallel_only_without_state_and_with_leave() -> None:
    assert names(rows().map(parse).prefetch(1)) == ["parse", "prefetch"]
    counter = tf.Variable(0, dtype=tf.int64)
    for function in (python, lambda x: counter.assign_add(x), lambda x: x + tf.random.uniform([], 0, 2, tf.int64)):
        found = rewrite(rows().map(function).prefetch(1), "key", live=True)
        assert [stage.name for stage in found.stages] == ["prefetch"]
        assert "num_parallel_calls=tf.data.AUTOTUNE" in found.notes[0]
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False
    assert names(rows().map(parse).prefetch(1).with_options(options)) == ["prefetch"]
    # What is only watched is made parallel by TensorFlow itself.
    assert names(rows().map(parse).prefetch(1), live=False) == ["parse", "prefetch"]


def test_one_call_at_a_time_stays_one_where_more_would_change_the_results() -> None:
    counter = tf.Variable(0, dtype=tf.int64)
    for function in (lambda x: counter.assign_add(x), lambda x: x + tf.random.uniform([], 0, 2, tf.int64, seed=1)):
        for is_live in (True, False):
            found = rewrite(rows().map(function, num_parallel_calls=1).shuffle(3).prefetch(1), "key", live=is_live)
            assert [stage.name for stage in found.stages] == ["prefetch"]
            assert "num_parallel_calls=1 and stays so" in found.notes[0]
        assert names(rows().map(function, num_parallel_calls=1).batch(2)) == []  # one node in TensorFlow's graph, too
        assert names(rows().map(function, num_parallel_calls=2).prefetch(1)) == ["map", "prefetch"]
    reading = (python, lambda x: x + OFFSET, lambda x: WORDS.lookup(x))
    assert all(len(names(rows().map(function, num_parallel_calls=1).prefetch(1))) == 2 for function in reading)


def test_a_file_of_rows_that_is_read_alone_keeps_its_reader(tmp_path: Path) -> None:
    """`make_csv_dataset` gives single rows, and has no second file to read: there a look at each row only costs."""
    (tmp_path / "rows.csv").write_text("a,b\n" + "".join(f"{row},{row}\n" for row in range(40)))
    stock = tf.data.experimental.make_csv_dataset(str(tmp_path / "rows.csv"), 4, num_epochs=1, shuffle=False)
    found = rewrite(stock, "key", live=True)
    assert "interleave" not in [stage.kind for stage in found.stages] and not found.notes
    given, expected = ([batch["a"].numpy().tolist() for batch in one] for one in (dataset_of(found), stock))
    assert given == expected and len(given) == 10


def test_parallel_reads_become_an_interleave_in_the_same_order() -> None:
    for cycle in (2, 3, 5, 8):
        stock = tf.data.TFRecordDataset(FILES, num_parallel_reads=cycle)
        found = rewrite(stock, "key", live=True)
        assert found.stages[0].kind == "interleave" and found.stages[0].high == cycle
        assert elements(dataset_of(found)) == elements(stock)
    assert len(elements(stock)) == sum(LENGTHS)


def test_legacy_interleave_of_longer_blocks_stays_and_is_named() -> None:
    def read(path):
        return tf.data.TFRecordDataset(path)

    legacy = tf.data.experimental.parallel_interleave(read, cycle_length=3, block_length=2)
    found = rewrite(tf.data.Dataset.list_files(FILES, shuffle=False).apply(legacy).prefetch(1), "key", live=True)
    assert [stage.kind for stage in found.stages] == ["prefetch"]
    assert "interleave(read)" in found.notes[0]


def test_stages_inside_a_function_are_reported() -> None:
    """Only the notes said so, which no card shows where there is a stage, if but the prefetch that tf.data adds."""
    (hint,) = rewrite(KINDS["flat_map"](), "key", live=True).hints
    assert hint.what.startswith("what is inside the function of FlatMap (map) begins anew") and hint.kind == "serial"


def test_variables_are_shared_not_copied() -> None:
    built = dataset_of(rewrite(KINDS["variable and table"](), "key", live=True))
    before = elements(built)
    try:
        OFFSET.assign(4)
        after = elements(built)
    finally:
        OFFSET.assign(3)
    assert after != before
    assert after == [[value + 7 for value in batch] for batch in before]


@pytest.mark.parametrize("how", ["snapshot", "load"])
def test_the_reader_of_a_snapshot_sees_what_the_training_assigns(how: str, tmp_path) -> None:
    offset, table = tf.Variable(3, dtype=tf.int64), tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def read(files):
        return files.interleave(lambda x: x, cycle_length=1).map(lambda x: x + offset + table.lookup(x))

    source, path = tf.data.Dataset.range(8), str(tmp_path / how)
    if how == "load":
        source.save(path)
        dataset = tf.data.Dataset.load(path, reader_func=read)
    else:
        dataset = source.snapshot(path, shard_func=lambda x: 0 * (x + offset), reader_func=read)
        elements(dataset)  # which writes it
    built = dataset_of(rewrite(dataset.batch(4), "key", live=True))
    assert elements(built) == [[3, 4, 5, 6], [7, 8, 9, 10]]
    offset.assign(10)
    table.insert(tf.constant([7], tf.int64), tf.constant([100], tf.int64))
    assert elements(built) == [[10, 11, 12, 13], [14, 15, 16, 117]]


def test_what_a_data_service_sends_is_unpacked_out_of_the_users_reach() -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    dataset = rows(20).apply(service.distribute("distributed_epoch", dispatcher.target)).batch(4)
    unpack = rewrite(dataset, "key", live=True).stages[0]
    assert (unpack.kind, unpack.knob()) == ("map", "# inside tf.data.experimental.service")


def test_shuffle_goes_on_with_the_users_seeds() -> None:
    def build():
        return rows().shuffle(20, seed=5).map(parse, num_parallel_calls=2).batch(4)

    untouched = build()
    expected = [elements(untouched) for _ in range(3)]
    dataset = build()
    assert elements(dataset) == expected[0]
    built = dataset_of(rewrite(dataset, "key", live=True))
    assert [elements(built) for _ in range(2)] == expected[1:]


def test_dataset_of_a_graph_is_refused() -> None:
    @tf.function
    def inside():
        with pytest.raises(CannotRewrite, match=r"tf\.function"):
            DatasetGraph(tf.data.Dataset.range(3))
        return 0

    inside()


def test_what_cannot_be_written_down_is_told_in_words() -> None:
    dataset = tf.data.Dataset.range(6).map(lambda x: x + 1, num_parallel_calls=2)
    with pytest.raises(CannotRewrite) as told:
        DatasetGraph(dataset.apply(tf.data.experimental.copy_to_device("/cpu:0")))
    why = str(told.value)
    assert why.startswith("the pipeline is only timed: ") and "GeneratorDataset" in why
    assert "{{" not in why and "[Op" not in why and "name:" not in why and why == why.strip()


def test_debug_mode_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    tf.data.experimental.enable_debug_mode()
    try:
        dataset = KINDS["map"]()
        with live(dataset, show_card=False) as loader:
            assert elements(loader) == elements(dataset)
        assert "debug_mode" in str(loader.close()) and not caplog.messages
    finally:
        debug_mode.toggle_debug_mode(False)


def test_dataset_is_not_changed() -> None:
    dataset = KINDS["map+batch"]()
    before = [node.op for node in DatasetGraph(dataset).nodes()]
    dataset_of(rewrite(dataset, "key", live=True))
    assert [node.op for node in DatasetGraph(dataset).nodes()] == before


def test_notes_speak_of_what_the_user_wrote_and_say_it_once(tmp_path) -> None:
    saved = str(tmp_path / "saved")
    rows(20).save(saved)
    assert rewrite(tf.data.Dataset.load(saved).map(parse, 2), "key", live=True).notes == ()
    assert rewrite(rows(20).snapshot(str(tmp_path / "snapshot")).map(parse, 2), "key", live=True).notes == ()
    stateful = rows(20).map(python).batch(2).map(python)
    (note,) = rewrite(stateful, "key", live=True).notes
    assert "map(python)" in note
