"""One rank's share of the Criteo pipeline: its rows of every batch that all ranks make together.

    references -> read -> place -> parse -> Share -> collate -> Prefetcher

Of every batch of B rows, exactly the batch `pipeline.build` gives at that place, rank r of W gets the rows r B / W to
(r + 1) B / W - 1. Every rank reads all blocks, but parses its own rows only: reading text is cheap, parsing is not. Of
Parquet every rank also decodes all row groups, since Arrow decodes no less, and converts its own rows only.
The state is the same on all ranks, and does not depend on how many they are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode, ParallelMapper, Prefetcher

from dlrm_examples.criteo.blocks import Split, row_offsets, row_order
from dlrm_examples.criteo.formats import parse_selected
from dlrm_examples.criteo.pipeline import CriteoLoader
from dlrm_examples.criteo.reading import Reading
from dlrm_examples.criteo.stages import Read, References, Task, collate
from dlrm_examples.criteo.tsv import Rows
from intune_callbacks.config import number_problem

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
    reading: Reading
    rank: int
    world: int

    def __call__(self, placed: Placed) -> Placed:
        task, offsets, asked = placed.task, placed.content, self.reading
        count, share = len(offsets), asked.batch_size // self.world
        order = row_order(count, asked.seed, task.epoch, task.index) if asked.is_shuffled else np.arange(count)
        positions = np.arange(placed.first, placed.end)
        own = order[positions % asked.batch_size // share == self.rank]
        wanted = np.sort(offsets[own])
        rows = parse_selected(
            task.content, asked.moduli, select=lambda lines: np.isin(lines, wanted), kernel=asked.kernel
        )
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


def build(reading: Reading, rank: int, world: int) -> CriteoLoader:
    """Return a rank's loader over Criteo files; each ``iter()`` is one epoch.

    A malformed row is an error on the rank whose row it is.

    Args:
        reading: what to read, the same on all ranks; its batches are those of all ranks together, its workers those of
            `STAGES`.
        rank: this rank, from 0.
        world: how many ranks there are; they share a batch equally.

    Raises:
        ConfigError: with all problems at once.
    """
    problems = [*number_problem("world", world, 1, 1 << 16)] or [*number_problem("rank", rank, 0, world - 1)]
    if not problems and reading.batch_size % world:
        problems.append(
            f"batch_size={reading.batch_size}: expected a multiple of world={world}; all ranks get equally many rows"
        )
    if reading.on_bad_row == "skip":
        problems.append("on_bad_row='skip': ranks that share batches cannot leave rows out; expected error")
    reading.check(STAGES, problems=problems)
    refs, read = reading.refs(), ReadRows(Read(reading.latency_s, reading.reader()), reading.chosen)
    node: BaseNode[Any] = References(refs, shuffle=reading.is_shuffled, seed=reading.seed)
    node = Place(ParallelMapper(node, read, num_workers=reading.threads("read")))
    node = ParallelMapper(node, ParseShare(reading, rank, world), num_workers=reading.threads("parse"))
    node = Share(node, reading.batch_size, rank, world, drop_last=reading.drops_last)
    node = ParallelMapper(node, collate, num_workers=reading.threads("collate"))
    return CriteoLoader(Prefetcher(node, reading.prefetch), partial(reading.batches, refs))
