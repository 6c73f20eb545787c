"""Loops of the user's own over `tf.data`: `live(dataset)` is iterated, compiled and saved as the dataset itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from restless import Restless  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.tf import build as tf_build  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.session.samples import Samples  # noqa: E402

pytestmark = pytest.mark.skipif(not tf_build.available(), reason="no C++ compiler, and nothing compiled before")
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2, "show_card": False}


@pytest.fixture(autouse=True)
def _resized_all_the_time(restless: type[Restless]) -> None:
    tf_native.load()


def rows(reshuffle: bool = True) -> Any:
    shuffled = tf.data.Dataset.range(60).shuffle(16, seed=3, reshuffle_each_iteration=reshuffle)
    return shuffled.map(lambda x: x * 2, num_parallel_calls=2).batch(4).repeat()


def first(batch: Any) -> list[int]:
    return batch.numpy().tolist()  # type: ignore[no-any-return]


def test_an_iterator_is_saved_and_goes_on_from_there_as_the_stock_one(tmp_path: Path) -> None:
    def run(dataset: Any, name: str) -> list[list[int]]:
        iterator = iter(dataset)
        seen = [first(next(iterator)) for _ in range(7)]
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / name))
        seen += [first(next(iterator)) for _ in range(3)]
        iterator = iter(dataset)
        tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()
        return seen + [first(next(iterator)) for _ in range(20)]

    assert run(live(rows(), **EAGER), "live") == run(rows(), "stock")
    assert Restless.resizes


def test_a_compiled_step_is_traced_once_and_its_steps_are_counted_and_tuned() -> None:
    def run(dataset: Any) -> tuple[list[list[int]], int]:
        traced: list[int] = []

        @tf.function
        def step(iterator: Any) -> Any:
            traced.append(1)
            return next(iterator)

        seen = []
        for _ in range(3):  # an iterator for each epoch
            iterator = iter(dataset)
            seen += [first(step(iterator)) for _ in range(20)]
        return seen, len(traced)

    # Each epoch that begins draws seeds for the next one, also one begun ahead in an iterator that is left, which wider
    # windows do sooner.
    dataset = live(rows(reshuffle=False), **EAGER)
    assert run(dataset) == run(rows(reshuffle=False))
    report = dataset.close()
    assert report["whole"]["steps"] == 59 and report["whole"]["samples"] == 240  # the last step has no end
    assert report["frozen"] is None and Restless.resizes >= 20


def test_batches_are_counted_once_however_they_are_fetched() -> None:
    dataset = live(rows(), **EAGER)
    iterator = iter(dataset)
    step = tf.function(lambda it: next(it))
    seen = []
    for _ in range(5):
        seen += [first(next(iterator)), first(iterator.get_next()), first(step(iterator))]
    stock = iter(rows())
    assert seen == [first(next(stock)) for _ in range(15)]
    report = dataset.close()
    assert report["whole"]["steps"] == 14 and report["whole"]["samples"] == 60


def test_batches_in_numpy_are_tuned_and_counted_as_well() -> None:
    dataset = live(rows().take(30), **EAGER)
    given = [[batch.tolist() for batch in dataset.as_numpy_iterator()] for _ in range(2)]
    stock = rows().take(30)
    assert given == [[batch.tolist() for batch in stock.as_numpy_iterator()] for _ in range(2)]
    report = dataset.close()
    assert report["whole"]["steps"] == 60 and report["frozen"] is None and Restless.resizes >= 20


def test_random_numbers_drawn_in_turn_are_those_of_stock() -> None:
    def drawn(dataset: Any) -> Any:
        return dataset.map(lambda x: x + tf.random.uniform([4], 0, 1000, tf.int64, seed=1), num_parallel_calls=1)

    def run(make: Any) -> list[list[int]]:
        tf.random.set_seed(3)
        dataset = make(drawn(rows().take(30)).map(lambda x: x * 2, num_parallel_calls=2))
        return [first(batch) for _ in range(3) for batch in dataset]

    assert run(lambda dataset: live(dataset, **EAGER)) == run(lambda dataset: dataset)
    assert Restless.resizes >= 20


def test_an_epoch_ends_as_with_the_stock_iterator() -> None:
    dataset = live(rows().take(3), **EAGER)
    iterator = iter(dataset)
    assert len(list(iterator)) == 3 and list(iterator) == []
    with pytest.raises(tf.errors.OutOfRangeError):
        iter(live(rows().take(0), **EAGER)).get_next()
    assert isinstance(iterator, tf.data.Iterator)


def test_a_dataset_made_inside_a_compiled_function_is_left_alone_without_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inside: list[Any] = []

    @tf.function
    def epoch() -> Any:
        total = tf.constant(0, tf.int64)
        inside.append(live(rows().take(40), **EAGER | {"show_card": True}))
        for batch in inside[-1]:
            total += tf.reduce_sum(batch)
        return total

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert epoch() == sum(sum(first(batch)) for batch in rows().take(40))
    # AutoGraph marks its syntax trees in a way Python 3.13 deprecates.
    assert [told for warning in seen if "___pyct_anno" not in (told := str(warning.message))] == []
    inside[-1].close()
    words = " ".join(capsys.readouterr().out.split())
    assert "make it outside" in words and "step(iterator)" not in words  # no iterator comes out of there


def test_where_no_step_can_be_seen_the_card_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    @tf.function
    def epoch(dataset: Any) -> Any:
        total = tf.constant(0, tf.int64)
        for batch in dataset:
            total += tf.reduce_sum(batch)
        return total

    dataset = live(rows().take(40), **EAGER | {"show_card": True})
    assert epoch(dataset) == epoch(rows().take(40))
    dataset.close()
    words = " ".join(capsys.readouterr().out.split())
    assert "give it the iterator: step(iterator)" in words and "train longer" not in words


def test_a_strategy_that_was_given_the_dataset_is_named_where_no_step_can_be_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = live(rows().take(4), **EAGER | {"show_card": True})
    distributed = tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(dataset)
    assert [first(batch) for batch in distributed] == [first(batch) for batch in rows().take(4)]
    dataset.close()
    assert "live(...) around what the strategy made" in " ".join(capsys.readouterr().out.split())


def test_what_a_strategy_made_is_iterated_in_compiled_functions_too(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def run(made: Any) -> list[list[int]]:
        step = tf.function(lambda iterator: next(iterator) + 1)
        iterator = iter(made)
        return [first(step(iterator)) for _ in range(20)]

    tuned = live(strategy.experimental_distribute_dataset(rows()), **EAGER | {"show_card": True})
    assert run(tuned) == run(strategy.experimental_distribute_dataset(rows()))
    tuned.close()
    assert "give it the batch, step(next(iterator))" in " ".join(capsys.readouterr().out.split())
    stock = rows().take(3)
    watched = live(strategy.experimental_distribute_dataset(rows().take(3)), **EAGER)
    assert [first(batch) for _ in range(2) for batch in watched] == [first(batch) for _ in range(2) for batch in stock]
    assert watched.close()["whole"]["steps"] == 6


def test_a_keras_callback_says_of_what_is_live_that_it_is_tuned_already() -> None:
    keras = pytest.importorskip("keras")
    from intune_callbacks.keras import InTuneCallback

    dataset = tf.data.Dataset.range(8).map(lambda x: (tf.fill([4], tf.cast(x, tf.float32)), 0.0)).batch(4)
    model, callback = keras.Sequential([keras.layers.Dense(1)]), InTuneCallback(show_card=False)
    model.compile("sgd", "mse")
    model.fit(live(dataset, show_card=False), callbacks=[callback], shuffle=False, verbose=0)
    assert callback.report["pipeline"].startswith("live() tunes this loader already")


def test_the_samples_of_a_batch_that_a_strategy_has_spread_are_those_of_all_its_devices() -> None:
    per_replica = pytest.importorskip("tensorflow.python.distribute.values").PerReplica
    batches = [{"x": per_replica((tf.zeros([4, 2]), tf.zeros([rows, 2])))} for rows in (4, 4, 1)]
    samples = Samples()
    assert [samples.count(batch) for batch in batches] == [8, 8, 5]
