"""Criteo files as a torchdata.nodes graph whose stages can be tuned one by one.

    references -> read -> parse -> shuffle -> Batcher -> collate -> Prefetcher

The batches and their order are the same whatever the number of workers, and every node saves and restores its state
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from torchdata.nodes import BaseNode, Loader, ParallelMapper, Prefetcher

from dlrm_examples.criteo.reading import Reading
from dlrm_examples.criteo.stages import Batch, Batcher, Parse, Read, References, Shuffle, collate
from intune_callbacks.pipelines.torch.torchdata_nodes import end_engines

__all__ = ["STAGES", "CriteoLoader", "build"]

STAGES = ("read", "parse", "shuffle", "collate")


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

    def __iter__(self) -> Iterator[Batch]:
        # Lightning makes an iterator only to see whether it can: a thread of it, in a slow read, would take a block
        # from the next.
        if not self._iter_for_state_dict:
            end_engines(self.root)
        iterator: Iterator[Batch] = super().__iter__()
        return iterator

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


def build(reading: Reading, *, sized: bool = True) -> CriteoLoader:
    """Return a loader over Criteo files, as in ``build(Reading(files, 128))``; each ``iter()`` is one epoch.

    Args:
        reading: what to read; the stages that have workers are `STAGES`.
        sized: count the rows (one pass over the files, about 1 GB/s) when the length is asked for.

    Raises:
        ConfigError: with all problems at once.
        MissingPackage: what a format or the kernel needs is not installed.
    """
    reading.check(STAGES)
    refs, parse = reading.refs(), Parse(reading.moduli, reading.chosen, reading.on_bad_row, reading.kernel)
    node: BaseNode[Any] = References(refs, shuffle=reading.is_shuffled, seed=reading.seed)
    node = ParallelMapper(node, Read(reading.latency_s, reading.reader()), num_workers=reading.threads("read"))
    node = ParallelMapper(node, parse, num_workers=reading.threads("parse"))
    node = ParallelMapper(node, Shuffle(reading.seed, reading.is_shuffled), num_workers=reading.threads("shuffle"))
    batcher = Batcher(node, reading.batch_size, drop_last=reading.drops_last)
    node = ParallelMapper(batcher, collate, num_workers=reading.threads("collate"))
    batches = partial(reading.batches, refs) if sized and reading.on_bad_row == "error" else None
    return CriteoLoader(Prefetcher(node, reading.prefetch), batches, batcher)
