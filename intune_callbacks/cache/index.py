"""Where in an arena the values are: places by key, in a table of fixed size that needs no lock to be read."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable

from intune_callbacks.cache.header import HEADER_BYTES

__all__ = ["Index"]

# A slot of the index: key, place, size, and a sum over them by which one that is half written is seen.
SLOT = struct.Struct("<16sQII")
NEAR_SLOTS = 8
"""Slots read at once; a key is in one of these or nowhere, so that no search is long."""
BYTES_PER_SLOT, FEWEST_SLOTS, MOST_SLOTS = 1 << 14, 1 << 14, 1 << 24
"""A choice: what is worth keeping has 16 KB or more; with two slots for each value most keys find one."""


class Index:
    """The table of an arena.

    Args:
        descriptor: of the file.
        slots: that it has.
    """

    def __init__(self, descriptor: int, slots: int) -> None:
        self._descriptor, self._slots = descriptor, slots
        self.size_bytes: int = slots * SLOT.size

    @staticmethod
    def slots_for(room_bytes: int) -> int:
        """Return how many slots an arena needs that can have so much memory."""
        slots = FEWEST_SLOTS
        while slots < min(MOST_SLOTS, 2 * room_bytes // BYTES_PER_SLOT):
            slots *= 2
        return slots

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return place and size of the value last put under a key; None where there was none."""
        near = os.pread(self._descriptor, NEAR_SLOTS * SLOT.size, self._slot_at(key))
        for at in range(0, len(near) - SLOT.size + 1, SLOT.size):
            if near.startswith(key, at):
                _, place, size, check = SLOT.unpack_from(near, at)
                if check == _check(near[at : at + SLOT.size - 4]):
                    return place, size
        return None

    def _slot_at(self, key: bytes) -> int:
        number = int.from_bytes(key[:8], "little") % (self._slots - NEAR_SLOTS)
        return int(HEADER_BYTES + number * SLOT.size)

    def free_slot(self, key: bytes, is_alive: Callable[[int, int], bool]) -> int | None:
        """Return where a slot is free for a key: -1 where the key has one that is alive, None where none is free.

        Args:
            key: 16 bytes, evenly distributed.
            is_alive: whether there is still a value of some size at some place.
        """
        first = self._slot_at(key)
        near = os.pread(self._descriptor, NEAR_SLOTS * SLOT.size, first).ljust(NEAR_SLOTS * SLOT.size, b"\0")
        free = None
        for at in range(0, len(near), SLOT.size):
            known, place, size, check = SLOT.unpack_from(near, at)
            is_there = check and check == _check(near[at : at + SLOT.size - 4]) and is_alive(place, size)
            if is_there and known == key:
                return -1
            if not is_there and free is None:
                free = first + at
        return free

    def write(self, slot: int, key: bytes, place: int, size: int) -> None:
        """Have a key lead to a value; of a slot that is half written the sum is wrong."""
        entry = SLOT.pack(key, place, size, 0)[:-4]
        os.pwrite(self._descriptor, entry + struct.pack("<I", _check(entry)), slot)


def _check(entry: bytes) -> int:
    return zlib.crc32(entry) or 1
