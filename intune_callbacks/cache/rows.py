"""What all processes of a node have seen of each function whose results are kept: one row in the arena."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.header import ROWS_AT, ROWS_END

__all__ = ["CacheUse", "Row", "Rows"]

ROW, WHY_NOT_AT = struct.Struct("<16s64s160s5Q2d"), 80


@dataclass(frozen=True, slots=True)
class Row:
    """One function.

    Args:
        name: as its module calls it.
        why_not: why its results are not kept any more, empty while they are.
        hits: calls answered from memory.
        misses: calls computed while its results were kept.
        kept: results put into memory, those given back since included.
        kept_bytes: of these.
        checked: results computed twice, all of them the same.
        computed_s: wall seconds of the misses.
        taken_s: wall seconds of the hits.
    """

    name: str
    why_not: str = ""
    hits: int = 0
    misses: int = 0
    kept: int = 0
    kept_bytes: int = 0
    checked: int = 0
    computed_s: float = 0.0
    taken_s: float = 0.0

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All of it but the words."""
        return (self.hits, self.misses, self.kept, self.kept_bytes, self.checked, self.computed_s, self.taken_s)

    @property
    def saved_s(self) -> float:
        """Seconds of work that hits did without."""
        return self.hits * self.computed_s / self.misses - self.taken_s if self.misses else 0.0

    def plus(self, more: Row) -> Row:
        """Return the sum; the first reason stays."""
        numbers = (a + b for a, b in zip(self.numbers, more.numbers, strict=True))
        return Row(self.name, self.why_not or more.why_not, *numbers)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a training kept in memory.

    Args:
        used_bytes: in use at its end.
        limit_bytes: that it could have had then.
        why_not: why nothing was kept, or nothing more; empty where memory was the limit.
        functions: those that were marked and called.
    """

    used_bytes: int
    limit_bytes: int
    why_not: str = ""
    functions: tuple[Row, ...] = ()


class Rows:
    """The rows of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __iter__(self) -> Iterator[Row]:
        for at in range(ROWS_AT, ROWS_END - ROW.size + 1, ROW.size):
            owner, row = _unpacked(self._arena.read(at, ROW.size))
            if any(owner):
                yield row

    def place(self, owner: bytes, name: str) -> int | None:
        """Return where the row of a function is, made if it is not there; None without room, or for now.

        Args:
            owner: 16 bytes that tell it from others.
            name: as its module calls it.
        """
        for at in range(ROWS_AT, ROWS_END - ROW.size + 1, ROW.size):
            taken: list[bytes] = []

            def take(raw: bytes, taken: list[bytes] = taken) -> bytes | None:
                known, _ = _unpacked(raw)
                taken.append(known if any(known) else owner)
                return None if any(known) else _packed(owner, Row(name))

            known, _ = _unpacked(self._arena.read(at, ROW.size))
            if any(known) and known != owner:
                continue
            if known != owner and not self._arena.change(at, ROW.size, take):
                return None
            if known == owner or taken == [owner]:
                return at
        return None

    def read(self, at: int) -> Row:
        """Return the row at a place."""
        return _unpacked(self._arena.read(at, ROW.size))[1]

    def refuse(self, name: str, why: str) -> None:
        """Have no result of a function kept any more.

        Args:
            name: as its module calls it.
            why: a sentence.
        """
        for at in range(ROWS_AT, ROWS_END - ROW.size + 1, ROW.size):
            if self.read(at).name == name:
                self.add(at, Row(name, why))

    def is_refused(self, at: int) -> bool:
        """Return whether some process has said why the results of a function are not kept."""
        return self._arena.read(at + WHY_NOT_AT, 1) != b"\0"

    def add(self, at: int, more: Row) -> bool:
        """Add up what one process has seen; False where another one was in the way."""

        def added(raw: bytes) -> bytes:
            owner, row = _unpacked(raw)
            return _packed(owner, row.plus(more))

        return self._arena.change(at, ROW.size, added)


def _packed(owner: bytes, row: Row) -> bytes:
    texts = [text.encode("utf-8", "replace")[:size] for text, size in ((row.name, 64), (row.why_not, 160))]
    return ROW.pack(owner, *texts, *row.numbers)


def _unpacked(raw: bytes) -> tuple[bytes, Row]:
    owner, name, why_not, *numbers = ROW.unpack(raw.ljust(ROW.size, b"\0"))
    texts = [text.rstrip(b"\0").decode("utf-8", "replace") for text in (name, why_not)]
    return owner, Row(*texts, *numbers)
