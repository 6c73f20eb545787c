"""Criteo-shaped TSV shards of any size with a click rule that can be learnt.

    python -m dlrm_examples.generate DIR --rows 200000 --shards 8 --seed 0

Missing rates, integer magnitudes and cardinalities are those of the Kaggle data (measured column by column, rounded);
the popularity of a category falls as 1 / rank. The click rule is the same for every seed: each category value has
a hidden weight drawn from a hash of column and value, each integer a slope, so data made with two seeds are two
samples of one world. The rows depend on `seed` and, in number, on `rows` alone: shards are cuts of one stream. Same
arguments give same bytes with one numpy on one kind of CPU (the last bit of exp may differ between CPUs).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.hashing import mix64
from dlrm_examples.criteo.tsv import CATEGORIES, DENSE, KAGGLE_TABLE_ROWS

__all__ = ["VERSION", "generate", "main"]

VERSION = 1
MANIFEST = "manifest.json"
ROWS_PER_DRAW = 4096

# Percent missing; columns of one rate are missing together, as in the Kaggle data.
DENSE_MISSING = (44.9, 0.0, 21.1, 21.2, 2.9, 22.5, 4.3, 0.1, 4.3, 44.9, 4.3, 76.5, 21.2)
CATEGORY_MISSING = (
    *(0.0, 0.0, 3.5, 3.5, 0.0, 12.4, 0.0, 0.0, 0.0, 0.0, 0.0, 3.5, 0.0),
    *(0.0, 0.0, 3.5, 0.0, 0.0, 43.8, 43.8, 3.5, 77.1, 0.0, 3.5, 43.8, 43.8),
)
# Mean and standard deviation of log(max(x, 0) + 1) in the Kaggle data.
LOG_MEAN = (0.87, 2.11, 2.18, 1.71, 7.25, 3.42, 1.63, 2.05, 3.56, 0.40, 0.93, 0.29, 1.75)
LOG_STD = (0.98, 2.12, 1.22, 0.92, 2.92, 1.76, 1.38, 1.16, 1.63, 0.40, 0.77, 0.62, 0.98)
LARGEST_INTEGER = 9_999_999
LOWEST_I2 = -2

# The click rule, in units of the log-odds; signs alternate so that no column stands for all. Found by trial:
# about one click in four, and an AUC of .86 for who knows the rule.
SLOPE = 0.45
CATEGORY_WEIGHT = 0.26
BIAS = -1.45

# One row as fixed-width bytes; a mask of the same layout then drops what a shorter field does not use.
FIELD = np.dtype([("text", "<u4", (2,)), ("separator", "u1")])
ROW = np.dtype([("label", "u1"), ("tab", "u1"), ("dense", FIELD, (DENSE,)), ("categories", FIELD, (CATEGORIES,))])
DENSE_OFFSET = 2
FOUR_DIGITS = np.array([b"%04d" % i for i in range(10_000)], "S4").view("<u4")
FOUR_HEX = np.frombuffer(b"".join(b"%04x" % i for i in range(65_536)), "<u4")
LAST_BYTES = np.array([[i >= 8 - n for i in range(8)] for n in range(9)], "u1").view("<u4")


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows before they are written.

    Args:
        labels: [n] 0 or 1.
        dense: [n, 13] int32.
        dense_missing: [n, 13] bool.
        categories: [n, 26] uint32.
        category_missing: [n, 26] bool.
    """

    labels: npt.NDArray[np.uint8]
    dense: npt.NDArray[np.int32]
    dense_missing: npt.NDArray[np.bool_]
    categories: npt.NDArray[np.uint32]
    category_missing: npt.NDArray[np.bool_]


def draw(rows: int, random: np.random.Generator) -> Draw:
    """Draw `rows` rows and their clicks."""
    normal = random.standard_normal((rows, DENSE), np.float32)
    log = normal * np.array(LOG_STD, np.float32) + np.array(LOG_MEAN, np.float32)
    dense = np.minimum(np.expm1(np.maximum(log, 0)), LARGEST_INTEGER).astype(np.int32)
    dense[:, 1] = np.where(log[:, 1] < 0, np.maximum(np.floor(log[:, 1]), LOWEST_I2), dense[:, 1])
    uniform = random.random((rows, CATEGORIES), np.float32)
    # P(rank) = log((rank + 2) / (rank + 1)) / log(N + 1): the power law with exponent 1.
    rank = np.exp(uniform * np.log(np.array(KAGGLE_TABLE_ROWS, np.float32) + 1)).astype(np.uint64) - np.uint64(1)
    mixed = mix64(rank + (np.arange(CATEGORIES, dtype=np.uint64) << np.uint64(32)))
    rates = dict.fromkeys(DENSE_MISSING + CATEGORY_MISSING)
    absent = {rate: random.random(rows, np.float32) < rate / 100 for rate in rates}
    dense_missing = np.stack([absent[rate] for rate in DENSE_MISSING], axis=1)
    category_missing = np.stack([absent[rate] for rate in CATEGORY_MISSING], axis=1)
    slopes = SLOPE * np.where(np.arange(DENSE) % 3 == 2, -1, 1).astype(np.float32)
    # The sum of four bytes of the hash is close enough to a normal variable (mean 510, standard deviation 147.8).
    pairs = (mixed >> np.uint64(32) & np.uint64(0x00FF00FF)) + (mixed >> np.uint64(40) & np.uint64(0x00FF00FF))
    weights = (pairs + (pairs >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int32) - 510
    odds = np.float32(BIAS) + np.where(dense_missing, 0, normal).astype(np.float32) @ slopes
    odds += np.where(category_missing, 0, weights).sum(axis=1) * np.float32(CATEGORY_WEIGHT / 147.8)
    clicks = random.random(rows, np.float32) < 1 / (1 + np.exp(-odds))
    return Draw(clicks.astype(np.uint8), dense, dense_missing, mixed.astype(np.uint32), category_missing)


def write(drawn: Draw) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the rows as TSV bytes, and the length of each line."""
    rows = len(drawn.labels)
    out, used = np.empty(rows, ROW), np.ones(rows * ROW.itemsize, np.uint8).view(ROW)
    out["label"] = drawn.labels + ord("0")
    out["tab"] = out["dense"]["separator"] = out["categories"]["separator"] = ord("\t")
    out["categories"]["separator"][:, -1] = ord("\n")
    size = np.abs(drawn.dense)
    digits = 1 + sum((size >= 10**power).astype(np.intp) for power in range(1, 7))
    text = out["dense"]["text"]
    text[..., 0] = FOUR_DIGITS[size // 10_000]
    text[..., 1] = FOUR_DIGITS[size % 10_000]
    row, column = np.nonzero(drawn.dense < 0)
    characters = out.view(np.uint8).reshape(rows, -1)
    characters[row, DENSE_OFFSET + FIELD.itemsize * column + 7 - digits[row, column]] = ord("-")
    dense_length = np.where(drawn.dense_missing, 0, digits + (drawn.dense < 0))
    used["dense"]["text"] = LAST_BYTES[dense_length]
    text = out["categories"]["text"]
    text[..., 0] = FOUR_HEX[drawn.categories >> np.uint32(16)]
    text[..., 1] = FOUR_HEX[drawn.categories & np.uint32(0xFFFF)]
    category_length = np.where(drawn.category_missing, 0, 8)
    used["categories"]["text"] = LAST_BYTES[category_length]
    lengths = 2 + dense_length.sum(axis=1) + DENSE + category_length.sum(axis=1) + CATEGORIES
    return characters.ravel()[used.view(np.bool_)], lengths


def lines(rows: int, seed: int) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Yield the whole data set piece by piece: TSV bytes and the length of each line."""
    for start in range(0, rows, ROWS_PER_DRAW):
        drawn = draw(min(ROWS_PER_DRAW, rows - start), np.random.default_rng([VERSION, seed, start]))
        yield write(drawn)


def generate(directory: str | os.PathLike[str], *, rows: int, shards: int = 1, seed: int = 0) -> list[Path]:
    """Write `rows` rows in `shards` files and return the files; a directory that already holds them is left as it is.

    The directory appears whole or not at all: everything is written beside it and renamed.

    Args:
        directory: where to write; must not exist, be empty, or hold data generated before (which is replaced).
        rows: number of rows over all shards.
        shards: number of files; shard k holds rows k * rows // shards up to (k + 1) * rows // shards.
        seed: same rows, shards and seed: same bytes.

    Raises:
        ValueError: all wrong arguments at once, or a directory with other files in it.
    """
    target = Path(directory)
    wanted = {"version": VERSION, "rows": rows, "shards": shards, "seed": seed}
    problems = [
        f"{name}={value!r}: expected a whole number from {low}"
        for name, value, low in (("rows", rows, 1), ("shards", shards, 1), ("seed", seed, 0))
        if not isinstance(value, int) or isinstance(value, bool) or value < low
    ]
    if not problems and rows < shards:
        problems.append(f"rows={rows}, shards={shards}: expected at least one row per shard")
    if not _is_ours(target):
        problems.append(f"{target} holds something else than generated data: choose another directory")
    if problems:
        raise ValueError("; ".join(problems))
    if (existing := _existing(target, wanted)) is not None:
        return existing
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _write_shards(fresh, wanted)
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)
    except OSError:
        # Another process may have finished the same directory meanwhile.
        if (existing := _existing(target, wanted)) is not None:
            return existing
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return _existing(target, wanted) or []


def _is_ours(target: Path) -> bool:
    """Tell whether the directory may be replaced: absent, empty, or nothing in it but generated files."""
    if not target.is_dir():
        return not target.exists()
    names = {entry.name for entry in target.iterdir()}
    return not names or (MANIFEST in names and all(re.fullmatch(r"shard-\d+\.tsv", n) for n in names - {MANIFEST}))


def _existing(target: Path, wanted: dict[str, int]) -> list[Path] | None:
    """Return the shards if the directory holds exactly the wanted data, complete."""
    try:
        manifest: dict[str, Any] = json.loads((target / MANIFEST).read_text())
        sizes = {str(name): int(size) for name, size in manifest.pop("files").items()}
        same = manifest == wanted and all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return [target / name for name in sizes] if same else None


def _write_shards(folder: Path, wanted: dict[str, int]) -> None:
    rows, shards = wanted["rows"], wanted["shards"]
    ends = [(k + 1) * rows // shards for k in range(shards)]
    names = [f"shard-{k:05d}.tsv" for k in range(shards)]
    pieces = lines(rows, wanted["seed"])
    data, lengths, done = np.empty(0, np.uint8), np.empty(0, np.int64), 0
    for name, end in zip(names, ends, strict=True):
        with open(folder / name, "wb") as file:
            while done < end:
                if not len(lengths):
                    data, lengths = next(pieces)
                take = min(end - done, len(lengths))
                cut = int(lengths[:take].sum())
                file.write(data[:cut].data)
                data, lengths, done = data[cut:], lengths[take:], done + take
    manifest = {**wanted, "files": {name: (folder / name).stat().st_size for name in names}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrm_examples.generate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        files = generate(given.directory, rows=given.rows, shards=given.shards, seed=given.seed)
    except (ValueError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in files)
    took_s = time.perf_counter() - started
    print(f"{given.directory}: {given.rows} rows, {len(files)} shards, {size / 1e6:.1f} MB, {took_s:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
