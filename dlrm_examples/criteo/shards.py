"""One rank's share of the Criteo pipeline: its rows of every batch that all ranks make together.

    references -> read -> place -> parse -> Share -> collate -> Prefetcher

Of every batch of B rows, exactly the batch `pipeline.build` gives at that place, rank r of W gets the rows r B / W to
(r + 1) B / W - 1. Every rank reads all blocks, but parses its own rows only: reading text is cheap, parsing is not. Of
Parquet every rank also decodes all row groups, since Arrow decodes no less, and converts its own rows only.
The state is the same on all ranks, and does not depend on how many they are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode, ParallelMapper, Prefetcher

from dlrm_examples.criteo.arguments import checked
from dlrm_examples.criteo.blocks import Split, row_offsets, row_order
from dlrm_examples.criteo.formats import count_rows, parse_selected, scan
from dlrm_examples.criteo.pipeline import CriteoLoader
from dlrm_examples.criteo.stages import Read, References, Task, collate
from dlrm_examples.criteo.tsv import Rows
from intune_callbacks.config import number_problem
from intune_callbacks.errors import ConfigError

__all__ = ["STAGES", "build"]

STAGES = ("read", "parse", "collate")


@dataclass(frozen=True, slots=True)
class Placed:
    """Something of a block, and where the block's rows are in the epoch's stream of rows of all ranks.

    Args:
        task: the block.
        first: number of its first row.
        end: number of the row after its last one.
        content: the offsets of its rows [rows], then this rank's `Rows` in the order of the stream.
    """

    task: Task
    first: int
    end: int
    content: Any


@dataclass(frozen=True)
class ReadRows:
    """Read a block, or a row group, and find which of its rows are of the split."""

    __name__: ClassVar[str] = "read"
    read: Read
    split: Split

    def __call__(self, task: Task) -> tuple[Task, npt.NDArray[np.int64]]:
        read = self.read(task)
        offsets = row_offsets(read.content)
        return read, offsets[self.split.select(read.content.path, offsets)]


class Place(BaseNode[Placed]):  # type: ignore[misc]
    """Number the rows of the stream; the next epoch begins with 0 again."""

    def __init__(self, source: BaseNode[tuple[Task, npt.NDArray[np.int64]]]) -> None:
        super().__init__()
        self.source, self.end = source, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.end = initial_state["end"] if initial_state else 0
        self.source.reset(initial_state["source"] if initial_state else None)

    def next(self) -> Placed:
        task, rows = next(self.source)
        first, self.end = self.end, self.end + len(rows)
        return Placed(task, first, self.end, rows)

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "end": self.end}


@dataclass(frozen=True)
class ParseShare:
    """Parse this rank's rows of a block, and put them into the order of the stream."""

    __name__: ClassVar[str] = "parse"
    table_rows: tuple[int, ...]
    seed: int
    shuffled: bool
    batch_size: int
    rank: int
    world: int

    def __call__(self, placed: Placed) -> Placed:
        task, offsets = placed.task, placed.content
        count, share = len(offsets), self.batch_size // self.world
        order = row_order(count, self.seed, task.epoch, task.index) if self.shuffled else np.arange(count)
        positions = np.arange(placed.first, placed.end)
        own = order[positions % self.batch_size // share == self.rank]
        wanted = np.sort(offsets[own])
        rows = parse_selected(task.content, self.table_rows, select=lambda lines: np.isin(lines, wanted))
        # Parsed in the order of the file: back to that of the stream. The text, or the row group, is done with.
        return Placed(
            Task(task.epoch, task.index, None), placed.first, placed.end, rows.take(np.argsort(np.argsort(own)))
        )


class Share(BaseNode[tuple[Rows, ...]]):  # type: ignore[misc]
    """Cut the stream into batches; give this rank's rows of each as a tuple of views.

    A batch is complete, or known to be the last one, before any rank gets its part: all ranks get equally many. Of a
    smaller last batch some ranks may get no row.

    Args:
        source: the blocks, with this rank's rows.
        batch_size: rows of a batch of all ranks.
        rank: from 0.
        world: how many ranks there are.
        drop_last: leave out a smaller last batch.
    """

    def __init__(self, source: BaseNode[Placed], batch_size: int, rank: int, world: int, *, drop_last: bool) -> None:
        super().__init__()
        self.source, self.batch_size, self.rank, self.world = source, batch_size, rank, world
        self.drop_last = drop_last
        self._open: deque[tuple[dict[str, Any], Placed]] = deque()
        self.batches = self._end = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._open.clear()
        self.batches = initial_state["batches"] if initial_state else 0
        self._end = self.batches * self.batch_size
        self.source.reset(initial_state["source"] if initial_state else None)

    def next(self) -> tuple[Rows, ...]:
        begin = self.batches * self.batch_size
        end = begin + self.batch_size
        while self._end < end and self._fetch():
            pass
        if self._end <= begin or (self.drop_last and self._end < end):
            raise StopIteration
        parts = [self._part(placed, begin, end) for _, placed in self._open]
        self.batches += 1
        while self._open and self._open[0][1].end <= end:
            self._open.popleft()
        return tuple([part for part in parts if len(part)] or parts[:1])

    def get_state(self) -> dict[str, Any]:
        source = self._open[0][0] if self._open else self.source.state_dict()
        return {"source": source, "batches": self.batches}

    def _fetch(self) -> bool:
        before = self.source.state_dict()
        try:
            placed = next(self.source)
        except StopIteration:
            return False
        self._end = placed.end
        self._open.append((before, placed))
        return True

    def _part(self, placed: Placed, begin: int, end: int) -> Rows:
        """Return this rank's rows among the rows begin .. end - 1 of the stream, as far as they are in the block."""
        skipped, first, last = (
            self._own(row) for row in (placed.first, max(begin, placed.first), min(end, placed.end))
        )
        rows: Rows = placed.content
        return rows.take(slice(first - skipped, last - skipped))

    def _own(self, row: int) -> int:
        """Return how many of the stream's first `row` rows are this rank's."""
        share = self.batch_size // self.world
        batches, rest = divmod(row, self.batch_size)
        return batches * share + min(max(rest - self.rank * share, 0), share)


def build(
    paths: Iterable[str | os.PathLike[str]],
    batch_size: int,
    rank: int,
    world: int,
    *,
    table_rows: int | Sequence[int] = 100_000,
    split: str = "train",
    test_fraction: float = 0.1,
    seed: int = 0,
    workers: Mapping[str, int] | None = None,
    prefetch: int = 2,
    read_latency_ms: float = 0.0,
    block_bytes: int = 1 << 18,
) -> CriteoLoader:
    """Return a rank's loader over Criteo files; each ``iter()`` is one epoch.

    The training split is shuffled and its last smaller batch left out; the test split is neither. A malformed row is
    an error on the rank whose row it is.

    Args:
        paths: the files, as for `pipeline.build`, the same on all ranks.
        batch_size: rows per batch of all ranks together.
        rank: this rank, from 0.
        world: how many ranks there are; they share a batch equally.
        workers: threads for the stages read, parse and collate; 1 where not given, 0 runs a stage inline.
        table_rows, split, test_fraction, seed, prefetch, read_latency_ms, block_bytes: as for `pipeline.build`.

    Raises:
        ConfigError: with all problems at once.
    """
    problems = [*number_problem("world", world, 1, 1 << 16)] or [*number_problem("rank", rank, 0, world - 1)]
    if not problems and batch_size % world:
        problems.append(
            f"batch_size={batch_size}: expected a multiple of world={world}; all ranks get equally many rows"
        )
    try:
        files, moduli, threads = checked(
            paths, batch_size, table_rows, split, test_fraction, seed, workers, prefetch, read_latency_ms, block_bytes,
            "error", None, stages=STAGES,
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    chosen = Split(split, test_fraction, seed)
    refs = scan(files, block_bytes)
    train = split == "train"
    node: BaseNode[Any] = References(refs, shuffle=train, seed=seed)
    node = ParallelMapper(node, ReadRows(Read(read_latency_ms / 1e3), chosen), num_workers=threads["read"])
    parse = ParseShare(moduli, seed, train, batch_size, rank, world)
    node = ParallelMapper(Place(node), parse, num_workers=threads["parse"])
    node = Share(node, batch_size, rank, world, drop_last=train)
    node = ParallelMapper(node, collate, num_workers=threads["collate"])

    def batches() -> int:
        rows = count_rows(refs, chosen)
        return rows // batch_size if train else -(-rows // batch_size)

    return CriteoLoader(Prefetcher(node, prefetch), batches)
