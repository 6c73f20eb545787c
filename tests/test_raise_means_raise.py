"""Each number of each adapter that is lowered on a running iterator is worth as much as before when it is raised."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from busy_machine import three_attempts
from raises import Rate, bursts, rises_again, steady

tf = pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")
tn = pytest.importorskip("torchdata.nodes")
from tensorflow.python.data.experimental.ops import testing  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402

MANY = 10**6


@pytest.fixture
def native() -> tf_native.Native:
    try:
        return tf_native.load()
    except Exception as error:
        pytest.skip(f"the operations cannot be compiled here: {error}")


def nap(x: Any) -> Any:
    time.sleep(0.005)
    return x


def python(x):
    return tf.ensure_shape(tf.numpy_function(nap, [x], tf.int64), [])


def busy(x):
    matrix = tf.fill([160, 160], tf.cast(x, tf.float32) * 1e-9)
    for _ in range(40):
        matrix = tf.sin(matrix)
    return tf.reduce_sum(matrix)


def rows() -> Any:
    return tf.data.Dataset.range(MANY)


def sleeping_rows() -> Any:
    return rows().apply(testing.sleep(5000))


def sleeping_files(files: int, cycle: int, workers: int) -> Any:
    """Files of a long interleave whose reads sleep in C++; with 16 of them all are open after a moment."""

    def read(number):
        return tf.data.Dataset.range(MANY // files).apply(testing.sleep(5000))

    return tf.data.Dataset.range(files).interleave(read, cycle_length=cycle, num_parallel_calls=workers)


def few_batches() -> Any:
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = True
    return rows().map(python, num_parallel_calls=2).batch(4).with_options(options)


TFDATA: dict[str, tuple[Any, str, int, int, Rate]] = {
    "interleave, lowered": (lambda: sleeping_files(16, 8, 8), "read", 8, 2, steady(160, 40)),
    "interleave, AUTOTUNE": (lambda: sleeping_files(16, 8, -1), "read", 8, 1, steady(120, 40)),
    "interleave, many files": (lambda: sleeping_files(MANY // 8, 8, 4), "read", 8, 2, steady(160, 40)),
    "map of Python": (lambda: rows().map(python, num_parallel_calls=4), "python", 8, 2, steady(120, 20)),
    "map of C++": (lambda: rows().map(busy, num_parallel_calls=2), "busy", 2, 1, steady(60, 8)),
    "map, AUTOTUNE": (lambda: rows().map(python, num_parallel_calls=-1), "python", 8, 2, steady(120, 20)),
    "map and batch": (few_batches, "python", 8, 2, steady(40, 8)),
    "window": (lambda: rows().map(python, num_parallel_calls=4), "python.window", 12, 1, bursts(12, 0.07)),
    "prefetch": (lambda: sleeping_rows().prefetch(12), "prefetch", 12, 1, bursts(12, 0.065)),
    "prefetch, AUTOTUNE": (lambda: sleeping_rows().prefetch(-1), "prefetch", 12, 1, bursts(12, 0.065)),
}


@pytest.mark.parametrize("kind", TFDATA)
def test_tfdata(kind: str, native: tf_native.Native) -> None:
    make, *rest = TFDATA[kind]

    def build() -> tuple[Any, Iterator[Any]]:
        pipeline = DatasetPipeline(make(), clock=Clock())
        return pipeline, iter(pipeline.dataset)

    rises_again(build, *rest)


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


def test_tfdata_parallel_batches(native: tf_native.Native) -> None:
    """Copies are short and memory is shared: the limit itself is seen to hold, and to be lifted."""
    dataset = rows().map(lambda x: tf.fill([2**16], x), num_parallel_calls=2).batch(8, num_parallel_calls=4)
    pipeline = DatasetPipeline(dataset, clock=Clock())
    stream = iter(pipeline.dataset)
    next(stream)
    for value in (6, 1, 6):
        pipeline.resize({"batch": value, "batch.window": value})
        next(stream)
        end_s = time.monotonic() + 10
        while (held := pipeline.stats().stages["batch"].queued) != value and time.monotonic() < end_s:
            next(stream) if held > value else time.sleep(0.02)
        assert held == value
        # 0 are TensorFlow's own threads, where the window allows no more at once than wanted anyway.
        assert tf_native.load().read(pipeline._key)[1]["batch"].limit in (
            value,
            0 if value <= pipeline._threads else value,
        )
    pipeline.close()


def mapper(workers: int) -> Any:
    source = tn.SamplerWrapper(SequentialSampler(range(MANY)))
    return tn.ParallelMapper(source, nap, num_workers=workers, method="thread")


def prefetched(depth: int) -> Any:
    source = tn.SamplerWrapper(SequentialSampler(range(MANY)))
    return tn.Prefetcher(tn.Mapper(source, nap), depth)


TORCHDATA: dict[str, tuple[Any, str, int, int, Rate]] = {
    "workers": (lambda: mapper(2), "nap", 8, 2, steady(160, 20)),
    "window": (lambda: mapper(12), "nap.window", 12, 1, bursts(12, 0.07)),
    "depth": (lambda: prefetched(12), "prefetch", 12, 1, bursts(12, 0.065)),
}


@pytest.mark.parametrize("kind", TORCHDATA)
def test_torchdata(kind: str) -> None:
    make, *rest = TORCHDATA[kind]

    def build() -> tuple[Any, Iterator[Any]]:
        loader = tn.Loader(make())
        pipeline = find(loader, workers_kind="process").pipeline
        assert pipeline is not None
        pipeline.prepare()
        return pipeline, iter(loader)

    rises_again(build, *rest)


class Naps(Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, i: int) -> int:
        return nap(i)


class NapStream(IterableDataset):
    def __iter__(self):
        yield from map(nap, range(4000))


LOADER: dict[str, tuple[Any, str, str, int, int, Rate]] = {
    "workers, threads": (Naps, "thread", "load", 8, 2, steady(240, 40)),
    "workers, processes": (Naps, "process", "load", 4, 1, steady(60, 10)),
    "window, processes": (Naps, "process", "load.window", 12, 1, bursts(12, 0.07)),
    "window, iterable": (NapStream, "process", "load.window", 12, 1, bursts(12, 0.07)),
}


@pytest.mark.parametrize("kind", LOADER)
def test_data_loader(kind: str) -> None:
    dataset, workers_kind, *rest = LOADER[kind]

    def build() -> tuple[Any, Iterator[Any]]:
        loader = DataLoader(dataset(), batch_size=1, num_workers=2)
        pipeline = find(loader, workers_kind=workers_kind).pipeline
        assert pipeline is not None
        return pipeline, pipeline.adopt(iter(loader))

    rises_again(build, *rest)


def test_an_iterator_ends_soon_while_its_readers_wait(native: tf_native.Native) -> None:
    pipeline = DatasetPipeline(sleeping_files(16, 16, 16).prefetch(2), clock=Clock())
    stream = iter(pipeline.dataset)
    next(stream)
    pipeline.resize({"read": 1})
    for _ in range(40):
        next(stream)
    begin_s = time.monotonic()
    del stream
    assert time.monotonic() - begin_s < 1.0
    pipeline.close()


SLOW_PREAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
static void nap(int fd) {
  char link[64], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return;
  path[n] = 0;
  struct timespec t = {0, 30000000};
  if (strstr(path, getenv("SLOW_DIR"))) nanosleep(&t, 0);
}
#define SLOW(name, off) \
  ssize_t name(int fd, void *b, size_t n, off o) { \
    ssize_t (*next)(int, void *, size_t, off) = dlsym(RTLD_NEXT, #name); \
    nap(fd); \
    return next(fd, b, n, o); \
  }
SLOW(pread, off_t)
SLOW(pread64, off64_t)
"""
CHILD = """
import glob, os, sys
import tensorflow as tf
from raises import rises_again, steady
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline
from intune_callbacks.types import Clock
paths = sorted(glob.glob(os.environ["SLOW_DIR"] + "/*.txt"))
def read(path):
    return tf.data.TextLineDataset(path, buffer_size=4096)
def build():
    lines = tf.data.Dataset.from_tensor_slices(paths).interleave(read, cycle_length=8, num_parallel_calls=8)
    pipeline = DatasetPipeline(lines.repeat().batch(32).prefetch(2), clock=Clock())
    return pipeline, iter(pipeline.dataset)
rises_again(build, "read", 8, 2, steady(80, 20))
print("rises", flush=True)
os._exit(0)
"""


def test_tfdata_reads_real_files(native: tf_native.Native, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the slow reads with")
    library, files = tmp_path / "slow.so", tmp_path / "lines"
    files.mkdir()
    (tmp_path / "slow.c").write_text(SLOW_PREAD)
    command = ["gcc", "-O2", "-shared", "-fPIC", str(tmp_path / "slow.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    for k in range(16):
        (files / f"{k:02}.txt").write_text("".join(f"{k} {i} {'x' * 100}\n" for i in range(8000)))
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "LD_PRELOAD": str(library),
        "SLOW_DIR": str(files),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "rises\n", done.stderr[-2000:]
