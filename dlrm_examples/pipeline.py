"""Criteo files as a torchdata.nodes graph whose stages can be tuned one by one.

    references -> read -> parse -> shuffle -> Batcher -> collate -> Prefetcher

The batches and their order are the same whatever the number of workers, and every node saves and restores its state
exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torchdata.nodes import BaseNode, Loader, ParallelMapper, Prefetcher

from dlrm_examples.blocks import Split, count_rows, scan_blocks
from dlrm_examples.stages import Batch, Batcher, Parse, Read, References, Shuffle, collate
from dlrm_examples.tsv import CATEGORIES
from intune_callbacks.config import choice_problem, nearest, number_problem
from intune_callbacks.errors import ConfigError

__all__ = ["STAGES", "CriteoLoader", "build"]

STAGES = ("read", "parse", "shuffle", "collate")
BLOCK_BYTES = 1 << 18


class CriteoLoader(Loader[Batch]):  # type: ignore[misc]
    """A `torchdata.nodes.Loader` that knows its length: Lightning resumes only sized loaders at the exact batch.

    Args:
        root: the last node of the graph.
        batches: counts the batches of an epoch; called once, when the length is first asked for. None for no length.
    """

    def __init__(self, root: BaseNode[Batch], batches: Callable[[], int] | None = None) -> None:
        super().__init__(root)
        self._count = batches

    @cached_property
    def _batches(self) -> int:
        if self._count is None:
            raise TypeError("this loader has no length: rows are skipped, or counting them was switched off")
        return self._count()

    def __len__(self) -> int:
        return self._batches


def build(
    paths: Iterable[str | os.PathLike[str]],
    batch_size: int,
    *,
    table_rows: int | Sequence[int] = 100_000,
    split: str = "train",
    test_fraction: float = 0.1,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    workers: Mapping[str, int] | None = None,
    prefetch: int = 2,
    read_latency_ms: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
    on_bad_row: str = "error",
    sized: bool = True,
) -> CriteoLoader:
    """Return a loader over Criteo TSV files; each ``iter()`` is one epoch.

    Args:
        paths: the files, each with Criteo rows only.
        batch_size: rows per batch.
        table_rows: rows of the embedding tables, one number for all or 26; the categories' moduli.
        split: ``train`` or ``test``.
        test_fraction: share of the rows held out for ``test``, 0..1.
        seed: decides the order of blocks and rows, and the split.
        shuffle: by default the training split is shuffled and the test split is not.
        drop_last: leave out a smaller last batch. By default in training only: one SGD step on a handful of rows,
            as large as any other, spoils the model it ends with.
        workers: threads for the stages read, parse, shuffle, collate; 1 where not given, 0 runs a stage inline.
        prefetch: batches kept ready.
        read_latency_ms: sleep this long for each block, to stand for a network file system.
        block_bytes: bytes of text per block.
        on_bad_row: ``error`` or ``skip``.
        sized: count the rows (one pass over the files, about 1 GB/s) when the length is asked for.

    Raises:
        ConfigError: with all problems at once.
    """
    files = tuple(os.fspath(path) for path in paths)
    threads = {**dict.fromkeys(STAGES, 1), **(workers or {})}
    moduli = (table_rows,) * CATEGORIES if isinstance(table_rows, int) else tuple(table_rows)
    problems = [f"paths: {path} is not a file" for path in files if not os.path.isfile(path)]
    problems += [] if files else ["paths: none given, expected one or more Criteo TSV files"]
    problems += number_problem("batch_size", batch_size, 1, 1 << 24)
    problems += number_problem("test_fraction", test_fraction, 0.0, 1.0)
    problems += number_problem("seed", seed, 0, (1 << 32) - 1)
    problems += number_problem("prefetch", prefetch, 1, 4096)
    problems += number_problem("read_latency_ms", read_latency_ms, 0.0, 60_000.0)
    problems += number_problem("block_bytes", block_bytes, 1, 1 << 31)
    problems += choice_problem("split", split, ("train", "test"))
    problems += choice_problem("on_bad_row", on_bad_row, ("error", "skip"))
    for name, count in threads.items():
        problems += number_problem(f"workers[{name!r}]", count, 0, 4096)
        problems += [] if name in STAGES else [f"workers: there is no stage {name!r}{nearest(name, STAGES)}"]
    if len(moduli) != CATEGORIES:
        problems.append(f"table_rows: {len(moduli)} numbers given, expected one or {CATEGORIES}")
    for rows in moduli:
        problems += number_problem("table_rows", rows, 1, (1 << 31) - 1)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))

    chosen = Split(split, test_fraction, seed)
    refs = scan_blocks(files, block_bytes)
    shuffled = split == "train" if shuffle is None else shuffle
    dropped = split == "train" if drop_last is None else drop_last
    node: BaseNode[Any] = References(refs, shuffle=shuffled, seed=seed)
    node = ParallelMapper(node, Read(read_latency_ms / 1e3), num_workers=threads["read"])
    node = ParallelMapper(node, Parse(moduli, chosen, on_bad_row), num_workers=threads["parse"])
    node = ParallelMapper(node, Shuffle(seed, shuffled), num_workers=threads["shuffle"])
    node = Batcher(node, batch_size, drop_last=dropped)
    node = ParallelMapper(node, collate, num_workers=threads["collate"])
    node = Prefetcher(node, prefetch)

    def batches() -> int:
        rows = count_rows(refs, chosen)
        return rows // batch_size if dropped else -(-rows // batch_size)

    return CriteoLoader(node, batches if sized and on_bad_row == "error" else None)
