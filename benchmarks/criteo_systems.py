"""The systems of the Criteo benchmark.

Every one is a function (files, batch_size, threads) -> (labels [B], dense [B, 13], categories [B, 26]) batch by batch.
What is not ours is written as its documentation shows it, then made as fast as it goes without code of ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import criteo_rows, criteo_tables
from benchmarks.criteo_rows import TABLE_ROWS, Arrays

__all__ = ["CACHED", "SYSTEMS", "System", "keep"]

CACHED = "tsv, parsed before"


@dataclass(frozen=True)
class System:
    """One way of reading Criteo data.

    Args:
        name: in the table.
        format: of the files it reads.
        run: (files, batch_size, threads) -> batches.
        threads: settings measured.
        slow: measured on fewer rows.
        needs: packages as pip knows them.
    """

    name: str
    format: str
    run: Callable[[Sequence[str], int, int], Iterator[Arrays]]
    threads: tuple[int, ...] = (1, 2)
    slow: bool = False
    needs: tuple[str, ...] = ()


def ours(**options: Any) -> Callable[[Sequence[str], int, int], Iterator[Arrays]]:
    """Return the loader of `dlrm_examples.criteo.pipeline` with `threads` parsing threads."""

    def run(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
        from dlrm_examples.criteo.pipeline import build
        from dlrm_examples.criteo.reading import Reading

        # Of Parquet it is reading that takes the time: Arrow decodes there.
        workers = {
            "read": threads if files[0].endswith(".parquet") else 0,
            "parse": threads,
            "shuffle": 0,
            "collate": 0,
        }
        given = {"table_rows": TABLE_ROWS, "test_fraction": 0.0, "shuffle": False, "drop_last": False}
        reading = Reading(files, batch_size, **{"workers": workers, **given, **options})
        for batch in build(reading, sized=False):
            yield batch["labels"].numpy(), batch["dense"].numpy(), batch["categories"].numpy()

    return run


def first_run(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """Our loader with a `cache_dir` that is empty."""
    with tempfile.TemporaryDirectory(dir=Path(files[0]).parents[1]) as folder:
        # It is `read` that parses what is new.
        workers = {"read": threads, "parse": threads}
        yield from ours(kernel="numba", cache_dir=folder, workers=workers)(files, batch_size, threads)


def later_run(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """Our loader with the `cache_dir` that `keep` filled."""
    yield from ours(cache_dir=Path(files[0]).with_name("cache"))(files, batch_size, threads)


def keep(file: Path, folder: Path) -> None:
    """Put a link to a text file into a folder, and what it is parsed to beside it."""
    from dlrm_examples.criteo.reading import Reading

    folder.mkdir(parents=True, exist_ok=True)
    (folder / file.name).symlink_to(file)
    reading = Reading([folder / file.name], 1, cache_dir=folder / "cache")
    read = reading.reader()
    for ref in reading.refs():
        read(ref)


def ours_tf(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """The same parser under tf.data."""
    return criteo_rows.tf_pipeline(
        files, batch_size, style="blocks", workers={"read": threads, "parse": threads, "shuffle": 0}
    )


SYSTEMS = (
    System("InTune loader, numba", "tsv", ours(kernel="numba"), needs=("torchdata", "numba")),
    System("InTune loader, numba, shuffled", "tsv", ours(kernel="numba", shuffle=True), needs=("torchdata", "numba")),
    System("InTune loader, numpy", "tsv", ours(kernel="numpy"), needs=("torchdata",)),
    System("InTune loader, numba", "gzip", ours(kernel="numba"), needs=("torchdata", "numba")),
    System("InTune loader, numba", "zstd", ours(kernel="numba"), needs=("torchdata", "numba", "zstandard")),
    System("InTune loader", "parquet", ours(), needs=("torchdata", "pyarrow")),
    System("InTune loader", "packed", ours(), (0, 1, 2), needs=("torchdata", "xxhash")),
    System("InTune loader, numba, empty cache_dir", "tsv", first_run, (1,), needs=("torchdata", "numba", "xxhash")),
    System("InTune loader", CACHED, later_run, (0, 1, 2), needs=("torchdata", "xxhash")),
    System("InTune loader, shuffled", "packed", ours(shuffle=True), (1,), needs=("torchdata", "xxhash")),
    System("InTune tf.data blocks", "packed", ours_tf, (2,), needs=("tensorflow", "xxhash")),
    System("InTune tf.data blocks, numba", "tsv", ours_tf, (2,), needs=("tensorflow", "numba")),
    System("pyarrow csv", "tsv", criteo_tables.arrow_csv, needs=("pyarrow",)),
    System("pyarrow parquet", "parquet", criteo_tables.arrow_parquet, needs=("pyarrow",)),
    System("polars csv", "tsv", criteo_tables.polars_csv, (2,), needs=("polars",)),
    System("polars parquet", "parquet", criteo_tables.polars_parquet, (2,), needs=("polars",)),
    System("torch DataLoader, blocks (pyarrow)", "tsv", criteo_tables.dataloader_blocks, needs=("torch", "pyarrow")),
    System("SPDL, blocks (pyarrow)", "tsv", criteo_tables.spdl_blocks, needs=("spdl", "pyarrow")),
    System("Ray Data csv", "tsv", criteo_tables.ray_csv, (2,), needs=("ray", "pyarrow", "pandas")),
    System("Ray Data parquet", "parquet", criteo_tables.ray_parquet, (2,), needs=("ray", "pyarrow", "pandas")),
    System("tf.data, lines in batches", "tsv", criteo_rows.tf_best, (2,), needs=("tensorflow",)),
    System("tf.data, as usually written", "tsv", criteo_rows.tf_usual, (2,), slow=True, needs=("tensorflow",)),
    System("torch DataLoader, rows", "tsv", criteo_rows.dataloader_rows, slow=True, needs=("torch",)),
    System("torchdata.nodes, rows", "tsv", criteo_rows.nodes_rows, (2,), slow=True, needs=("torchdata",)),
)
