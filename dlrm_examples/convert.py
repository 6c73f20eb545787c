"""Criteo TSV files in the other formats that the pipelines read.

python -m dlrm_examples.convert DIR FILE.tsv ... --format parquet
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_examples.criteo.tsv import COLUMNS, DENSE
from intune_callbacks.errors import ConfigError, InTuneError, MissingPackage

__all__ = ["SUFFIXES", "convert", "main"]

SUFFIXES = {"gzip": ".gz", "zstd": ".zst", "parquet": ".parquet"}
FRAME_BYTES = 1 << 20


def convert(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], target: str, *, group_rows: int = 16_384
) -> Path:
    """Write one TSV file in another format and return the new file, named after it.

    Args:
        path: the TSV file.
        directory: where to write; made if absent.
        target: of `SUFFIXES`. ``zstd`` has a frame for each MiB of text, so that it can be read in any order.
        group_rows: rows of a Parquet row group.

    Raises:
        ConfigError: `target` does not exist.
        MissingPackage: what writes the format is not installed.
    """
    if target not in SUFFIXES:
        raise ConfigError([f"target={target!r}: expected one of {', '.join(SUFFIXES)}"])
    source, folder = Path(path), Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if target == "parquet":
        written = folder / f"{source.stem}.parquet"
        _write_parquet(source, written, group_rows)
        return written
    written = folder / (source.name + SUFFIXES[target])
    with open(source, "rb") as text:
        if target == "gzip":
            with gzip.GzipFile(written, "wb", compresslevel=6, mtime=0) as compressed:
                shutil.copyfileobj(text, compressed, FRAME_BYTES)
        else:
            try:
                import zstandard
            except ModuleNotFoundError:
                raise MissingPackage("zstandard", "criteo") from None
            compressor = zstandard.ZstdCompressor(write_checksum=True)
            with open(written, "wb") as file:
                while chunk := text.read(FRAME_BYTES):
                    file.write(compressor.compress(chunk))
    return written


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrm_examples.convert", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--format", choices=tuple(SUFFIXES), default="parquet")
    given = parser.parse_args(arguments)
    try:
        for file in given.files:
            print(convert(file, given.directory, given.format))
    except (InTuneError, OSError, ValueError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
