"""Values by key in memory that the processes of a node share; readers take no lock, and writers do not wait for one.

The memory is an anonymous file (``memfd``): it ends with the last process that has it open, however that ends, and
nobody's resident memory grows with what all of them read. What cannot be had at once is not had: a key that is not
found, a lock that somebody holds, a full arena are all the same to the caller, who computes the value.

Values are laid one behind the other, and a place is never used again: what is given back is a hole in the file. So a
reader who has copied a value and finds that no hole has come over it, has a whole one.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from intune_callbacks.cache.header import HEADER_BYTES, READ_BYTES, Header
from intune_callbacks.cache.index import Index
from intune_callbacks.cache.lock import Lock
from intune_callbacks.pipelines.workers.wire import loaded

__all__ = ["Arena"]

PAGE_BYTES = 4096
KEEP_SIZE_PUNCH_HOLE = 1 | 2  # linux/falloc.h
LIMIT_WAIT_S = 0.05  # the same for the trainer, which asks again at its next decision
MOST_VALUE_BYTES = 2**32 - 1


class Arena:
    """One arena, as this process sees it; usable from any thread, and in processes forked from this one.

    Args:
        path: of the file of one that is there; None makes one.
        token: of the one that is meant.
        room_bytes: that it can ever have; by this the index is sized.

    Attributes:
        address: process and descriptor under which others find it, and its token.

    Raises:
        FileNotFoundError: it is not the one that is meant.
        OSError: there is none, or this system has no such memory.
    """

    def __init__(self, path: str | None = None, token: bytes | None = None, room_bytes: int = 0) -> None:
        if path is None:
            self._descriptor = os.memfd_create("intune-cache", os.MFD_CLOEXEC)
            self._path = f"/proc/self/fd/{self._descriptor}"
            head = Header.new()
            os.pwrite(self._descriptor, head.pack(), 0)
            os.pwrite(self._descriptor, struct.pack("<Q", Index.slots_for(room_bytes)), HEADER_BYTES - 8)
        else:
            self._path = path
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            head = self.header()
            if head.closed or token != head.token:
                os.close(self._descriptor)
                raise FileNotFoundError(f"{path} is not the cache that was meant")
        self._process, self._is_own = os.getpid(), path is None
        (slots,) = struct.unpack("<Q", os.pread(self._descriptor, 8, HEADER_BYTES - 8))
        self._index = Index(self._descriptor, slots)
        self._values_at = HEADER_BYTES + self._index.size_bytes
        self.token, self._lock = head.token, Lock(self._descriptor)
        self._lock.acquire()  # locks of this kind may be missing
        self._lock.release()

    @property
    def address(self) -> str:
        return f"{self._process}:{self._descriptor}:{self.token.hex()}"

    @classmethod
    def at(cls, address: str) -> Arena:
        """Return the arena at an address that another process gave.

        Raises:
            OSError: it is not there any more, or may not be opened.
            ValueError: this is no address.
        """
        process, descriptor, token = address.split(":")
        return cls(f"/proc/{int(process)}/fd/{int(descriptor)}", bytes.fromhex(token))

    def header(self) -> Header:
        """Return its numbers now."""
        return Header(os.pread(self._descriptor, READ_BYTES, 0))

    def used_bytes(self, head: Header | None = None) -> int:
        """Return the memory it holds: values, and the pages of the index that were touched."""
        head = head or self.header()
        index_bytes = min(head.entries * PAGE_BYTES, self._index.size_bytes)
        return int(head.end - head.hole_bytes + index_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is kept and nothing may be."""
        head = self.header()
        return head.closed or not (head.limit_bytes or head.entries)

    def get(self, key: bytes) -> tuple[Any] | None:
        """Return a copy of a value, in a tuple; None where there is none.

        Args:
            key: 16 bytes, evenly distributed.
        """
        found = self._index.find(key)
        if found is None:
            return None
        place, size = found
        head = self.header()
        if not head.has(place, size):
            return None
        at = self._values_at + place
        try:
            value = loaded(lambda memory, begin: self._read(memory, at + begin), size)
        except Exception:
            if self.header().has(place, size):
                raise
            return None
        return (value,) if self.header().has(place, size) else None

    def has_room(self, size: int, head: Header | None = None) -> bool:
        """Return whether a value of so many bytes may be put."""
        head = head or self.header()
        return not head.closed and self.used_bytes(head) + size + PAGE_BYTES <= head.limit_bytes

    def put(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Keep a value, if there is room for it and nobody is in the way.

        Args:
            key: 16 bytes, evenly distributed.
            parts: the value, as `packed` returns it.

        Returns:
            Whether it can be had from now on, by whoever put it.
        """
        size = sum(part.nbytes for part in parts)
        if size > MOST_VALUE_BYTES or not self.has_room(size) or not self._lock.acquire():
            return False
        try:
            head = self.header()
            if not self.has_room(size, head):
                return False
            slot = self._index.free_slot(key, head.has)
            if slot is None:
                return False
            if slot < 0:
                return True
            place = head.end
            head.end += size
            self._write_head(head)
        finally:
            self._lock.release()
        try:
            self._write(parts, self._values_at + place)
        except OSError:  # no memory, or no more of this file may be written
            self._punch(place, place + size)
            return False
        return self._publish(key, place, size)

    def limit(self, limit_bytes: int, stop_bytes: int | None = None) -> bool:
        """Let it hold so much and no more; what is too much is given back, the last values first.

        Args:
            limit_bytes: of values and index.
            stop_bytes: see `Header`; None leaves it as it is.

        Returns:
            False where another process was in the way; then nothing has changed.
        """
        if not self._lock.acquire(LIMIT_WAIT_S):
            return False
        try:
            head = self.header()
            head.limit_bytes = max(0, int(limit_bytes))
            head.stop_bytes = head.stop_bytes if stop_bytes is None else stop_bytes
            too_much = self.used_bytes(head) - head.limit_bytes
            before = head.holes
            if too_much > 0:
                head.cut(too_much)
            is_empty = head.hole_bytes >= head.end
            head.entries = 0 if is_empty else head.entries
            self._write_head(head)
            if is_empty:
                _punch_hole(self._descriptor, HEADER_BYTES, self._index.size_bytes)
        finally:
            self._lock.release()
        for hole in head.holes:
            if hole not in before:
                self._punch(*hole)
        return True

    def freeze(self) -> bool:
        """Let nothing more come in, and keep what is there; False where another process was in the way."""
        if not self._lock.acquire(LIMIT_WAIT_S):
            return False
        try:
            head = self.header()
            head.limit_bytes = min(head.limit_bytes, self.used_bytes(head))
            self._write_head(head)
            return True
        finally:
            self._lock.release()

    def read(self, at: int, size: int) -> bytes:
        """Return a part of the header that is others'."""
        return os.pread(self._descriptor, size, at)

    def change(self, at: int, size: int, changed: Callable[[bytes], bytes | None]) -> bool:
        """Change a part of the header that is others'.

        Args:
            at: between `ROWS_AT` and `ROWS_END`, and so is its end.
            changed: returns what is to stand there instead, None for what does.

        Returns:
            False where another process was in the way.
        """
        if not self._lock.acquire():
            return False
        try:
            instead = changed(self.read(at, size))
            if instead is not None:
                os.pwrite(self._descriptor, instead, at)
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give all of it back, also where other processes go on holding it open."""
        if self._is_own and os.getpid() == self._process:
            head = self.header()
            head.closed, head.limit_bytes = True, 0
            with suppress(OSError):
                self._write_head(head)
                os.ftruncate(self._descriptor, HEADER_BYTES)

    def __del__(self) -> None:
        # Not before: another thread might read or write by a number that is somebody else's then.
        with suppress(OSError, AttributeError):
            os.close(self._descriptor)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _publish(self, key: bytes, place: int, size: int) -> bool:
        if not self._lock.acquire():
            self._punch(place, place + size)
            return False
        try:
            head = self.header()
            slot = self._index.free_slot(key, head.has)
            if slot is not None and slot >= 0 and head.has(place, size):
                self._index.write(slot, key, place, size)
                head.entries += 1
                self._write_head(head)
                return True
        finally:
            self._lock.release()
        self._punch(place, place + size)  # given back, or put by another one meanwhile
        return slot == -1

    def _punch(self, begin: int, end: int) -> None:
        """Give the memory of a part of the file back: only whole pages can be, so of its borders a part stays."""
        first = -(-(self._values_at + begin) // PAGE_BYTES) * PAGE_BYTES
        last = (self._values_at + end) // PAGE_BYTES * PAGE_BYTES
        if last > first:
            _punch_hole(self._descriptor, first, last - first)

    def _write(self, parts: Sequence[memoryview], at: int) -> None:
        pending = list(parts)
        while pending:
            written = os.pwritev(self._descriptor, pending[:512], at)
            at += written
            while pending and written >= pending[0].nbytes:
                written -= pending.pop(0).nbytes
            if written:
                pending[0] = pending[0][written:]

    def _read(self, memory: memoryview, at: int) -> None:
        done = 0
        while done < memory.nbytes:
            got = os.preadv(self._descriptor, [memory[done:]], at + done)
            if not got:
                raise EOFError
            done += got

    def _write_head(self, head: Header) -> None:
        os.pwrite(self._descriptor, head.pack(), 0)


def _punch_hole(descriptor: int, begin: int, size: int) -> None:
    """See https://man7.org/linux/man-pages/man2/fallocate.2.html; Python has only `os.posix_fallocate`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(size)):
        raise OSError(ctypes.get_errno(), "memory of the cache could not be given back")
