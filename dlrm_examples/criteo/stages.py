"""The stages of the Criteo pipeline: what a torchdata.nodes graph is made of.

Everything before the batcher works on blocks of thousands of rows, so no stage loops over rows. What is random
belongs to the item (seed, epoch, block number), never to a worker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict

import torch
from torchdata.nodes import BaseNode

from dlrm_examples.criteo.blocks import Split, row_order
from dlrm_examples.criteo.formats import Reader, Ref, epoch_order, parse
from dlrm_examples.criteo.parse import warm_up
from dlrm_examples.criteo.tsv import Rows

__all__ = ["Batch", "Batcher", "Parse", "Read", "References", "Shuffle", "Task", "collate"]


class Batch(TypedDict):
    """What the model gets: dense [B, 13] float32, categories [B, 26] int32, labels [B] float32."""

    dense: torch.Tensor
    categories: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """A block on its way: what it is, and what its random state is drawn from.

    Args:
        epoch: counts from 0.
        index: number of the block in the files' own order.
        content: a reference, then a `Block` or a row group, then `Rows`.
    """

    epoch: int
    index: int
    content: Any


class References(BaseNode[Task]):  # type: ignore[misc]
    """The blocks of one epoch in an order drawn from (seed, epoch); every reset without a state is the next epoch."""

    def __init__(self, refs: Sequence[Ref], *, shuffle: bool, seed: int) -> None:
        super().__init__()
        self.refs, self.shuffle, self.seed = refs, shuffle, seed
        self.epoch, self.position = -1, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"epoch": self.epoch + 1, "position": 0}
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = epoch_order(self.refs, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)

    def next(self) -> Task:
        if self.position >= len(self.order):
            raise StopIteration
        index = int(self.order[self.position])
        self.position += 1
        return Task(self.epoch, index, self.refs[index])

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}


@dataclass(frozen=True)
class Read:
    """Read a block; `latency_s` more than the disk needs, to stand for a network file system."""

    __name__: ClassVar[str] = "read"
    latency_s: float = 0.0
    reader: Reader = field(default_factory=Reader, compare=False)

    def __call__(self, task: Task) -> Task:
        if self.latency_s and self.reader.cached(task.content, checked=False) is None:
            time.sleep(self.latency_s)
        return Task(task.epoch, task.index, self.reader(task.content))


@dataclass(frozen=True)
class Parse:
    """Parse those lines of a block that belong to the split."""

    __name__: ClassVar[str] = "parse"
    table_rows: tuple[int, ...]
    split: Split
    on_bad_row: str = "error"
    kernel: str | None = None

    def __post_init__(self) -> None:
        # Here, not in the workers: each of them would wait for the compiler at its first block.
        warm_up(self.kernel)

    def __call__(self, task: Task) -> Task:
        rows = parse(task.content, self.table_rows, on_bad_row=self.on_bad_row, split=self.split, kernel=self.kernel)
        return Task(task.epoch, task.index, rows)


@dataclass(frozen=True)
class Shuffle:
    """Permute the rows of a block by a permutation drawn from (seed, epoch, block number)."""

    __name__: ClassVar[str] = "shuffle"
    seed: int
    enabled: bool = True

    def __call__(self, task: Task) -> Rows:
        rows: Rows = task.content
        if not self.enabled:
            return rows
        return rows.take(row_order(len(rows), self.seed, task.epoch, task.index))


class Batcher(BaseNode[tuple[Rows, ...]]):  # type: ignore[misc]
    """Cut a stream of `Rows` of any sizes into batches of exactly `batch_size` rows, each a tuple of views.

    The state is the source's state before the oldest block that is not used up, and how many of its rows are: small,
    and exact at every batch.

    Attributes:
        skipped: malformed rows left out since the beginning of the epoch; exact when it has ended, before that with
            those of the blocks read ahead.
        skipped_before: malformed rows left out in the epochs before that went to their end, since this node was made.
    """

    def __init__(self, source: BaseNode[Rows], batch_size: int, *, drop_last: bool = False) -> None:
        super().__init__()
        self.source, self.batch_size, self.drop_last = source, batch_size, drop_last
        self._open: deque[tuple[dict[str, Any], int, Rows]] = deque()
        self._used = self.skipped = self.skipped_before = 0
        self._ended = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._open.clear()
        self._used = initial_state["used"] if initial_state else 0
        # Lightning makes an iterator it does not use, whose first blocks are read ahead.
        self.skipped_before += self.skipped if self._ended else 0
        self._ended = False
        self.skipped = initial_state["skipped"] if initial_state else 0
        self.source.reset(initial_state["source"] if initial_state else None)

    def next(self) -> tuple[Rows, ...]:
        while self._available() < self.batch_size and self._fetch():
            pass
        wanted = min(self.batch_size, self._available())
        if wanted <= 0 or (self.drop_last and wanted < self.batch_size):
            raise StopIteration
        parts = []
        while wanted:
            rows = self._open[0][2]
            part = rows.take(slice(self._used, self._used + wanted))
            parts.append(part)
            wanted -= len(part)
            self._used += len(part)
            if self._used == len(rows):
                self._open.popleft()
                self._used = 0
        return tuple(parts)

    def get_state(self) -> dict[str, Any]:
        source, skipped = self._open[0][:2] if self._open else (self.source.state_dict(), self.skipped)
        return {"source": source, "used": self._used, "skipped": skipped}

    def _available(self) -> int:
        return sum(len(rows) for *_, rows in self._open) - self._used

    def _fetch(self) -> bool:
        before, skipped = self.source.state_dict(), self.skipped
        try:
            rows = next(self.source)
        except StopIteration:
            self._ended = True
            return False
        self.skipped += rows.skipped
        if len(rows):
            self._open.append((before, skipped, rows))
        return True


def collate(parts: tuple[Rows, ...]) -> Batch:
    """Join the parts of a batch and hand them over as tensors."""
    rows = Rows.joined(parts)
    return {
        "dense": torch.from_numpy(rows.dense),
        "categories": torch.from_numpy(rows.categories),
        "labels": torch.from_numpy(rows.labels),
    }
