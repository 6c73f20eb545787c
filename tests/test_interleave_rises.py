"""An interleave whose files are all open gets more threads all the same: they were held back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from busy_machine import three_attempts

tf = pytest.importorskip("tensorflow")
from raises import steady  # noqa: E402
from sleeping_files import sleeping_files  # noqa: E402

from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402


@three_attempts
@pytest.mark.parametrize("warm", [False, True], ids=["", "warm start"])
def test_an_interleave_without_input(warm: bool, native: tf_native.Native) -> None:
    """Two threads and all files open: TensorFlow starts no third one. Ours were told of; with a warm start they are not
    there, and nobody says that they are before the next iterator."""
    dataset, rates = sleeping_files(16, 8, 2), []
    options = tf.data.Options()
    options.experimental_warm_start = warm
    pipeline = DatasetPipeline(dataset.with_options(options), clock=Clock())
    for _ in range(2):
        stream = iter(pipeline.dataset)
        for _ in range(20):
            next(stream)
        time.sleep(0.05)
        (stage,) = pipeline.resize({}) and pipeline.stages()[:1]
        before = steady(80, 40)(stream) if stage.current == 2 else 0.0
        raised = pipeline.resize({"read": 8})["read"]
        assert raised == pipeline.stages()[0].current == (stage.current if stage.when == "epoch" else 8)
        rates.append((stage.current, stage.when, before, steady(80, 40)(stream)))
    pipeline.close()
    (first, second) = rates
    assert (first[:2], second[:2]) == ((2, "epoch" if warm else "now"), (8, "now"))
    assert second[3] > 1.5 * first[2]
    assert warm or first[3] > 1.5 * first[2]


def test_an_interleave_whose_threads_have_not_begun_is_saved_and_goes(native: tf_native.Native, tmp_path: Path) -> None:
    """TensorFlow waits for all of its threads, also for those that we hold back: when it saves, and when it ends."""
    stock = [int(x) for x in sleeping_files(4, 4, 1).take(60)]
    pipeline = DatasetPipeline(sleeping_files(4, 4, 1), clock=Clock())
    stream = iter(pipeline.dataset)
    begun = [int(next(stream)) for _ in range(8)]
    path = tf.train.Checkpoint(it=stream).write(str(tmp_path / "state"))
    assert pipeline.resize({})["read"] == 1
    assert begun + [int(next(stream)) for _ in range(52)] == stock
    restored = iter(pipeline.dataset)
    tf.train.Checkpoint(it=restored).read(path).assert_consumed()
    assert [int(next(restored)) for _ in range(20)] == stock[8:28]
    ending = iter(pipeline.dataset)
    next(ending)
    del ending
    pipeline.close()
