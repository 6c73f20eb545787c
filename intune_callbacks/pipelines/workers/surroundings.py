"""What a worker process takes over from the training process without being given it, as stock workers would have it.

Those start with their iterator, ours in the middle of an epoch: inside a ``with torch.autocast(...)`` around that
batch, behind an ``os.chdir``, or while the training writes into a pipe whose end another process waits for.
"""

from __future__ import annotations

import contextvars
import ctypes
import importlib
import mmap
import os
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

__all__ = ["Surroundings", "places"]

DEVICES = ("cpu", "cuda")
"""Kinds of devices whose autocast is looked at: a dataset computes on no other."""
DESCRIPTORS, MAPPED, STDERR = "/proc/self/fd", "/proc/self/maps", 2
SHARED = "/dev/shm/torch_{}"
"""A tensor in shared memory; the number of the process that made it follows."""
MAP_FIXED, PROT_NONE = 0x10, 0  # linux/mman.h
SERVERS = (socket.AF_INET, socket.AF_INET6)
"""How servers are reached by one process at a time; those reached otherwise, such as torch's for shared files, expect
all workers of a training."""

Places = dict[int, tuple[int, int, int]]
"""Of a descriptor the device, the inode and the offset of its file."""


@dataclass(frozen=True)
class Surroundings:
    """What belongs to this process, and to the thread that trains.

    Args:
        directory: the working directory, None where there is none any more.
        environment: of the process, None where another thread changed it meanwhile.
        cpus: those the thread may run on, None where that cannot be read.
        pipes: descriptors of open pipes and batches, and which these are; None where a process inherits none.
        thread: what else a fork copies of the thread; a new interpreter begins without it.
        strange: what was opened of these since then, as `pipes`.
        places: where each file that was open for reading stood, as `places` returns them.
        hangs_up: whether connections to servers end in it: one process may speak through one, not several.
    """

    directory: str | None
    environment: dict[str, str] | None = None
    cpus: set[int] | None = None
    pipes: dict[int, tuple[int, int]] | None = None
    thread: Thread | None = None
    strange: dict[int, tuple[int, int]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    hangs_up: bool = False

    @classmethod
    def now(cls, places: Places | None = None, hangs_up: bool = False) -> Surroundings:
        """Return them as they are; called in the thread that trains.

        Args:
            places: of files, from before any worker read in them; by default those of now.
        """
        directory = environment = cpus = None
        with suppress(OSError):
            directory = os.getcwd()
        with suppress(RuntimeError):
            environment = dict(os.environ)
        with suppress(OSError, AttributeError):
            cpus = os.sched_getaffinity(0)
        return cls(directory, environment, cpus, _pipes(), Thread(), places=places or {}, hangs_up=hangs_up)

    def inherited_by(self, method: str) -> Surroundings:
        """Return what of them a process has at its start.

        Args:
            method: ``fork``, ``spawn`` or ``forkserver``; the last one's come from its server.
        """
        if method == "fork":
            return self
        return (
            Surroundings(self.directory, self.environment, self.cpus)
            if method == "spawn"
            else Surroundings(self.directory)
        )

    def at_start(self) -> Surroundings:
        """Return the same for a process that is about to start, which inherits what is open now."""
        if self.pipes is None:
            return self
        now = (_pipes() or {}).items()
        return replace(self, strange={fd: which for fd, which in now if fd > STDERR and self.pipes.get(fd) != which})

    def run(self, work: Callable[[], None]) -> None:
        """Put them into force in this process, as far as that is possible, and do the work of it."""
        with suppress(OSError):
            _let_go(self.strange)
        if self.thread is not None:  # else no file came with the start
            with suppress(OSError, ValueError, ImportError):
                _read_alone(self.places)
        if self.hangs_up:
            with suppress(OSError, ValueError):
                _hang_up()
        if self.directory is not None:
            with suppress(OSError):
                os.chdir(self.directory)
        if self.environment is not None and self.environment != dict(os.environ):
            os.environ.clear()
            os.environ.update(self.environment)
        if self.cpus is not None:
            with suppress(OSError, AttributeError):
                os.sched_setaffinity(0, self.cpus)
        if self.thread is None:
            work()
        else:
            self.thread.run(work)


class Thread:
    """What Python, numpy and torch hold for the running thread, or for the process: made in it."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._filters = list(warnings.filters)
        self._numpy = np.geterr()
        torch = sys.modules.get("torch")
        self._torch: tuple[Any, ...] | None = None
        with suppress(Exception):  # what a version of torch lacks
            self._torch = None if torch is None else _of_torch(torch)

    def run(self, work: Callable[[], None]) -> None:
        """Do some work with what was in force then."""
        with suppress(Exception):  # a version of Python that imports in another way
            _forget_imports_of_others()
        if warnings.filters != self._filters:  # each change has what was warned of once come again
            warnings.resetwarnings()
            warnings.filters[:] = self._filters  # type: ignore[index]
        self._context.run(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        np.seterr(**self._numpy)
        with ExitStack() as inference:
            if self._torch is not None:
                with suppress(Exception):
                    _to_torch(sys.modules["torch"], inference, *self._torch)
            work()


def _forget_imports_of_others() -> None:
    """Have imported anew what another thread was importing at the fork: it is not here to end that."""
    locks = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
    for name, held in list(locks.items()):
        lock = held()
        if lock is not None and lock.owner not in (None, threading.get_ident()):
            del locks[name]
            sys.modules.pop(name, None)


def _of_torch(torch: Any) -> tuple[Any, ...]:
    """Return inference and grad mode, the default dtype, autocast, and modes such as a default device."""
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES}
    modes = torch.overrides._get_current_function_mode_stack()
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_dtype(), autocast, modes


def _to_torch(
    torch: Any, held: ExitStack, inference: bool, grad: bool, dtype: Any, autocast: dict[str, Any], modes: list[Any]
) -> None:
    if inference != torch.is_inference_mode_enabled():
        held.enter_context(torch.inference_mode(inference))
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    for kind, (enabled, kind_dtype) in autocast.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, kind_dtype)
    while torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    for mode in modes:
        torch.overrides._push_mode(mode)


def _pipes() -> dict[int, tuple[int, int]] | None:
    """Return the descriptors of open pipes, and of batches in shared memory; None where that cannot be read."""
    try:
        descriptors = [int(name) for name in os.listdir(DESCRIPTORS)]
    except (OSError, ValueError):
        return None
    found = {}
    for fd in descriptors:
        with suppress(OSError):  # closed meanwhile
            seen = os.fstat(fd)
            # No sockets: libraries speak to their servers by one that all processes have, as torch to the one that
            # keeps its shared files.
            if stat.S_ISFIFO(seen.st_mode) or (stat.S_ISREG(seen.st_mode) and _is_batch(fd)):
                found[fd] = seen.st_dev, seen.st_ino
    return found


def _is_batch(fd: int) -> bool:
    """Return whether a file is a tensor that a worker has sent, and not one that the training shares itself."""
    name, here = os.readlink(f"{DESCRIPTORS}/{fd}"), (os.getpid(), os.getppid())
    return name.startswith(SHARED.format("")) and not name.startswith(tuple(SHARED.format(f"{pid}_") for pid in here))


def _hang_up() -> None:
    """Have each connection to a server be one that the server has closed, as it is made anew then, or raises.

    All that have inherited one would read each other's answers.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # else looking at one makes it, also the parent's, one that does not block
    ended, other = socket.socketpair()
    other.close()
    for fd in map(int, os.listdir(DESCRIPTORS)):
        with suppress(OSError):  # no socket, or none that is connected
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as seen:
                    is_one = seen.family in SERVERS and seen.type == socket.SOCK_STREAM and bool(seen.getpeername())
                if is_one:
                    os.dup2(ended.fileno(), fd, inheritable=False)
    ended.close()
    socket.setdefaulttimeout(before)


def _let_go(pipes: dict[int, tuple[int, int]]) -> None:
    """Hold open no more what these stand for: as long as any process does, its other end waits."""
    if pipes:
        _unmap(set(pipes.values()))
        now, nothing = _pipes() or {}, os.open(os.devnull, os.O_RDWR)
        # Between the look and the fork a thread may have closed one, and what this process needs may have its number.
        # Not closed: the next file would get the number, and be closed by whoever had it.
        for fd in [fd for fd, which in pipes.items() if now.get(fd) == which]:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


def _unmap(files: set[tuple[int, int]]) -> None:
    """Keep no batch that the training had in shared memory: as long as any process maps one, nobody gets its memory."""
    with open(MAPPED, encoding="utf-8", errors="replace") as lines:
        mapped = [line.split() for line in lines]
    place = ctypes.CDLL(None).mmap
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for span, _, _, device, inode, *_ in mapped:
        major, minor = (int(part, 16) for part in device.split(":"))
        if (os.makedev(major, minor), int(inode)) in files:
            begin, end = (int(edge, 16) for edge in span.split("-"))
            # Not only taken away: whoever had it would do so once more, when something else may be there. Nor readable:
            # a dataset to which the training has given such a batch ends its worker, and computes nothing from zeros.
            place(begin, end - begin, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0)


def places() -> Places:
    """Return the files this process has open for reading, and where each stands."""
    found: Places = {}
    with suppress(OSError, ValueError, ImportError):  # a system without these
        import fcntl

        for fd in map(int, os.listdir(DESCRIPTORS)):
            with suppress(OSError):  # closed meanwhile
                seen = os.fstat(fd)
                is_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                if fd > STDERR and is_read and stat.S_ISREG(seen.st_mode):
                    found[fd] = seen.st_dev, seen.st_ino, os.lseek(fd, 0, os.SEEK_CUR)
    return found


def _read_alone(before: Places) -> None:
    """Open each file anew that is open for reading: what a fork inherits shares its offset with all other processes.

    The one worker of the user's is right to seek and read; several would read each other's bytes.

    Args:
        before: where they stood when nobody else had read in them, as Python's own buffers still have it.
    """
    import fcntl

    for fd, (device, inode, offset) in places().items():
        with suppress(OSError):  # it may not be opened any more
            own = os.open(f"{DESCRIPTORS}/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL))
            try:
                known = before.get(fd, (0, 0, 0))
                os.lseek(own, known[2] if known[:2] == (device, inode) else offset, os.SEEK_SET)
                os.dup2(own, fd, inheritable=os.get_inheritable(fd))
            finally:
                os.close(own)
