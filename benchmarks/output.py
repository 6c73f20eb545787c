"""What every benchmark prints and writes: one JSON shape, one plain table, the same first arguments."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["arguments", "numbers", "table", "versions", "words", "write"]

PACKAGES = (
    "intune-callbacks",
    "torch",
    "torchdata",
    "pytorch-lightning",
    "tensorflow-cpu",
    "tensorflow",
    "keras",
    "numpy",
    "numba",
    "pyarrow",
    "polars",
    "ray",
    "spdl",
)


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for ``python -m benchmarks.NAME`` with the arguments all benchmarks share.

    Args:
        name: module name of the benchmark.
        description: first sentence of the help text.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to this file")
    parser.add_argument("--seed", type=int, default=0, help="all random choices derive from it (default 0)")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes: shows that it runs, not a result")
    return parser


def numbers(text: str) -> list[int]:
    """Return the integers of a comma-separated list such as ``8,32,64``.

    Raises:
        argparse.ArgumentTypeError: when a part is not a positive integer.
    """
    wrong = [part for part in text.split(",") if not part.strip().isdigit() or int(part) < 1]
    if wrong:
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive integers separated by commas, got {wrong[0]!r}")
    return [int(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    """Return the words of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def versions() -> dict[str, str]:
    """Return the versions a result depends on; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(name: str, rows: Sequence[Mapping[str, Any]], seed: int, path: Path | None) -> dict[str, Any]:
    """Print the rows as a table and write ``{"benchmark", "versions", "seed", "rows"}`` to `path`.

    Args:
        name: the benchmark.
        rows: one mapping per measurement; keys may differ between rows.
        seed: the seed everything was derived from.
        path: JSON file to write; None only prints.

    Returns:
        What was (or would be) written.
    """
    result = {"benchmark": name, "versions": versions(), "seed": seed, "rows": [dict(row) for row in rows]}
    print(table(rows))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as plain text, one column per key in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return str(value)
