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

from dlrm_examples.criteo.arguments import checked
from dlrm_examples.criteo.blocks import Split
from dlrm_examples.criteo.formats import count_rows, scan
from dlrm_examples.criteo.stages import Batch, Batcher, Parse, Read, References, Shuffle, collate

__all__ = ["STAGES", "CriteoLoader", "build"]

STAGES = ("read", "parse", "shuffle", "collate")
BLOCK_BYTES = 1 << 21


class CriteoLoader(Loader[Batch]):  # type: ignore[misc]
    """A `torchdata.nodes.Loader` that knows its length: Lightning resumes only sized loaders at the exact batch.

    Args:
        root: the last node of the graph.
        batches: counts the batches of an epoch; called once, when the length is first asked for. None for no length.
        batcher: the node that sees the parsed rows; None where there is none.
    """

    def __init__(
        self, root: BaseNode[Batch], batches: Callable[[], int] | None = None, batcher: Batcher | None = None
    ) -> None:
        super().__init__(root)
        self._count, self._batcher = batches, batcher

    @property
    def skipped_rows(self) -> int:
        """Malformed rows left out in this epoch so far (those of prefetched blocks included), or in the last one."""
        return self._batcher.skipped if self._batcher is not None else 0

    @property
    def all_skipped_rows(self) -> int:
        """Malformed rows left out in this epoch and in those before it that went to their end, each time they were."""
        return self.skipped_rows + (self._batcher.skipped_before if self._batcher is not None else 0)

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
    kernel: str | None = None,
    sized: bool = True,
) -> CriteoLoader:
    """Return a loader over Criteo files; each ``iter()`` is one epoch.

    Args:
        paths: the files, each with Criteo rows only: TSV, also as ``.gz`` or ``.zst``, and ``.parquet``.
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
        block_bytes: bytes of a file read at once; of Parquet always a row group.
        on_bad_row: ``error``, or ``skip``, which leaves malformed rows out and counts them in ``skipped_rows``.
        kernel: what parses text, ``numba`` or ``numpy``, with the same result; by default numba where it is installed.
        sized: count the rows (one pass over the files, about 1 GB/s) when the length is asked for.

    Raises:
        ConfigError: with all problems at once.
        MissingPackage: what a format or the kernel needs is not installed.
    """
    files, moduli, threads = checked(
        paths, batch_size, table_rows, split, test_fraction, seed, workers, prefetch, read_latency_ms, block_bytes,
        on_bad_row, kernel, stages=STAGES,
    )  # fmt: skip
    chosen = Split(split, test_fraction, seed)
    refs = scan(files, block_bytes)
    shuffled = split == "train" if shuffle is None else shuffle
    dropped = split == "train" if drop_last is None else drop_last
    node: BaseNode[Any] = References(refs, shuffle=shuffled, seed=seed)
    node = ParallelMapper(node, Read(read_latency_ms / 1e3), num_workers=threads["read"])
    node = ParallelMapper(node, Parse(moduli, chosen, on_bad_row, kernel), num_workers=threads["parse"])
    node = ParallelMapper(node, Shuffle(seed, shuffled), num_workers=threads["shuffle"])
    batcher = Batcher(node, batch_size, drop_last=dropped)
    node = ParallelMapper(batcher, collate, num_workers=threads["collate"])
    node = Prefetcher(node, prefetch)

    def batches() -> int:
        rows = count_rows(refs, chosen)
        return rows // batch_size if dropped else -(-rows // batch_size)

    return CriteoLoader(node, batches if sized and on_bad_row == "error" else None, batcher)
