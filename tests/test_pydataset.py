"""The enqueuer that stands in the place of Keras's: the same batches in the same order, whatever the resizes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("keras")

import keras_runs as runs
from hypothesis import given, settings
from hypothesis import strategies as st
from keras_cases import exact
from processes import children
from pydataset_runs import Counting, Resizes, epochs, live_of, stock_of, takes_of

from intune_callbacks.pipelines.check import check_pipeline
from intune_callbacks.pipelines.pydataset.enqueuer import InLoop
from intune_callbacks.pipelines.pydataset.pydataset import PyDatasetPipeline
from intune_callbacks.pipelines.workers.line import Hold
from intune_callbacks.types import Clock


@settings(max_examples=15)
@given(
    batches=st.integers(1, 12),
    places=st.integers(1, 5),
    share=st.floats(0.0, 1.0),
    shuffle=st.booleans(),
    is_endless=st.booleans(),
    seed=st.integers(0, 99),
)
def test_epochs_that_end_early_go_on_as_with_keras(
    batches: int, places: int, share: float, shuffle: bool, is_endless: bool, seed: int
) -> None:
    steps = 1 + round(share * (batches - 1))
    many = None if is_endless else batches
    takes = takes_of(steps, many)
    shuffle = shuffle and not is_endless
    random.seed(seed)
    stock = stock_of(Counting(many), places, shuffle)
    expected = epochs(stock, takes)
    state = random.getstate()
    random.seed(seed)
    base = stock_of(Counting(many), places, shuffle)
    pipeline, ours = live_of(base, steps)
    assert epochs(ours, takes, Resizes(pipeline, seed)) == expected
    assert random.getstate() == state
    assert sorted(base.py_dataset.asked) == sorted(stock.py_dataset.asked)
    left = [enqueuer.ready_queue.queue for enqueuer in (stock, base)]
    assert list(left[1]) == list(left[0])
    assert not threads_of_ours()


def test_a_wide_window_asks_for_nothing_beyond_what_keras_asks_for() -> None:
    asked = []
    for is_ours in (False, True):
        stock = stock_of(Counting(8), 1)
        pipeline, ours = live_of(stock, 3)
        pipeline.resize({"load.window": 12})
        epochs(ours if is_ours else stock, takes_of(3, 8, many=7))
        asked.append(sorted(stock.py_dataset.asked))
    assert asked[0] == asked[1]


def test_without_an_end_no_number_is_lost_whatever_was_made_ahead() -> None:
    pipeline, ours = live_of(stock_of(Counting(None), 1), None)
    pipeline.resize({"load.window": 12})
    assert [batch[0] for batch in epochs(ours, [3, 3, 40, 2])] == list(range(48))


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_queue_without_a_limit(is_endless: bool) -> None:
    pipeline, ours = live_of(stock_of(Counting(None if is_endless else 6), 0), None if is_endless else 2)
    seen = [batch[0] for batch in epochs(ours, [2, 2, 2])]
    assert seen == [0, 1, 2, 3, 4, 5], "all that was sent comes before the numbers begin anew"
    pipeline.close()


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "intune-load"]


def test_what_keras_had_sent_before_comes_first() -> None:
    stock = stock_of(Counting(20), 3)
    stock.start()
    batches = stock.get()
    next(batches)
    runs.settled(stock)
    stock.stop()
    batches.close()
    pipeline, ours = live_of(stock, 20)
    kept = [batch[0] for batch in stock.ready_queue.queue]
    assert len(kept) == 4
    assert [batch[0] for batch in epochs(ours, [20])] == [*kept, *range(16)]
    assert [batch[0] for batch in stock.ready_queue.queue] == [16, 17, 18, 19]
    pipeline.close()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_contract_of_a_pipeline(kind: str) -> None:
    def build() -> tuple[Any, Iterator[Any]]:
        pipeline, ours = live_of(stock_of(Counting(60), 4), 60, kind)
        ours.start()
        batches = ours.get()
        return pipeline, (next(batches) for _ in range(60))

    check_pipeline(build, [Counting(60)[number] for number in range(60)], resizes=30, resize_limit_s=20.0)
    assert not threads_of_ours() and not children()


def test_it_says_that_workers_which_were_asked_for_are_still_to_come() -> None:
    pipeline, ours = live_of(stock_of(Counting(None), 4), None, "process")
    ours.start()
    batches = ours.get()
    next(batches)
    pipeline.resize({"load": 6})
    assert pipeline.is_growing
    until_s = time.monotonic() + 60.0
    while pipeline.is_growing and time.monotonic() < until_s:
        next(batches)
    assert not pipeline.is_growing and children() >= 6
    pipeline.close()


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("steps", [None, 7])
def test_a_dataset_without_workers_of_its_own(kind: str, steps: int | None) -> None:
    dataset = Counting(30)
    pipeline = PyDatasetPipeline(dataset, workers=0, window=1, kind=kind, clock=Clock())
    random.seed(3)
    batches = InLoop(dataset, True, pipeline, steps).get()
    random.seed(4)  # the order is drawn with the first batch, as Keras does
    order = list(range(30))
    random.Random(4).shuffle(order)
    seen, resizes = [], Resizes(pipeline, 1)
    for batch in batches:
        seen.append(batch[0])
        if kind == "thread" and steps is not None and len(seen) % steps == 0:
            assert len(dataset.asked) == len(seen), "nothing of the next epoch is made before it begins"
        resizes()
    assert seen == order
    assert pipeline.stages()[0].low == 0
    assert not threads_of_ours() and not children()


def test_a_dataset_without_workers_computes_in_the_loop_at_first() -> None:
    makers = []

    class Told(Counting):
        def __getitem__(self, number: int) -> Any:
            makers.append(threading.current_thread())
            return super().__getitem__(number)

    dataset = Told(10)
    pipeline = PyDatasetPipeline(dataset, workers=0, window=1, kind="thread", clock=Clock())
    batches = InLoop(dataset, False, pipeline, None).get()
    next(batches)
    assert dataset.asked == [0] and makers == [threading.current_thread()]
    batches.close()


@pytest.mark.parametrize("makes", [stock_of, lambda *given: live_of(stock_of(*given), 20)[1]])
def test_an_error_of_the_dataset_ends_the_epoch_at_its_place(makes: Any) -> None:
    enqueuer = makes(Counting(20, breaks_at=5), 3)
    enqueuer.start()
    batches = enqueuer.get()
    assert [next(batches)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="5"):
        next(batches)
    assert not enqueuer.is_running()
    enqueuer.start()
    again = enqueuer.get()
    assert next(again)[0] == 6, "what was on its way is kept"
    with contextlib.suppress(KeyError):
        enqueuer.stop()
    assert not threads_of_ours()


@pytest.mark.parametrize("makes", [stock_of, lambda *given: live_of(stock_of(*given), 20)[1]])
def test_a_batch_that_is_none_is_left_out(makes: Any) -> None:
    enqueuer = makes(Counting(20, none_at=2), 3)
    enqueuer.start()
    batches = enqueuer.get()
    assert [next(batches)[0] for _ in range(19)] == [0, 1, *range(3, 20)]
    enqueuer.stop()
    with pytest.raises(ValueError, match="after `on_epoch_end`"):
        next(batches)


def test_without_a_thread_to_be_had_keras_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stock_of(Counting(12), 3)
    pipeline, ours = live_of(stock, 12)

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_engine", refuses)
        first = epochs(ours, [12])
    assert [batch[0] for batch in first] == list(range(12))
    assert "can't start new thread" in pipeline.why_not
    assert [batch[0] for batch in epochs(ours, [12])] == list(range(12))
    assert pipeline.delivered == 24


def test_no_child_starts_once_the_dataset_was_changed() -> None:
    dataset = Counting(40)
    pipeline, ours = live_of(stock_of(dataset, 3), 40, "process")
    ours.start()
    batches = ours.get()
    assert next(batches)[0] == 0
    dataset.none_at = 1_000
    pipeline.resize({"load": 5})
    assert [next(batches)[0] for _ in range(39)] == list(range(1, 40))
    assert "changed the dataset" in pipeline.why_not and pipeline.workers == 2
    assert [(hint.kind, hint.stage) for hint in pipeline.late_hints] == [("order", "load")]
    ours.stop()
    pipeline.resize({"load": 3})
    ours.start()
    assert next(batches)[0] == 0
    assert pipeline.why_not == ""
    pipeline.close()
    assert not children()


def test_processes_know_what_the_dataset_sets_as_an_epoch_begins() -> None:
    dataset = Counting(12)
    pipeline, ours = live_of(stock_of(dataset, 3), 12, "process")
    pipeline.resize({"load": 3})
    batches = ours.get()
    with contextlib.closing(pipeline):
        for left_out in (1, 4):
            ours.start()
            time.sleep(0.3)  # whoever is not waited for would have started by now
            dataset.none_at = left_out  # as Keras's `on_epoch_begin`, which it calls behind `start`
            assert [next(batches)[0] for _ in range(11)] == [number for number in range(12) if number != left_out]
            assert pipeline.why_not == "", "what is set before the workers start is no change behind their backs"
            ours.stop()


def test_random_numbers_in_processes_belong_to_the_batch() -> None:
    class Drawing(Counting):
        def __getitem__(self, number: int) -> Any:
            return number, random.random()

    def drawn(workers: int) -> list[Any]:
        random.seed(11)
        pipeline, ours = live_of(stock_of(Drawing(12), 3), 12, "process")
        pipeline.resize({"load": workers})
        state = random.getstate()
        seen = epochs(ours, [12, 12])
        assert random.getstate() == state
        return seen

    one, three = drawn(1), drawn(3)
    assert one == three
    assert len({value for _, value in one}) == 24


@pytest.mark.skipif(runs.keras.backend.backend() != "tensorflow", reason="others are in test_keras_backends")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_fit_is_as_it_was_and_its_workers_live() -> None:
    datasets: list[runs.Numbered] = []

    def make() -> runs.Numbered:
        datasets.append(runs.Numbered(workers=3))
        return datasets[-1]

    made = exact(make)
    for what in ("seen", "history", "weights", "random"):
        assert made["tuned"][what] == made["plain"][what], what
    assert made["frozen"] is None and made["resizes"] > 20
    assert {max(values) for key, values in made["tuned"]["logged"].items() if "workers" in key} != {3.0}
    assert sorted(datasets[0].asked) == sorted(datasets[1].asked)
    assert not threads_of_ours()


def test_in_any_order_a_slow_batch_holds_up_none_but_itself() -> None:
    class Slow(Counting):
        def __getitem__(self, number: int) -> Any:
            time.sleep(0.3 if number == 3 else 0.001)
            return number

    def run(in_order: bool) -> list[int]:
        pipeline = PyDatasetPipeline(Slow(30), workers=3, window=8, kind="thread", clock=Clock(), in_order=in_order)
        batches = list(pipeline.begin(lambda: iter(range(30)), Hold()))
        pipeline.close()
        return batches

    assert run(True) == list(range(30))
    free = run(False)
    assert sorted(free) == list(range(30)) and free.index(3) > 3
