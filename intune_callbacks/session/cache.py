"""The memory in which a training keeps results of pure functions: opened, sized at each decision, and given back."""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import sys
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.images import NAME, Cuts
from intune_callbacks.cache.pure import is_needed, tell, use
from intune_callbacks.cache.rows import CacheUse, Rows
from intune_callbacks.config import TunerConfig
from intune_callbacks.errors import warn
from intune_callbacks.measure.cgroups import MemoryProbe
from intune_callbacks.types import Observation
from intune_callbacks.words import size

__all__ = ["Cache"]

FED_WAIT = 0.02
"""Share of the time waited for data below which nothing more is kept. A choice: there is no more to be gained."""
SLACK = 0.01
"""Of all memory, by which the cache may stand above its room before it has to give some back. A choice: less is the
to and fro of what a training holds, and what was given back would have to be computed again."""
JOIN_S = 2.0  # that a rank waits for the first one of its node, which comes here at the same time
SOME_IMAGES, PART_FOR_IMAGES = 16, 0.5
"""Images by which their size is judged, and the part of the free memory that all of them may take. A choice: files are
smaller than what is decoded of them, so the system can keep them in the rest."""
ONE_PASS = "no sample comes twice: there is one epoch"
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

_joins = itertools.count()
_shared: Arena | None = None
_users: set[int] = set()


class Cache:
    """What one training keeps; without functions marked as `pure`, or in another mode than ``tune``, nothing.

    Args:
        config: the mode and `memory_soft_limit` are used.
        rank: this process among those that train together.
        world: how many train together; those of a node share one cache, and the first of them sizes it.
    """

    def __init__(self, config: TunerConfig, rank: int = 0, world: int = 1) -> None:
        self._config, self._is_alone = config, world == 1
        self._sizes = world == 1 or _local_rank(rank) == 0
        self._number = next(_joins)
        self._arena: Arena | None = None
        self._why = ""
        self._is_full = self._is_closed = False
        self._cuts = Cuts()
        self._waiting: list[weakref.ref[Any]] = []
        self.open()

    def open(self) -> None:
        """Have an arena from now on, if any function was marked; called before workers are started."""
        if self._arena is not None or self._is_closed or self._config.mode != "tune" or not is_needed():
            return
        try:
            self._open()
        except Exception as error:  # another system, a sandbox, no descriptors
            self._is_closed = True
            warn(f"InTune keeps no results of pure functions: {type(error).__name__}: {error}. Training goes on")

    def cut(self, loader: Any, epochs: int | None) -> None:
        """Have what is known to be pure in a loader's datasets kept; called before its workers are started.

        Args:
            loader: whatever batches come from.
            epochs: of the run; where they are not known, nobody asked for this, and it begins with the second one.
        """
        if self._is_closed or self._config.mode != "tune":
            return
        if epochs is None:
            with suppress(TypeError):  # nothing can refer to it weakly
                self._waiting.append(weakref.ref(loader))
        elif epochs > 1:
            self._cuts.make(loader)
            self.open()

    def _open(self) -> None:
        global _shared
        limit_bytes, used_bytes = MemoryProbe().read()
        if _shared is None:
            _shared = _of_node(self._number, self._sizes, self._is_alone, limit_bytes)
        if _shared is None:
            self._is_closed, self._why = True, "the first rank of this node keeps no results"
            return
        self._arena = _shared
        _users.add(id(self))
        weakref.finalize(self, _left, id(self))
        use(_shared)
        if self._sizes and not self._arena.header().limit_bytes:
            soft_bytes = self._config.memory_soft_limit * limit_bytes
            self._limit(soft_bytes - used_bytes, soft_bytes)

    @property
    def used_bytes(self) -> int:
        """Memory it holds."""
        return 0 if self._arena is None else self._arena.used_bytes()

    def expect(self, epoch_batches: int | None, batches: int | None, epochs_left: int | None, is_first: bool) -> None:
        """Learn how long the run is going to be; called as an epoch begins.

        Args:
            epoch_batches: of one epoch, None if unknown.
            batches: of the whole run, None if unknown.
            epochs_left: the one that begins included, None if unknown.
            is_first: no epoch has begun before.
        """
        while self._waiting and not is_first:
            self.cut(self._waiting.pop()(), 2)
        self.open()
        in_one = epoch_batches is not None and batches is not None and batches <= epoch_batches
        is_last = epochs_left == 1 or (is_first and in_one)
        self._is_full = is_last  # what would be kept now would never be asked for
        if is_last and self._arena is not None and self._sizes:
            self._why = ONE_PASS if is_first else self._why
            self._limit(0) if is_first else self._arena.freeze()

    def left_out(self, seen: Observation) -> Observation:
        """Return the observation as if its memory were free: for all that needs memory it is."""
        if not (kept_bytes := self.used_bytes):
            return seen
        used_bytes = max(0, seen.resources.memory_used_bytes - kept_bytes)
        return replace(seen, resources=replace(seen.resources, memory_used_bytes=used_bytes))

    def fit(self, seen: Observation, needed_bytes: float) -> None:
        """Let it have the memory that nothing else needs.

        Args:
            seen: the last window.
            needed_bytes: that are in use, the cache left out, once all windows are full.
        """
        if self._arena is None or not self._sizes:
            return
        machine = seen.resources
        soft_bytes = self._config.memory_soft_limit * machine.memory_limit_bytes
        room = soft_bytes - needed_bytes
        self._check_images(room)
        used = self.used_bytes
        if used > room + SLACK * machine.memory_limit_bytes:
            self._limit(room, soft_bytes)
        elif self._is_full or seen.wait_frac < FED_WAIT:
            self._arena.freeze()
        elif room > used:
            self._limit(room, soft_bytes)

    def _check_images(self, room: float) -> None:
        """Let images go that nobody asked to keep, unless all of them fit and leave as much for the files' own cache.

        A part of them would not be worth what it takes from the files: they would be read from the disk in each epoch.
        """
        if self._arena is None or not self._cuts.images:
            return
        rows = Rows(self._arena)
        seen = next((row for row in rows if row.name == NAME and row.kept >= SOME_IMAGES), None)
        if seen is None or (all_bytes := self._cuts.images * seen.kept_bytes / seen.kept) <= PART_FOR_IMAGES * room:
            return
        self._cuts.undo()
        self._cuts.images = 0
        rows.refuse(NAME, f"all images would take {size(all_bytes)}, and half of the free memory is {size(room / 2)}")
        self._arena.limit(0)

    def freeze(self) -> None:
        """Keep what is there, and nothing more: nobody looks after the memory from now on."""
        self._is_full = True
        if self._arena is not None and self._sizes:
            self._arena.freeze()

    def use(self) -> CacheUse | None:
        """Return what it held and what of; None where no function was marked, or nothing could be kept."""
        if self._arena is None:
            return None
        tell()
        head = self._arena.header()
        return CacheUse(self._arena.used_bytes(head), head.limit_bytes, self._why, tuple(Rows(self._arena)))

    def close(self) -> None:
        """Give its memory back, unless another training of this process uses it."""
        self._arena, self._is_closed = None, True
        self._cuts.undo()
        _left(id(self))

    def _limit(self, limit_bytes: float, stop_bytes: float | None = None) -> None:
        assert self._arena is not None
        self._arena.limit(max(0, int(limit_bytes)), None if stop_bytes is None else int(stop_bytes))


def _left(user: int) -> None:
    global _shared
    _users.discard(user)
    if not _users and _shared is not None:
        use(None)
        arena, _shared = _shared, None
        arena.close()


def _of_node(number: int, is_first: bool, is_alone: bool, room_bytes: int) -> Arena | None:
    """Return the arena that the ranks of this node share; None where the first of them has none."""
    if is_alone:
        return Arena(room_bytes=room_bytes)
    key, store = f"intune_callbacks/cache/{number}/{socket.gethostname()}", _store()
    if is_first:
        arena = Arena(room_bytes=room_bytes)
        if store is not None:
            store.set(key, arena.address)
        return arena
    if store is None:
        return None
    with suppress(RuntimeError):  # it took too long
        store.wait([key], datetime.timedelta(seconds=JOIN_S))
        return Arena.at(store.get(key).decode())
    return None


def _store() -> Any:
    """Return the key-value store of torch's process group, None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    store_of = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if store_of is None else store_of()


def _local_rank(rank: int) -> int:
    told = next((os.environ[name] for name in LOCAL_RANKS if os.environ.get(name, "").isdigit()), None)
    return rank if told is None else int(told)
