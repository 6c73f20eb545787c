"""Criteo ingestion with pyarrow and polars, and with pyarrow's blocks under DataLoader, SPDL and Ray Data.

None of it uses our parsers. What pyarrow has no function for, hex digits, is done by numpy on its buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.criteo_rows import TABLE_ROWS, Arrays, files_dataset
from dlrm_examples.criteo.tsv import CATEGORIES, COLUMNS, DENSE

__all__ = [
    "arrow_csv",
    "arrow_parquet",
    "dataloader_blocks",
    "polars_csv",
    "polars_parquet",
    "ray_csv",
    "ray_parquet",
    "spdl_blocks",
]

INTEGERS, HASHES = COLUMNS[1 : 1 + DENSE], COLUMNS[1 + DENSE :]
BLOCK_BYTES = 1 << 20


def batched(parts: Iterable[Arrays], batch_size: int) -> Iterator[Arrays]:
    """Cut arrays of any length into batches; the last may be smaller."""
    open_parts: list[Arrays] = []
    rows = 0
    for part in parts:
        open_parts.append(part)
        rows += len(part[0])
        while rows >= batch_size:
            whole = [np.concatenate(column) for column in zip(*open_parts, strict=True)]
            yield tuple(column[:batch_size] for column in whole)  # type: ignore[misc]
            open_parts = [tuple(column[batch_size:] for column in whole)]  # type: ignore[list-item]
            rows -= batch_size
    if rows:
        yield tuple(np.concatenate(column) for column in zip(*open_parts, strict=True))  # type: ignore[misc]


# Columns: pyarrow and polars.

NIBBLE = np.zeros(256, np.uint32)
for _code in b"0123456789abcdef":
    NIBBLE[_code] = int(bytes([_code]), 16)


def _hex(column: Any) -> Any:
    """Return the numbers of an Arrow column of 8 hex digits or null."""
    numbers = np.zeros(len(column), np.uint32)
    done = 0
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        begins = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        digits = NIBBLE[np.frombuffer(data, np.uint8)[begins[0] : begins[-1]].reshape(-1, 8)] if len(chunk) else NIBBLE
        joined = np.bitwise_or.reduce(digits << np.arange(28, -1, -4, np.uint32), axis=-1)
        numbers[done : done + len(chunk)][np.diff(begins) > 0] = joined
        done += len(chunk)
    return numbers


def _table_arrays(table: Any) -> Arrays:
    """Return an Arrow table of 40 columns as arrays."""
    rows = table.num_rows
    dense, categories = np.empty((rows, DENSE), np.float32), np.empty((rows, CATEGORIES), np.int32)
    for column in range(DENSE):
        values = table.column(1 + column).fill_null(0).to_numpy()
        dense[:, column] = np.log(np.maximum(values, 0).astype(np.float32) + np.float32(1))
    for column in range(CATEGORIES):
        categories[:, column] = _hex(table.column(1 + DENSE + column)) % np.uint32(TABLE_ROWS)
    return table.column(0).to_numpy().astype(np.float32), dense, categories


def _csv_options() -> tuple[Any, Any]:
    import pyarrow as pa
    import pyarrow.csv

    kinds = {name: pa.string() if name in HASHES else pa.int64() for name in COLUMNS}
    convert = pyarrow.csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""])
    return pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False), convert


def _arrow_tables(files: Sequence[str], threads: int) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.csv

    pa.set_cpu_count(threads)
    parse, convert = _csv_options()
    for path in files:
        read = pyarrow.csv.ReadOptions(column_names=list(COLUMNS), block_size=BLOCK_BYTES, use_threads=threads > 1)
        with pyarrow.csv.open_csv(path, read, parse, convert) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])


def arrow_csv(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """pyarrow's CSV reader in blocks, then numpy."""
    return batched(map(_table_arrays, _arrow_tables(files, threads)), batch_size)


def arrow_parquet(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """pyarrow's Parquet reader by row groups, then numpy."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(threads)

    def tables() -> Iterator[Any]:
        for path in files:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, use_threads=threads > 1)

    return batched(map(_table_arrays, tables()), batch_size)


def _polars_arrays(frame: Any) -> Arrays:
    import polars as pl

    dense = frame.select(pl.col(INTEGERS).fill_null(0).clip(0).cast(pl.Float32).log1p())
    hashes = pl.col(HASHES).str.to_integer(base=16, dtype=pl.Int64).fill_null(0) % TABLE_ROWS
    labels = frame["label"].cast(pl.Float32).to_numpy()
    categories = frame.select(hashes.cast(pl.Int32)).to_numpy(order="c")
    return labels, dense.to_numpy(order="c"), categories


def polars_csv(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """polars, a file at a time."""
    import polars as pl

    kinds = {name: pl.String if name in HASHES else pl.Int64 for name in COLUMNS}
    frames = (pl.read_csv(p, separator="\t", has_header=False, schema=kinds, quote_char=None) for p in files)
    return batched(map(_polars_arrays, frames), batch_size)


def polars_parquet(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """polars on Parquet, a file at a time."""
    import polars as pl

    return batched((_polars_arrays(pl.read_parquet(path)) for path in files), batch_size)


# Blocks of text, parsed by pyarrow, under other executors.


def _parse_range(ref: Any) -> Arrays:
    import pyarrow as pa
    import pyarrow.csv

    from dlrm_examples.criteo.blocks import read_block

    parse, convert = _csv_options()
    read = pyarrow.csv.ReadOptions(column_names=list(COLUMNS), use_threads=False)
    data = read_block(ref).data
    if not data:
        return np.empty(0, np.float32), np.empty((0, DENSE), np.float32), np.empty((0, CATEGORIES), np.int32)
    return _table_arrays(pyarrow.csv.read_csv(pa.BufferReader(data), read, parse, convert))


def _parsed_ranges(files: Sequence[str]) -> Iterator[Any]:
    from dlrm_examples.criteo.blocks import scan_blocks

    yield from map(_parse_range, scan_blocks(files, BLOCK_BYTES))


def dataloader_blocks(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """DataLoader whose workers yield parsed blocks."""
    from torch.utils.data import DataLoader

    loader = DataLoader(files_dataset(files, _parsed_ranges), None, num_workers=threads)
    arrays = (tuple(np.asarray(column) for column in block) for block in loader)
    return batched(arrays, batch_size)  # type: ignore[arg-type]


def spdl_blocks(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """SPDL: a pipeline of threads over blocks."""
    from spdl.pipeline import PipelineBuilder

    from dlrm_examples.criteo.blocks import scan_blocks

    builder = PipelineBuilder().add_source(scan_blocks(files, BLOCK_BYTES))
    pipeline = (
        builder.pipe(_parse_range, concurrency=threads, output_order="input").add_sink(2).build(num_threads=threads)
    )
    with pipeline.auto_stop():
        yield from batched(pipeline.get_iterator(), batch_size)


def _ray(files: Sequence[str], batch_size: int, threads: int, parquet: bool) -> Iterator[Arrays]:
    import logging

    import ray
    import ray.data

    if not ray.is_initialized():
        ray.init(num_cpus=threads, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
    if parquet:
        dataset = ray.data.read_parquet(list(files))
    else:
        import pyarrow.csv

        parse, convert = _csv_options()
        read = pyarrow.csv.ReadOptions(column_names=list(COLUMNS), block_size=BLOCK_BYTES)
        options = {"read_options": read, "parse_options": parse, "convert_options": convert}
        dataset = ray.data.read_csv(list(files), file_extensions=["tsv"], **options)

    def arrays(table: Any) -> dict[str, Any]:
        return dict(zip(("labels", "dense", "categories"), _table_arrays(table), strict=True))

    batches = dataset.map_batches(arrays, batch_format="pyarrow", batch_size=None)
    for batch in batches.iter_batches(batch_size=batch_size, batch_format="numpy"):
        yield batch["labels"], batch["dense"], batch["categories"]


def ray_csv(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """Ray Data on text."""
    return _ray(files, batch_size, threads, False)


def ray_parquet(files: Sequence[str], batch_size: int, threads: int) -> Iterator[Arrays]:
    """Ray Data on Parquet."""
    return _ray(files, batch_size, threads, True)
