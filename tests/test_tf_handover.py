"""Without a compiler an iterator's state is handed on: the order stays, and where it might not, nothing is tried."""

from __future__ import annotations

import random
import threading
import time
import weakref

import pytest
from busy_machine import three_attempts

tf = pytest.importorskip("tensorflow")

from benchmarks.tfdata_kinds import KINDS, elements, parse, plain, rows  # noqa: E402
from intune_callbacks.errors import InTuneError  # noqa: E402
from intune_callbacks.pipelines import tf_handover, tfdata  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

EPOCH_ONLY = {"from_generator": "from_generator", "sampled": "RandomDataset"}


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise InTuneError("g++ was not found")

    monkeypatch.setattr(tfdata, "load", load)
    monkeypatch.setattr(tf_handover, "LEAST_PERIOD_S", 0.0)
    monkeypatch.setattr(tf_handover, "PERIODS_OF_COST", 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_handed_on_exactly(kind: str) -> None:
    stock = KINDS[kind]()
    expected = [elements(stock) for _ in range(2)]
    found, generator = find(KINDS[kind]()), random.Random(3)
    pipeline = found.pipeline
    assert pipeline is not None and "g++ was not found" in found.why
    if kind in EPOCH_ONLY:
        assert EPOCH_ONLY[kind] in found.why and "next epoch" in found.why
    for epoch in expected:
        delivered = []
        for number, element in enumerate(pipeline.dataset):
            delivered.append(plain(element))
            if number % 12 == 2:
                pipeline.resize({s.name: generator.randint(1, min(s.high, 8)) for s in pipeline.stages()})
        assert delivered == epoch
    assert pipeline.stats().delivered == pipeline.waits().delivered == sum(map(len, expected))


def test_shuffle_keeps_its_seeds_wherever_the_hand_over_comes() -> None:
    def build():
        return rows(120).shuffle(20, seed=5).map(parse, num_parallel_calls=2).batch(4).prefetch(2)

    stock = build()
    expected = [elements(stock) for _ in range(3)]
    handed = []
    for at in (1, 10, 27, 29):
        pipeline, delivered = find(build()).pipeline, []
        for epoch in range(3):
            delivered.append([])
            for number, element in enumerate(pipeline.dataset):
                delivered[-1].append(plain(element))
                if number == at and epoch < 2:
                    handed.append(pipeline.resize({"parse": 3 + epoch})["parse"] == 3 + epoch)
        assert delivered == expected
    assert any(handed) and not all(handed)  # at the end of an epoch the shuffle is used up: it has to wait


def test_change_acts_on_the_running_iterator() -> None:
    lock, inside, most = threading.Lock(), [], []

    def body(x):
        with lock:
            inside.append(x)
            most.append(len(inside))
        time.sleep(0.005)
        with lock:
            inside.remove(x)
        return x

    def slow(x):
        return tf.ensure_shape(tf.numpy_function(body, [x], tf.int64), [])

    options = tf.data.Options()
    options.threading.private_threadpool_size = 8
    pipeline = find(rows(120).map(slow, num_parallel_calls=1).with_options(options)).pipeline
    stream = iter(pipeline.dataset)
    delivered = []
    for workers in (1, 4, 2):
        assert pipeline.resize({"slow": workers})["slow"] == workers
        delivered += [int(next(stream)) for _ in range(10)]
        most.clear()
        delivered += [int(next(stream)) for _ in range(20)]
        assert max(most) == workers
    assert delivered + [int(x) for x in stream] == list(range(120))


def test_the_training_does_not_wait_for_the_end_of_a_replaced_iterator() -> None:
    pipeline = find(rows(300).map(parse, num_parallel_calls=1)).pipeline
    stream, let_go, done = iter(pipeline.dataset), [], threading.Event()

    def gone() -> None:
        let_go.append(threading.current_thread().name)
        done.set()

    next(stream)
    for workers in (3, 2):
        done.clear()
        weakref.finalize(stream._iterator_resource, gone)
        assert pipeline.resize({"parse": workers})["parse"] == workers
        assert done.wait(60.0)
    assert let_go == ["intune-let-go"] * 2
    assert sum(1 for _ in stream) == 299


def test_hand_overs_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_handover, "LEAST_PERIOD_S", 60.0)
    pipeline = find(rows(300).map(parse, num_parallel_calls=1)).pipeline
    stream = iter(pipeline.dataset)
    next(stream)
    assert {s.when for s in pipeline.stages()} == {"now"}
    assert pipeline.resize({"parse": 4})["parse"] == 4
    assert {s.when for s in pipeline.stages()} == {"epoch"}
    assert pipeline.resize({"parse": 2})["parse"] == 4
    assert sum(1 for _ in stream) == 299


def test_large_shuffle_changes_with_the_epoch() -> None:
    dataset = rows(40).shuffle(20_000, seed=1).map(parse, num_parallel_calls=2)
    found, stock = find(dataset), rows(40).shuffle(20_000, seed=1).map(parse, num_parallel_calls=2)
    assert "shuffle(20000)" in found.why
    first = []
    for element in found.pipeline.dataset:
        first.append(plain(element))
        assert found.pipeline.resize({"parse": 5})["parse"] == 5
    assert first == elements(stock)
    assert elements(found.pipeline.dataset) == elements(stock)


def test_buffers_of_many_bytes_are_not_copied_to_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_handover, "LARGEST_BYTES", 4 << 20)
    large = tf.data.Dataset.range(1000).map(lambda x: tf.fill([1 << 18], x), num_parallel_calls=2).shuffle(20, seed=1)
    pipeline = find(large).pipeline
    assert pipeline is not None
    iterator = iter(pipeline.dataset)
    for _ in range(20):
        next(iterator)
    before = {stage.name: stage.current for stage in pipeline.stages() if stage.unit == "workers"}
    applied = pipeline.resize(dict.fromkeys(before, 4))
    assert {name: applied[name] for name in before} == before
    assert "too much to save" in pipeline._handover._blocked
    assert {stage.when for stage in pipeline.stages()} == {"epoch"}
    next(iterator)


@three_attempts
def test_waits_and_work_are_measured_without_our_operations() -> None:
    def slow(x):
        def body(value):
            time.sleep(0.01)
            return value

        return tf.ensure_shape(tf.numpy_function(body, [x], tf.int64), [])

    pipeline = find(rows(30).map(slow, num_parallel_calls=1)).pipeline
    for number, _ in enumerate(pipeline.dataset):
        if number == 10:
            before = pipeline.stats()
        if number == 25:
            after = pipeline.stats()
    assert pipeline.waits().wait_s > 0.2
    done = after.stages["slow"].items - before.stages["slow"].items
    assert done == pytest.approx(15, abs=3)
    assert (after.stages["slow"].busy_s - before.stages["slow"].busy_s) / done == pytest.approx(0.01, rel=0.5)


def test_watching_without_a_compiler_leaves_the_dataset_alone() -> None:
    dataset = rows().map(parse, num_parallel_calls=2)
    found = find(dataset, live=False)
    assert found.pipeline is None and "not watched" in found.why
