"""The first bytes of an arena: how much it may hold, and what of it is there."""

from __future__ import annotations

import secrets
import struct

__all__ = ["HEADER_BYTES", "READ_BYTES", "ROWS_AT", "ROWS_END", "Header"]

# The header: a magic word, the arena's own, the limit, the end of the last value, entries, bytes of holes, the holes.
MAGIC = b"intune01"
HEADER, HOLES_AT, MOST_HOLES, HEADER_BYTES = struct.Struct("<8s16s6Q"), 128, 16, 16384
ROWS_AT, ROWS_END = 1024, HEADER_BYTES - 8
"""Where in the header others may keep what they like."""
HOLES = struct.Struct(f"<{2 * MOST_HOLES}Q")
READ_BYTES = HOLES_AT + HOLES.size


class Header:
    """The numbers of an arena at one moment.

    Args:
        raw: the first bytes of the file.

    Attributes:
        token: by which it is told from others.
        limit_bytes: that values and index may hold.
        stop_bytes: memory in use on this machine, or in this container, from which on nothing more comes in.
        end: where the next value goes, from the begin of the values.
        entries: values that were put, those given back included.
        hole_bytes: of what was given back.
        closed: no value is to be had any more.
        holes: from where to where nothing is any more.
    """

    def __init__(self, raw: bytes) -> None:
        magic, self.token, *numbers = HEADER.unpack_from(raw)
        self.limit_bytes, self.stop_bytes, self.end, self.entries, self.hole_bytes, closed = numbers
        self.closed = bool(closed) or magic != MAGIC
        borders = HOLES.unpack_from(raw, HOLES_AT)
        self.holes = tuple(pair for pair in zip(borders[::2], borders[1::2], strict=True) if pair[1])

    @classmethod
    def new(cls) -> Header:
        """Return that of an empty arena."""
        return cls(HEADER.pack(MAGIC, secrets.token_bytes(16), *[0] * 6).ljust(READ_BYTES, b"\0"))

    def has(self, place: int, size: int) -> bool:
        """Return whether a value is still there."""
        return not self.closed and all(place + size <= begin or place >= end for begin, end in self.holes)

    def pack(self) -> bytes:
        """Return what stands in the file."""
        numbers = (
            *(self.limit_bytes, self.stop_bytes, self.end, self.entries),
            *(self.hole_bytes, int(self.closed)),
        )
        borders = [border for hole in self.holes for border in hole]
        holes = HOLES.pack(*borders, *[0] * (2 * MOST_HOLES - len(borders)))
        return HEADER.pack(MAGIC, self.token, *numbers).ljust(HOLES_AT, b"\0") + holes

    def cut(self, too_much: int) -> None:
        """Have holes where the last values are, of so many bytes or more."""
        end, holes = self.end, sorted(self.holes)
        while too_much > 0 and end > 0:
            if holes and holes[-1][1] >= end:
                end = holes.pop()[0]
                continue
            begin = max(holes[-1][1] if holes else 0, end - too_much)
            too_much -= end - begin
            self.hole_bytes += end - begin
            end = begin
        while len(holes) >= MOST_HOLES and end > 0:  # no room for one more: up to the hole before
            begin, hole_end = holes.pop()
            self.hole_bytes += end - hole_end
            end = begin
        self.holes = (*holes, (end, self.end))
