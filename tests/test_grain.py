"""Grain: threads and buffer are live, elements, order and states are its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

grain = pytest.importorskip("grain", reason="tox run -e reach installs it")

import numpy as np  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.check import check_pipeline  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

QUICK: dict[str, Any] = {
    **{"decide_every_s": 0.15, "decide_every_batches": 3, "warmup_batches": 4},
    **{"cpus": 8.0, "trainer_cpus": 0.0, "show_card": False},
}


class Work:
    def __init__(self, seconds: float = 0.0, breaks_at: int = -1) -> None:
        self.seconds, self.breaks_at = seconds, breaks_at

    def __call__(self, i: int) -> Any:
        time.sleep(self.seconds)
        if i == self.breaks_at:
            raise KeyError(i)
        return np.array([i, i * i])


def read(rows: int = 160, threads: int = 1, buffer: int = 4, **work: Any) -> Any:
    mapped = grain.MapDataset.source(range(rows)).shuffle(seed=3).map(Work(**work))
    return mapped.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer))


def batches(iterable: Any) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in iterable]


def test_nothing_is_lost_repeated_or_reordered_whatever_is_asked_for() -> None:
    def build() -> Any:
        pipeline = find(read(300)).pipeline
        return pipeline, (int(row[0]) for row in pipeline.dataset)  # type: ignore[union-attr]

    check_pipeline(build, expected=[int(row[0]) for row in read(300)])


def test_a_loop_becomes_faster_and_sees_the_same() -> None:
    dataset = read(400, seconds=0.01).batch(8)
    expected = batches(read(400).batch(8))
    loader, begin_s = live(dataset, **QUICK), time.monotonic()
    seen = [batches(loader) for _ in range(2)]
    took_s, report = time.monotonic() - begin_s, loader.close()
    assert seen == [expected, expected]
    assert report["changes"] and report["frozen"] is None
    assert {stage["name"]: stage["current"] for stage in report["stages"]}["read"] > 4
    assert "are live" not in report["next"]
    assert took_s < 0.6 * 8.0
    assert report["whole"]["throughput_samples_per_s"] == pytest.approx(800 / took_s, rel=0.25)


def test_more_threads_take_what_the_old_ones_have_not_begun() -> None:
    pipeline: Any = find(read(100, threads=1, buffer=80, seconds=0.02)).pipeline
    iterator = iter(pipeline.dataset)
    seen = [int(next(iterator)[0])]
    pipeline.resize({"read": 16})
    begin_s = time.monotonic()
    seen += [int(row[0]) for row in iterator]
    assert time.monotonic() - begin_s < 0.5 * 99 * 0.02
    assert seen == [int(row[0]) for row in read(100)]


def test_a_state_is_exchanged_with_stock_iterators() -> None:
    pipeline: Any = find(read().batch(8)).pipeline
    iterator = iter(pipeline.dataset)
    for number in range(5):
        next(iterator)
        pipeline.resize({"read": 2 + number, "read.window": 3 + 5 * number})
    state = iterator.get_state()
    rest = batches(iterator)
    stock = iter(read().batch(8))
    stock.set_state(state)
    assert batches(stock) == rest
    again = iter(pipeline.dataset)
    again.set_state(state)
    assert batches(again) == rest


@pytest.mark.parametrize("mode", ["off", "observe", "tune"])
def test_grains_checkpoint_of_a_loop_goes_on_where_it_was(mode: str, tmp_path: Path) -> None:
    loader, handler = live(read().batch(8), mode=mode, show_card=False), grain.checkpoint.CheckpointHandler()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    handler.save(tmp_path, item=iterator)
    rest = batches(iterator)
    assert batches(handler.restore(tmp_path, item=iter(loader))) == rest
    assert batches(handler.restore(tmp_path, item=iter(read().batch(8)))) == rest
    again = iter(loader)
    grain.experimental.set_next_index(again, 5)
    assert grain.experimental.get_next_index(again) == 5
    assert batches(again) == rest
    loader.close()


class Counting(grain.IterDataset):
    """Of the user's own, as its iterator is."""

    def __iter__(self) -> Any:
        return CountingIterator(iter(self._parent))


class CountingIterator(grain.DatasetIterator):
    seen = 0

    def __next__(self) -> Any:
        self.seen += 1
        return next(self._parent)

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)


def test_an_iterator_of_the_users_own_is_one_and_can_what_it_can() -> None:
    iterator: Any = iter(live(Counting(read()), show_card=False))
    assert isinstance(iterator, CountingIterator) and isinstance(iterator, grain.DatasetIterator)
    assert not isinstance(iterator, Counting)
    next(iterator)
    assert iterator.seen == 1


def test_numbers_stay_for_the_next_epoch_and_go_with_us() -> None:
    pipeline: Any = find(read(threads=3, buffer=7)).pipeline
    assert pipeline.resize({"read": 5, "read.window": 9}) == {"read": 5, "read.window": 9}
    iterator = iter(pipeline.dataset)
    next(iterator)
    reader = iterator._reader
    assert (reader._target_num_threads, reader._target_prefetch_buffer_size) == (5, 9)
    pipeline.close()
    next(iterator)
    assert (reader._target_num_threads, reader._target_prefetch_buffer_size) == (3, 7)
    assert type(reader._map_parent).__module__.startswith("grain")
    assert len(list(iterator)) == 158
    assert [stage.current for stage in pipeline.stages()] == [5, 9]  # for the report


def test_an_error_of_a_transformation_is_the_users() -> None:
    def until(iterable: Any) -> list[int]:
        seen: list[int] = []
        iterator = iter(iterable)
        with pytest.raises(KeyError, match="7"):
            seen.extend(int(row[0]) for row in iterator)
        return seen

    pipeline: Any = find(read(breaks_at=7, threads=2)).pipeline
    pipeline.resize({"read": 4})
    assert until(pipeline.dataset) == until(read(breaks_at=7))


def test_where_no_more_threads_are_to_be_had_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [int(row[0]) for row in read()]
    pipeline: Any = find(read(threads=2)).pipeline
    iterator = iter(pipeline.dataset)
    seen = [int(next(iterator)[0]) for _ in range(4)]

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    pipeline.resize({"read": 9})
    seen += [int(row[0]) for row in iterator]
    assert seen == expected
    assert "can't start new thread" in pipeline.why_not
    assert {stage.name: stage.current for stage in pipeline.stages()} == {"read": 2, "read.window": 4}


def test_a_version_without_its_setters_is_left_as_it_is() -> None:
    pipeline: Any = find(read()).pipeline
    iterator = iter(pipeline.dataset)
    iterator._reader._set_num_threads = None
    pipeline.resize({"read": 5})
    assert len(list(iterator)) == 160
    assert "TypeError" in pipeline.why_not


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (
            lambda: read().mp_prefetch(grain.MultiprocessingOptions(2)),
            "workers of mp_prefetch and interleave are fixed",
        ),
        (
            lambda: grain.DataLoader(data_source=range(8), sampler=grain.samplers.SequentialSampler(8)),
            "build the pipeline from grain.MapDataset",
        ),
        (lambda: read(threads=0), "asks for no threads or no buffer"),
        (lambda: grain.IterDataset.mix([read(), read()], [0.5, 0.5]), "2 stages of this Grain pipeline read"),
    ],
)
def test_what_cannot_be_set_is_named(dataset: Any, why: str) -> None:
    found = find(dataset())
    assert found.pipeline is None and why in found.why


def test_a_map_dataset_is_read_as_it_would_read_itself() -> None:
    dataset = grain.MapDataset.source(range(40)).map(Work()).batch(4)
    pipeline: Any = find(dataset).pipeline
    assert {s.name: s.current for s in pipeline.stages()} == {"read": 16, "read.window": 500}
    random.seed(0)
    seen = []
    for batch in pipeline.dataset:
        seen.append(batch[:, 0].tolist())
        pipeline.resize({"read": random.randint(1, 20), "read.window": random.randint(1, 50)})
    assert seen == batches(dataset)


FIT = """
import sys, time
import grain, keras, numpy as np
from intune_callbacks.keras import InTuneCallback

def work(i):
    time.sleep(0.01)
    row = np.random.default_rng(i).random(5).astype("float32")
    return row[:4], row[4:]

def fit(mode):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    read = grain.MapDataset.source(range(320)).shuffle(seed=3).map(work)
    data = read.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)).batch(8)
    ours = InTuneCallback(mode=mode, decide_every_s=0.15, decide_every_batches=3, warmup_batches=4, cpus=8.0,
                          trainer_cpus=0.0, show_card=False)
    losses = model.fit(data, epochs=2, verbose=0, callbacks=[ours]).history["loss"]
    return losses, [w.tolist() for w in model.get_weights()], ours.report

stock, tuned = fit("off"), fit("tune")
assert stock[:2] == tuned[:2], (stock[0], tuned[0])
is_said = all(stage["current"] > stage["first"] for stage in tuned[2]["stages"][:1])
is_said = is_said and "are live" not in tuned[2]["next"]
print(tuned[2]["changes"], tuned[2]["frozen"], is_said, tuned[2]["pipeline"])
"""


@pytest.mark.parametrize(("backend", "changes"), [("jax", True), ("torch", True), ("tensorflow", False)])
def test_keras_trains_on_the_same(backend: str, changes: bool, tmp_path: Path) -> None:
    pytest.importorskip("keras")
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", FIT], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    many, frozen, is_said, why = done.stdout.strip().split(" ", 3)
    assert (many != "0", frozen, is_said) == (changes, "None", "True")
    assert ("TensorFlow backend" in why) != changes
