"""Criteo ingestion by TensorFlow, and row by row, as most people begin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dlrm_examples.criteo.tsv import CATEGORIES, DENSE

__all__ = [
    "TABLE_ROWS",
    "Arrays",
    "dataloader_rows",
    "files_dataset",
    "nodes_rows",
    "tf_best",
    "tf_pipeline",
    "tf_usual",
]

TABLE_ROWS = 100_000
READ_BYTES = 1 << 20
Arrays = tuple[Any, Any, Any]


def parse_line(line: bytes) -> tuple[float, list[float], list[int]]:
    """Parse one line as a first version of a dataset does."""
    fields = line.rstrip(b"\n").split(b"\t")
    dense = [math.log(max(int(field), 0) + 1) if field else 0.0 for field in fields[1 : 1 + DENSE]]
    return float(fields[0]), dense, [int(field, 16) % TABLE_ROWS if field else 0 for field in fields[1 + DENSE :]]


def _row_arrays(rows: Sequence[tuple[float, list[float], list[int]]]) -> Arrays:
    labels, dense, categories = zip(*rows, strict=True)
    return np.array(labels, np.float32), np.array(dense, np.float32), np.array(categories, np.int32)


def _torch_rows(rows: Sequence[Any]) -> Any:
    import torch

    return tuple(torch.from_numpy(array) for array in _row_arrays(rows))


def files_dataset(files: Sequence[str], items: Callable[[Sequence[str]], Iterator[Any]]) -> Any:
    """Return an IterableDataset of `items` of the files, which its workers share."""
    from torch.utils.data import IterableDataset, get_worker_info

    class Files(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            yield from items(files if worker is None else files[worker.id :: worker.num_workers])

    return Files()


def _parsed_lines(files: Sequence[str]) -> Iterator[Any]:
    for path in files:
        with open(path, "rb") as file:
            yield from map(parse_line, file)


def dataloader_rows(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """DataLoader over an IterableDataset that yields rows."""
    from torch.utils.data import DataLoader

    loader = DataLoader(files_dataset(files, _parsed_lines), batch_size, num_workers=threads, collate_fn=_torch_rows)
    for batch in loader:
        yield tuple(tensor.numpy() for tensor in batch)  # type: ignore[misc]


def nodes_rows(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """torchdata.nodes with a mapper over rows."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper

    lines = itertools.chain.from_iterable(open(path, "rb") for path in files)  # noqa: SIM115
    node: Any = ParallelMapper(IterableWrapper(lines), parse_line, num_workers=threads, method="thread")
    yield from Loader(Mapper(Batcher(node, batch_size, drop_last=False), _row_arrays))


def tf_pipeline(files: Sequence[str], batch_size: int, style: str, **options: Any) -> Iterator[Arrays]:
    """Run a pipeline of `dlrm_examples.criteo.pipeline_tf` with the options given."""
    from dlrm_examples.criteo.pipeline_tf import build
    from dlrm_examples.criteo.reading import Reading

    given = {"table_rows": TABLE_ROWS, "test_fraction": 0.0, "shuffle": False, "drop_last": False}
    for features, labels in build(Reading(files, batch_size, **given, **options), style=style):
        yield labels.numpy(), features["dense"].numpy(), features["categories"].numpy()


def tf_usual(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """tf.data line by line, everything left to AUTOTUNE."""
    return tf_pipeline(files, batch_size, style="plain", workers={"read": -1, "parse": -1, "collate": -1}, prefetch=-1)


def tf_best(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """tf.data with batches of lines parsed at once, and parallel calls set by hand."""
    import tensorflow as tf

    def parse(lines: Any) -> tuple[Any, ...]:
        defaults = [tf.constant([], tf.int64), *[np.int64(0)] * DENSE, *["00000000"] * CATEGORIES]
        fields = tf.io.decode_csv(lines, defaults, field_delim="\t", use_quote_delim=False)
        text = tf.io.decode_raw(tf.stack(fields[1 + DENSE :], axis=1), tf.uint8)
        digits = tf.cast(text % 16 + 9 * (text // 64), tf.int64)
        hashes = tf.reduce_sum(digits * 16 ** np.arange(7, -1, -1), axis=-1) % TABLE_ROWS
        dense = tf.math.log1p(tf.cast(tf.maximum(tf.stack(fields[1 : 1 + DENSE], axis=1), 0), tf.float32))
        return tf.cast(fields[0], tf.float32), dense, tf.cast(hashes, tf.int32)

    dataset = tf.data.TextLineDataset(list(files), buffer_size=READ_BYTES).batch(batch_size)
    yield from dataset.map(parse, num_parallel_calls=threads).prefetch(2).as_numpy_iterator()
