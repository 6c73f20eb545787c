"""What the Criteo pipelines, whatever framework they are written in, accept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from dlrm_examples.criteo.parse import KERNELS
from dlrm_examples.criteo.tsv import CATEGORIES
from intune_callbacks.config import choice_problem, nearest, number_problem
from intune_callbacks.errors import ConfigError

__all__ = ["checked"]


def checked(
    paths: Iterable[str | os.PathLike[str]],
    batch_size: int,
    table_rows: int | Sequence[int],
    split: str,
    test_fraction: float,
    seed: int,
    workers: Mapping[str, int] | None,
    prefetch: int,
    read_latency_ms: float,
    block_bytes: int,
    on_bad_row: str,
    kernel: str | None,
    *,
    stages: Sequence[str],
    autotune: bool = False,
) -> tuple[tuple[str, ...], tuple[int, ...], dict[str, int]]:
    """Return the files, the 26 moduli of the categories and the workers of each stage.

    Args:
        paths, batch_size, table_rows, split, test_fraction, seed, workers, prefetch, read_latency_ms, block_bytes,
            on_bad_row, kernel: as for `pipeline.build`.
        stages: the stages that have workers; 1 where `workers` does not name one.
        autotune: whether `workers` and `prefetch` may be -1, which leaves them to the framework.

    Raises:
        ConfigError: with all problems at once.
    """
    files = tuple(os.fspath(path) for path in paths)
    threads = {**dict.fromkeys(stages, 1), **(workers or {})}
    moduli = (table_rows,) * CATEGORIES if isinstance(table_rows, int) else tuple(table_rows)
    problems = [f"paths: {path} is not a file" for path in files if not os.path.isfile(path)]
    problems += [] if files else ["paths: none given, expected one or more Criteo files"]
    problems += number_problem("batch_size", batch_size, 1, 1 << 24)
    problems += number_problem("test_fraction", test_fraction, 0.0, 1.0)
    problems += number_problem("seed", seed, 0, (1 << 32) - 1)
    problems += number_problem("prefetch", prefetch, -1 if autotune else 1, 4096)
    problems += number_problem("read_latency_ms", read_latency_ms, 0.0, 60_000.0)
    problems += number_problem("block_bytes", block_bytes, 1, 1 << 31)
    problems += choice_problem("split", split, ("train", "test"))
    problems += choice_problem("on_bad_row", on_bad_row, ("error", "skip"))
    problems += choice_problem("kernel", kernel, KERNELS) if kernel is not None else ()
    for name, count in threads.items():
        problems += number_problem(f"workers[{name!r}]", count, -1 if autotune else 0, 4096)
        problems += [] if name in stages else [f"workers: there is no stage {name!r}{nearest(name, stages)}"]
    if len(moduli) != CATEGORIES:
        problems.append(f"table_rows: {len(moduli)} numbers given, expected one or {CATEGORIES}")
    for rows in moduli:
        problems += number_problem("table_rows", rows, 1, (1 << 31) - 1)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return files, moduli, threads
