"""Child processes for a stage whose work holds the GIL: one private pipe each, results by value.

Arrays travel out of band (pickle protocol 5): written from and read into their own memory with one copy each way, no
shared-memory file, no descriptor to leak, nothing lost when a child is retired.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

from intune_callbacks.errors import WorkerDied

__all__ = ["Child", "ProcessPool"]

# How often a waiting side looks whether the other one is still alive: pipe ends inherited by children forked later
# make the end-of-file of a dead process unreliable.
POLL_MS = 500
QUIT_S = 2.0
# Below this an array is cheaper inside the pickle than as a buffer of its own.
OUT_OF_BAND_BYTES = 4096
MAX_BUFFERS = 500
MEMORY_EVERY_S = 5.0
READ_BYTES = 1 << 16
_COUNT = struct.Struct("<Q")

# One child is started at a time: a child forked in between would inherit the other's pipe end.
_starting = threading.Lock()

Reducer = Callable[[Any], Any]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[memoryview], reducer: Reducer | None) -> None:
        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < OUT_OF_BAND_BYTES or len(buffers) >= MAX_BUFFERS:
                return True
            buffers.append(raw)
            return False

        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        if reducer is not None:
            self.reducer_override = reducer  # type: ignore[method-assign]


class _Wire:
    """Whole messages over one end of a pipe: a frame of sizes, the pickle, the buffers.

    The two ends take turns, so a read never takes more than one message: a small one costs a single system call.
    """

    def __init__(self, connection: Connection, reducer: Reducer | None) -> None:
        self._connection, self._reducer = connection, reducer
        self._descriptor = connection.fileno()
        with socket.socket(fileno=os.dup(self._descriptor)) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, POLL_MS * 1000))

    def send(self, message: object) -> None:
        file, buffers = io.BytesIO(), list[memoryview]()
        _Pickler(file, buffers, self._reducer).dump(message)
        body = file.getbuffer()
        sizes = [body.nbytes, *(b.nbytes for b in buffers)]
        pending = [memoryview(_COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)), body, *buffers]
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
        (count,) = _COUNT.unpack_from(self._more(first, at))
        sizes_end = at + 8 * count
        first = self._more(first, sizes_end)
        sizes = struct.unpack_from(f"<{count}Q", first, at)
        body_end = sizes_end + sizes[0]
        first = self._more(first, body_end)
        buffers, rest = [], memoryview(first)[body_end:]
        for size in sizes[1:]:
            # numpy gives memory that is not cleared first: it is about to be overwritten anyway.
            whole = memoryview(np.empty(size, np.uint8).data)
            here = rest[:size]
            whole[: len(here)] = here
            rest = rest[size:]
            self._fill(whole[len(here) :])
            buffers.append(whole)
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

    def _more(self, data: bytes, size: int) -> bytes:
        """Return `data`, read on until it has `size` bytes."""
        if len(data) >= size:
            return data
        rest = memoryview(np.empty(size - len(data), np.uint8).data)
        self._fill(rest)
        return data + rest

    def _fill(self, whole: memoryview) -> None:
        at = 0
        while at < len(whole):
            try:
                got = os.readv(self._descriptor, [whole[at:]])
            except BlockingIOError:
                # In the middle of a message the sender is busy writing it, or dead, which reads as its end.
                continue
            if got == 0:
                raise EOFError
            at += got

    def close(self) -> None:
        self._connection.close()


def _child_main(
    connection: Connection,
    fn: Callable[[Any], Any],
    start: Callable[[int], None] | None,
    worker_id: int,
    reducer: Reducer | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What came with the fork is the parent's to finalise.
    gc.freeze()
    parent, wire = os.getppid(), _Wire(connection, reducer)
    broken: BaseException | None = None
    try:
        if start is not None:
            start(worker_id)
    except Exception as error:
        broken = error
    try:
        while True:
            task = wire.receive(lambda: os.getppid() == parent)
            if task is None:
                return
            begin_cpu_s = time.process_time()
            try:
                if broken is not None:
                    raise broken
                value = fn(task[0])
                wire.send((True, value, time.process_time() - begin_cpu_s))
            except (BrokenPipeError, ConnectionError):
                return
            except Exception as error:
                wire.send((False, *_portable(error)))
            task = value = None
    except (EOFError, OSError):
        return


def _portable(error: Exception) -> tuple[Exception, str]:
    """Return the error in a form that survives the pipe, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None), text


class RemoteTraceback(Exception):
    """The traceback a worker process printed, as the cause of the error it raised."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f'\n"""\n{text}"""')


class Child:
    """One started child process and this side's end of its pipe."""

    def __init__(self, process: Any, wire: _Wire) -> None:
        self.process, self.wire, self.usable = process, wire, True


class ProcessPool:
    """Child processes that all hold the same function; idle ones are parked and reused.

    Args:
        fn: what a child does to one item; pickled unless the context forks.
        context: a multiprocessing context.
        start: called once in each child with its worker number.
        reducer: pickling of special types, as `pickle.Pickler.reducer_override`.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        context: BaseContext,
        start: Callable[[int], None] | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self._fn, self._context, self._start, self._reducer = fn, context, start, reducer
        self._idle: list[Child] = []
        self._all: dict[int, Child] = {}
        self._count = 0
        self._closed = False
        self._lock = threading.Lock()
        self._memory = (float("-inf"), 0.0)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children alive."""
        return tuple(pid for pid, child in list(self._all.items()) if child.process.is_alive())

    def get(self) -> Child:
        """Return an idle child, or start one."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.process.is_alive():
                    return child
                self._forget(child)
            worker_id, self._count = self._count, self._count + 1
        with _starting:
            ours, theirs = self._context.Pipe(duplex=True)
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_child_main, args=(theirs, self._fn, self._start, worker_id, self._reducer), daemon=True
            )
            process.start()
            theirs.close()
        child = Child(process, _Wire(ours, self._reducer))
        with self._lock:
            self._all[process.pid] = child
        return child

    def call(self, child: Child, item: Any, cancelled: Callable[[], bool]) -> tuple[Any, float]:
        """Run the function on `item` in `child`.

        Returns:
            The result and the CPU seconds it took.

        Raises:
            WorkerDied: the child ended first.
            Exception: what the function raised, with the child's traceback as its cause.
        """
        try:
            child.wire.send((item,))
            ok, value, rest = child.wire.receive(lambda: child.process.is_alive() and not cancelled())
        except (EOFError, ConnectionError) as error:
            child.usable = False
            if cancelled():
                raise WorkerDied("stopped while the stage was closed") from error
            child.process.join(QUIT_S)
            raise WorkerDied(
                f"worker process {child.process.pid} died while computing an item (exit code "
                f"{child.process.exitcode}; -9 is SIGKILL, often the kernel's out-of-memory killer)"
            ) from error
        if ok:
            return value, rest
        value.__cause__ = RemoteTraceback(rest)
        raise value

    def put(self, child: Child) -> None:
        """Park a child for later use; one that is not usable any more is ended."""
        with self._lock:
            keep = child.usable and not self._closed
            if keep:
                self._idle.append(child)
        if not keep:
            self._end([child])

    def worker_bytes(self) -> float:
        """Return what one child costs in private memory, in bytes; looked up at most every five seconds."""
        at_s, size = self._memory
        if time.monotonic() - at_s > MEMORY_EVERY_S:
            sizes = [_private_bytes(pid) for pid in self.pids[:2]]
            size = max(sizes, default=0.0)
            self._memory = (time.monotonic(), size)
        return size

    def close(self) -> None:
        """End the idle children now and every other one when it is put back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._end(idle)

    def _end(self, children: list[Child]) -> None:
        for child in children:
            try:
                if child.usable:
                    child.wire.send(None)
                else:
                    child.process.terminate()
            except OSError:
                pass
        deadline_s = time.monotonic() + QUIT_S
        for child in children:
            child.process.join(max(0.0, deadline_s - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join(QUIT_S)
            with self._lock:
                self._forget(child)

    def _forget(self, child: Child) -> None:
        self._all.pop(child.process.pid, None)
        child.wire.close()


def _private_bytes(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return 1024.0 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0.0
