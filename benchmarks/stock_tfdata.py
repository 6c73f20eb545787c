"""Before any resize a tf.data pipeline with our operations costs what the stock one costs: interleaved pairs.

``python -m benchmarks.stock_tfdata [--only NAME] [--pairs 9] [--seconds 0.7]`` prints, for each kind of pipeline, the
medians over the pairs of ours / stock: throughput (1.0 is as fast) and CPU per batch (1.0 is as cheap).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline
from intune_callbacks.types import Clock

__all__ = ["KINDS", "pair"]

AUTOTUNE = tf.data.AUTOTUNE
Dataset = tf.data.Dataset
COLUMNS = 20


def slices() -> Any:
    rows = np.arange(200_000 * 8, dtype=np.float32).reshape(200_000, 8)
    return Dataset.from_tensor_slices((rows, rows[:, 0])).shuffle(1000, seed=1).repeat().batch(256)


def presliced() -> Any:
    rows = np.zeros([2000, 128, 16], np.float32)
    return Dataset.from_tensor_slices(rows).repeat()


def scale(row: Any) -> Any:
    return tf.cast(row, tf.float32) / 255.0


def cached() -> Any:
    rows = Dataset.from_tensor_slices(np.zeros([20_000, 32], np.uint8)).cache()
    return rows.map(scale, num_parallel_calls=AUTOTUNE).repeat().batch(128)


def cheap_map() -> Any:
    return Dataset.range(10**9).map(lambda x: x * 2 + 1, num_parallel_calls=AUTOTUNE).batch(256)


def cheap_map_shuffled() -> Any:
    mapped = Dataset.range(10**9).map(lambda x: x * 2 + 1, num_parallel_calls=AUTOTUNE)
    return mapped.shuffle(1000, seed=1).batch(256).prefetch(AUTOTUNE)


def sequential_map() -> Any:
    return Dataset.range(10**9).map(lambda x: x * 2 + 1).batch(64).prefetch(2)


def files() -> list[str]:
    folder = Path(tempfile.gettempdir()) / "intune-stock-lines"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{k:02}.csv" for k in range(8)]
    for path in paths:
        if not path.exists():
            path.write_text("\n".join(",".join(str(i * j % 97) for j in range(COLUMNS)) for i in range(20_000)))
    return [str(path) for path in paths]


def parse(line: Any) -> Any:
    return tf.stack(tf.io.decode_csv(line, [0.0] * COLUMNS))


def lines() -> Any:
    read = (
        Dataset.from_tensor_slices(files())
        .repeat()
        .interleave(tf.data.TextLineDataset, cycle_length=4, num_parallel_calls=AUTOTUNE)
    )
    return read.map(parse, num_parallel_calls=AUTOTUNE).batch(128).prefetch(AUTOTUNE)


def fixed_lines() -> Any:
    read = (
        Dataset.from_tensor_slices(files())
        .repeat()
        .interleave(tf.data.TextLineDataset, cycle_length=8, num_parallel_calls=4)
    )
    return read.batch(256).map(lambda text: tf.strings.length(text), num_parallel_calls=4).prefetch(4)


def sequential_lines() -> Any:
    read = Dataset.from_tensor_slices(files()).repeat().interleave(tf.data.TextLineDataset, cycle_length=4)
    return read.batch(256).prefetch(1)


def python(x: Any) -> Any:
    return tf.numpy_function(lambda y: y + np.sqrt(np.float64(y)), [x], tf.float64)


def numpy_function() -> Any:
    numbers = Dataset.range(10**9).map(lambda x: tf.cast(x, tf.float64))
    return numbers.map(python, num_parallel_calls=4).batch(64).prefetch(2)


def heavy() -> Any:
    def work(x: Any) -> Any:
        return tf.reduce_sum(tf.sin(tf.fill([300, 300], tf.cast(x, tf.float32))))

    return Dataset.range(10**9).map(work, num_parallel_calls=AUTOTUNE).batch(16).prefetch(AUTOTUNE)


KINDS: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        *(slices, presliced, cached, cheap_map, cheap_map_shuffled, sequential_map),
        *(lines, fixed_lines, sequential_lines, numpy_function, heavy),
    )
}


def measure(dataset: Any, seconds: float) -> tuple[float, float]:
    """Return batches a second and CPU seconds a batch."""
    stream, batches = iter(dataset), 0
    until_s = time.perf_counter() + 0.3 * seconds
    while time.perf_counter() < until_s:
        next(stream)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin_s + seconds:
        for _ in range(5):
            next(stream)
        batches += 5
    return batches / (time.perf_counter() - begin_s), (time.process_time() - begin_cpu_s) / batches


def pair(kind: str, seconds: float, ours_first: bool) -> tuple[float, float, float]:
    """Return throughput and CPU of ours / stock, and stock's CPU per batch."""
    found: dict[bool, tuple[float, float]] = {}
    for ours in (ours_first, not ours_first):
        pipeline = DatasetPipeline(KINDS[kind](), clock=Clock()) if ours else None
        found[ours] = measure(pipeline.dataset if pipeline else KINDS[kind](), seconds)
        gc.collect()
        if pipeline:
            pipeline.close()
    return found[True][0] / found[False][0], found[True][1] / found[False][1], found[False][1]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.7)
    given = parser.parse_args(argv)
    print(f"{'kind':20} {'speed':>6} {'CPU':>6}  stock CPU/batch")
    for kind in [given.only] if given.only else KINDS:
        pairs = [pair(kind, given.seconds, bool(k % 2)) for k in range(given.pairs)]
        speed, cpu, stock = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"{kind:20} {speed:6.2f} {cpu:6.2f}  {1e6 * stock:8.0f} us", flush=True)


if __name__ == "__main__":
    main()
