"""Criteo files in other formats, which the pipelines read with less work: `intune convert`."""

from __future__ import annotations

import gzip
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.arrays import is_arrays, is_beside
from dlrm_examples.criteo.blocks import row_offsets
from dlrm_examples.criteo.compressed import compression
from dlrm_examples.criteo.formats import Reader, is_parquet, parse_selected, scan
from dlrm_examples.criteo.tsv import ALL_BITS_OF_EACH, COLUMNS, DENSE, Rows
from intune_callbacks.config import choice_problem
from intune_callbacks.errors import ConfigError, MissingPackage

__all__ = ["SUFFIXES", "convert", "sources"]

SUFFIXES = {"gzip": ".gz", "zstd": ".zst", "parquet": ".parquet", "packed": ".packed"}
ENDINGS = re.compile(r"(\.tsv|\.parquet)?(\.gz|\.zst)?(\.packed)?$")
DTYPES = ("float32", "float16")
FRAME_BYTES, BLOCK_BYTES, GROUP_ROWS = 1 << 20, 1 << 21, 16_384


def sources(path: Path) -> list[Path]:
    """Return the Criteo files that a path stands for: itself, or those of a directory, sorted.

    Raises:
        ConfigError: there is no such path, or no file in the directory, or one of them in two formats.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError([f"{path}: no such file or directory; give a Criteo file or a directory of them"])
    found = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and file.suffix != ".json" and file.name[0] != "." and not is_beside(file.name)
    )
    if not found:
        raise ConfigError(
            [f"{path}: the directory holds no file; give Criteo files (TSV, .gz, .zst, .parquet, .packed)"]
        )
    names: dict[str, Path] = {}
    for file in found:
        other = names.setdefault(ENDINGS.sub("", file.name.lower()), file)
        if other != file:
            raise ConfigError(
                [f"{path}: holds {other.name} and {file.name}: the same rows twice? Give one of them, or move one away"]
            )
    return found


def convert(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    target: str,
    *,
    group_rows: int | None = None,
    dense: str = "float32",
) -> Path:
    """Write one Criteo file in another format and return the new file, named after it.

    Args:
        path: the file: plain TSV, for ``packed`` also ``.gz``, ``.zst`` or ``.parquet``.
        directory: where to write; made if absent.
        target: of `SUFFIXES`. ``zstd`` has a frame for each MiB of text, so that it can be read in any order;
            ``packed`` has parsed rows, see `criteo.packed`.
        group_rows: rows of a Parquet row group (16,384 by default), or of a packed block (8,192).
        dense: of ``packed``: ``float32``, or ``float16``, which rounds the logarithms to three digits.

    Raises:
        ConfigError: there is no such `target` or `dense`, or the file is not one that can be converted to it.
        BadRow: a row is malformed.
        MissingPackage: what reads or writes the format is not installed.
    """
    source, folder = Path(path), Path(directory)
    problems = [*choice_problem("format", target, tuple(SUFFIXES)), *choice_problem("dense", dense, DTYPES)]
    if is_arrays(source.name):
        problems.append(f"{source}: its rows are parsed already; give what it was made from")
    elif target != "packed" and (compression(source.name) or is_parquet(source.name)):
        problems.append(f"{source}: format={target} is made from plain TSV; expected that, or format=packed")
    if problems:
        raise ConfigError(problems)
    folder.mkdir(parents=True, exist_ok=True)
    if target in ("parquet", "packed"):
        written = folder / ((source.stem if target == "parquet" else source.name) + SUFFIXES[target])
        if target == "parquet":
            _write_parquet(source, written, group_rows or GROUP_ROWS)
        else:
            from dlrm_examples.criteo.packed import BLOCK_ROWS, write_packed

            write_packed(written, _parsed(source), block_rows=group_rows or BLOCK_ROWS, dense=dense)
        return written
    written = folder / (source.name + SUFFIXES[target])
    with open(source, "rb") as lines:
        if target == "gzip":
            with gzip.GzipFile(written, "wb", compresslevel=6, mtime=0) as compressed:
                shutil.copyfileobj(lines, compressed, FRAME_BYTES)
        else:
            try:
                import zstandard
            except ModuleNotFoundError:
                raise MissingPackage("zstandard", "criteo") from None
            compressor = zstandard.ZstdCompressor(write_checksum=True)
            with open(written, "wb") as file:
                while chunk := lines.read(FRAME_BYTES):
                    file.write(compressor.compress(chunk))
    return written


def _parsed(source: Path) -> Iterator[tuple[Rows, npt.NDArray[np.int64]]]:
    """Yield all rows of a file, with categories of which no modulus is taken, and their offsets."""
    read = Reader()
    for content in map(read, scan([source], BLOCK_BYTES)):
        yield parse_selected(content, ALL_BITS_OF_EACH), row_offsets(content)


def _write_parquet(source: Path, written: Path, group_rows: int) -> None:
    try:
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise MissingPackage("pyarrow", "criteo") from None
    kinds = {name: pa.string() if column > DENSE else pa.int64() for column, name in enumerate(COLUMNS)}
    table = pyarrow.csv.read_csv(
        source,
        pyarrow.csv.ReadOptions(column_names=list(COLUMNS)),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
        pyarrow.csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""]),
    )
    pq.write_table(table, written, row_group_size=group_rows)
