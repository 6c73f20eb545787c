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
from raises import Rate, bursts, rises_again, steady

tf = pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")
tn = pytest.importorskip("torchdata.nodes")
from sleeping_files import sleeping_files  # noqa: E402
from tensorflow.python.data.experimental.ops import testing  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.tf import native as tf_native  # noqa: E402
from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline  # noqa: E402
from intune_callbacks.types import Clock  # noqa: E402

MANY = 10**6


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
