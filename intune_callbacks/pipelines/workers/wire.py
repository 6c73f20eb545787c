"""Whole messages over one private pipe, arrays by value and without a copy too many.

Arrays travel out of band (pickle protocol 5): written from and read into their own memory with one copy each way, no
shared-memory file, no descriptor to leak, nothing lost when a child is retired.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

__all__ = ["ALIGNED_BYTES", "OUT_OF_BAND_BYTES", "ByType", "Reducer", "Wire", "loaded", "packed"]

# How often a waiting side looks whether the other one is still alive: pipe ends inherited by children forked later
# make the end-of-file of a dead process unreliable.
POLL_MS = 500
# Below this an array is cheaper inside the pickle than as a buffer of its own.
OUT_OF_BAND_BYTES = 4096
MAX_BUFFERS = 500  # a write of many parts takes at most 1,024 (IOV_MAX)
READ_BYTES = 1 << 16  # what a pipe holds on Linux
# Where a buffer begins, as torch's memory does: by that some kernels choose how they add up.
ALIGNED_BYTES = 64
_COUNT = struct.Struct("<Q")

Reducer = Callable[[], Callable[[Any], Any]]
"""Makes, for each message, what pickles special types: see `pickle.Pickler.reducer_override`."""
ByType = dict[type, Callable[[Any], Any]]


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[memoryview],
        reducer: Reducer | None,
        by_type: ByType | None,
        fast: bool = False,
    ) -> None:
        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < OUT_OF_BAND_BYTES or len(buffers) >= MAX_BUFFERS:
                return True
            buffers.append(raw)
            return False

        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        self.fast = fast
        reduce = None if reducer is None else reducer()

        def override(value: Any) -> Any:
            if type(value) is np.ndarray and not value.flags.writeable and value.flags.forc:
                # It would arrive as it is; by the older protocols, which others use, each one can be written to.
                return value.copy(order="K").__reduce_ex__(5)
            return NotImplemented if reduce is None else reduce(value)

        self.reducer_override = override  # type: ignore[method-assign]
        if by_type is not None:
            self.dispatch_table = by_type


def packed(
    message: object, reducer: Reducer | None = None, by_type: ByType | None = None, fast: bool = False
) -> list[memoryview]:
    """Return a message as what `Wire.write` sends; raises what pickling raises.

    Args:
        by_type: the same as `pickle.Pickler.dispatch_table`, asked only for types pickle does not know by itself.
        fast: the same as `pickle.Pickler.fast`: equal values give equal bytes, whichever objects are one and the same.
    """
    file, buffers = io.BytesIO(), list[memoryview]()
    _Pickler(file, buffers, reducer, by_type, fast).dump(message)
    # Not a view of the file: one that the garbage collector ends first would say so on the console (Python 3.13).
    body = memoryview(file.getvalue())
    sizes = [body.nbytes, *(b.nbytes for b in buffers)]
    return [memoryview(_COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)), body, *buffers]


def _uncleared(size: int) -> np.ndarray[Any, Any]:
    """Return memory of numpy's, which is not cleared first: it is about to be overwritten anyway."""
    raw = np.empty(size + ALIGNED_BYTES, np.uint8)
    begin = -raw.__array_interface__["data"][0] % ALIGNED_BYTES
    return raw[begin : begin + size]


def loaded(read: Callable[[memoryview, int], None], size: int) -> Any:
    """Return the message that `packed` made, from wherever its bytes were put.

    Args:
        read: fills memory with the bytes that begin at a place in the message.
        size: of all of it.

    Raises:
        Exception: of any kind, when it is no such message.
    """

    def part(at: int, end: int) -> memoryview:
        memory = memoryview(_uncleared(end - at).data)
        here = first[at:end]
        memory[: len(here)] = here
        if end > at + len(here):
            read(memory[len(here) :], at + len(here))
        return memory

    first = memoryview(_uncleared(min(size, READ_BYTES)).data)
    read(first, 0)
    (count,) = _COUNT.unpack_from(first)
    at = _COUNT.size + 8 * count
    body, *sizes = struct.unpack_from(f"<{count}Q", part(_COUNT.size, at))
    whole, at = part(at, at + body), at + body
    buffers = []
    for one in sizes:
        buffers.append(part(at, at + one))
        at += one
    return pickle.loads(whole, buffers=buffers)


class Wire:
    """Whole messages over one end of a pipe: a frame of sizes, the pickle, the buffers.

    The two ends take turns, so a read never takes more than one message: a small one costs a single system call.

    Attributes:
        received_bytes: the size of the last message received.
    """

    received_bytes = 0

    def __init__(self, connection: Connection, reducer: Reducer | None) -> None:
        self._reducer = reducer
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, POLL_MS * 1000))
            # After `socket.setdefaulttimeout`, often set by code that downloads, a new socket object makes the file
            # one that does not block.
            end.setblocking(True)
        # In a cycle the garbage collector may close the connection before whoever ends the other side by this: what is
        # sent then would go to the next file that gets the number.
        self._descriptor = os.dup(connection.fileno())
        connection.close()

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone.
            Exception: the message cannot be pickled; then nothing was sent.
        """
        self.write(self.pack(message))

    def pack(self, message: object) -> list[memoryview]:
        """Return the message as what `write` sends; raises what pickling raises."""
        return packed(message, self._reducer)

    def write(self, pending: list[memoryview]) -> None:
        """Send what `pack` returned, which is used up."""
        while pending:
            written = os.writev(self._descriptor, pending)
            while pending and written >= pending[0].nbytes:
                written -= pending.pop(0).nbytes
            if written:
                pending[0] = pending[0][written:]

    def receive(self, alive: Callable[[], bool]) -> Any:
        """Return the next message.

        Args:
            alive: asked now and then while nothing comes.

        Raises:
            EOFError: the other side is gone.
        """
        first = self._first(alive)
        at = _COUNT.size
        (count,) = _COUNT.unpack_from(self._more(first, at, alive))
        sizes_end = at + 8 * count
        first = self._more(first, sizes_end, alive)
        sizes = struct.unpack_from(f"<{count}Q", first, at)
        body_end = sizes_end + sizes[0]
        first = self._more(first, body_end, alive)
        buffers, rest = [], memoryview(first)[body_end:]
        for size in sizes[1:]:
            whole = memoryview(_uncleared(size).data)
            here = rest[:size]
            whole[: len(here)] = here
            rest = rest[size:]
            self._fill(whole[len(here) :], alive)
            buffers.append(whole)
        self.received_bytes = sum(sizes)
        return pickle.loads(memoryview(first)[sizes_end:body_end], buffers=buffers)

    def _first(self, alive: Callable[[], bool]) -> bytes:
        while True:
            try:
                data = os.read(self._descriptor, READ_BYTES)
            except BlockingIOError:
                if not alive():
                    raise EOFError from None
                continue
            if not data:
                raise EOFError
            return data

    def _more(self, data: bytes, size: int, alive: Callable[[], bool]) -> bytes:
        """Return `data`, read on until it has `size` bytes."""
        if len(data) >= size:
            return data
        rest = memoryview(np.empty(size - len(data), np.uint8).data)
        self._fill(rest, alive)
        return data + rest

    def _fill(self, whole: memoryview, alive: Callable[[], bool]) -> None:
        at = 0
        while at < len(whole):
            try:
                got = os.readv(self._descriptor, [whole[at:]])
            except BlockingIOError:
                # The end of a dead sender's pipe does not show while a process it forked holds it open.
                if not alive():
                    raise EOFError from None
                continue
            if got == 0:
                raise EOFError
            at += got

    def shut(self) -> None:
        """Have both sides see the end now, also whoever reads, and where a forked process holds a copy of an end."""
        if self._descriptor >= 0:
            with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as end:
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1  # the next file gets the number
        if descriptor >= 0:
            os.close(descriptor)
