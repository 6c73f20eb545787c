"""`pure`: a function whose result depends on what it is given and nothing else, so that it can be kept."""

from __future__ import annotations

import functools
import inspect
import os
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any, TypeVar

from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.keys import Keys, NoKey, code_digest
from intune_callbacks.cache.rows import Row, Rows
from intune_callbacks.cache.values import is_same, laid_down, random_states, taken_up
from intune_callbacks.measure.cgroups import MemoryProbe
from intune_callbacks.words import moment

__all__ = ["ADDRESS", "is_needed", "pure", "tell", "use"]

ADDRESS = "INTUNE_ARENA"
"""The environment variable by which workers that are not forked find the arena of their training."""
CHECKED, CHECKED_SLOW, SLOW_S = 8, 2, 0.1
"""Results of a function that are computed twice, of all processes together, and of one that takes so many seconds. A
choice: what draws or counts shows at once, and nobody is to wait for it."""
CHECKED_AGAIN = 256
"""Every so many hits the result is computed again all the same: .4 % of the work. A choice."""
WORTH_KEEPING, JUDGED_AFTER = 3.0, 16
"""How much longer than keeping its result a function has to take, and results of a process to tell that by. A choice:
taking a result up again takes less than laying it down, so that the second epoch earns back what the first one paid."""
LOOK_BYTES = 8 << 20
"""That a process puts between two looks at the memory. A choice: little beside what is left above the soft limit."""
TOLD_EVERY, TOLD_EVERY_S = 16, 0.1  # calls or seconds after which what was seen is added up for all

_Function = TypeVar("_Function", bound=Callable[..., Any])

_marked: weakref.WeakSet[_Kept] = weakref.WeakSet()
_arena: Arena | None = None
_is_asked = False


def pure(fn: _Function) -> _Function:
    """Mark a function whose result depends on its arguments alone, so that a tuned training may keep it in memory.

    During a training with `InTuneCallback` or `live` that tunes, its results are kept in memory that all workers and
    ranks of the machine share, as far as there is room, and handed out as copies: the samples are the same, bit for
    bit, in the same order. Outside of one, in another mode, or on a system other than Linux, it is the function.

    Mark what is expensive and comes before anything random: ``decode(path)``, ``self.read(index)``. Of an object it is
    given, ``self`` included, its attributes are part of the arguments. The first results are computed twice, some later
    ones again: one that differs, or that drew a random number, ends it for this function, and the end card says so.

    Args:
        fn: a function or method; its results can be pickled.

    Returns:
        A function with the same signature.

    Raises:
        TypeError: it is no function, or makes a generator or coroutine.
    """
    if not isinstance(fn, types.FunctionType):
        inside = "put @pure below it, next to the function" if isinstance(fn, (staticmethod, classmethod)) else ""
        expected = inside or "expected a function; wrap what is called in one: def decode(path): return open_it(path)"
        raise TypeError(f"pure({fn!r}): {type(fn).__name__} is no function; {expected}")
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"pure({fn.__qualname__}): it yields or awaits; expected a function that returns its result")
    kept = _Kept(fn)
    _marked.add(kept)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        arena = _in_use()
        return fn(*args, **kwargs) if arena is None else kept.call(arena, args, kwargs)

    return call  # type: ignore[return-value]


def is_needed() -> bool:
    """Return whether there is anything to keep: a function was marked in this process."""
    return bool(_marked)


def tell() -> None:
    """Add up what the functions of this process have seen since they last told."""
    for kept in list(_marked):
        kept.tell()


def use(arena: Arena | None) -> None:
    """Keep results in an arena from now on, here and in processes that are started from here; None in none."""
    global _arena, _is_asked
    _arena, _is_asked = arena, True
    if arena is None:
        os.environ.pop(ADDRESS, None)
    else:
        os.environ[ADDRESS] = arena.address


def _in_use() -> Arena | None:
    return _arena if _is_asked else _look_for()


def _look_for() -> Arena | None:
    """Find the arena of the training that has started this process, once."""
    global _arena, _is_asked
    _is_asked = True
    try:
        _arena = Arena.at(os.environ[ADDRESS])
    except (KeyError, OSError, ValueError):
        _arena = None
    return _arena


class _Kept:
    """One marked function, in this process."""

    def __init__(self, fn: types.FunctionType) -> None:
        self._fn, self._owner = fn, code_digest(fn)
        self._name = f"{fn.__module__}.{fn.__qualname__}"
        self._arena: Arena | None = None
        self._begin()

    def __reduce__(self) -> Any:
        return type(self), (self._fn,)  # where a function is pickled by value, as cloudpickle does with a script's

    def _begin(self) -> None:
        self._process, self._keys = os.getpid(), Keys(self._fn)
        self._rows: Rows | None = None
        self._place: int | None = None
        self._row = self._told = Row(self._name)
        self._told_s, self._untold = 0.0, 0
        self._hits_before = 0  # of all processes: workers of a short epoch have few of their own
        self._machine: MemoryProbe | None = None
        self._put_bytes = 0  # since the last look at the memory
        self._size_bytes = 0  # of the last result that was laid down
        # Seconds of the last ones that were kept: to compute them, and what that took besides.
        self._last: deque[tuple[float, float]] = deque(maxlen=JUDGED_AFTER)

    def call(self, arena: Arena, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the function's result, kept or computed; an error of the cache's is none of the caller's."""
        key, found, begin_s, begin_cpu_s = None, None, time.perf_counter(), time.thread_time()
        try:
            key = self._key(arena, args, kwargs)
            if key is not None:
                found = arena.get(key)
        except NoKey as why:
            self._refuse(str(why))
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
        if key is None:
            return self._fn(*args, **kwargs)
        if found is not None:
            taken_s = time.perf_counter() - begin_s
            is_checked = (self._hits_before + self._row.hits) % CHECKED_AGAIN == CHECKED_AGAIN - 1
            self._note(hits=1, taken_s=taken_s)
            return self._again(found[0], args, kwargs) if is_checked else found[0]
        is_full = self._size_bytes > 0 and not arena.has_room(self._size_bytes)
        if is_full:  # most samples are computed anew then, in each epoch: as if there were no cache
            return self._computed(args, kwargs)
        states, beside_s, begin_s = random_states(), time.thread_time() - begin_cpu_s, time.perf_counter()
        value = self._fn(*args, **kwargs)
        computed_s = time.perf_counter() - begin_s
        try:
            self._check(key, value, states, computed_s, args, kwargs)
            self._keep(arena, key, value, computed_s, beside_s)
        except NoKey as why:
            self._refuse(str(why))
        except Exception as error:
            self._refuse(f"its result cannot be kept: {type(error).__name__}: {error}")
        return value

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin_s = time.perf_counter()
        value = self._fn(*args, **kwargs)
        self._note(misses=1, computed_s=time.perf_counter() - begin_s)
        return value

    def _key(self, arena: Arena, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
        """Return the key of a call; None where nothing is kept."""
        if arena.is_idle:
            return None
        if self._arena is not arena or self._process != os.getpid():
            self._begin()
            self._arena, self._rows = arena, Rows(arena)
        if self._place is None:
            assert self._rows is not None
            self._place = self._rows.place(self._owner, self._name)
            if self._place is None:
                return None
            self._hits_before = self._rows.read(self._place).hits
        assert self._rows is not None
        if self._row.why_not or self._rows.is_refused(self._place):
            return None
        return self._keys.of(args, kwargs)

    def _check(
        self,
        key: bytes,
        value: Any,
        states: tuple[Any, ...],
        computed_s: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """See whether a result was drawn and, of the first ones, whether another computation gives the same.

        Raises:
            NoKey: why it is not to be kept.
        """
        if random_states() != states:
            raise NoKey("it draws random numbers: mark the part before them")
        assert self._rows is not None
        assert self._place is not None
        if self._rows.read(self._place).checked >= (CHECKED if computed_s < SLOW_S else CHECKED_SLOW):
            return
        if not is_same(taken_up(laid_down(value)), value):
            raise NoKey("its result comes back from memory as something else")
        if self._keys.of(args, kwargs) != key:
            raise NoKey("it changes what it is given")
        if not is_same(self._fn(*args, **kwargs), value):
            raise NoKey("computed twice it gave two results: it depends on more than its arguments")
        self._note(checked=1)

    def _keep(self, arena: Arena, key: bytes, value: Any, computed_s: float, beside_s: float) -> None:
        begin_cpu_s = time.thread_time()  # the wall clock would count what other threads do meanwhile
        parts = laid_down(value)
        size_bytes = self._size_bytes = sum(part.nbytes for part in parts)
        is_kept = arena.put(key, parts)
        self._note(misses=1, computed_s=computed_s, kept=int(is_kept), kept_bytes=size_bytes if is_kept else 0)
        if not is_kept:
            return
        self._put_bytes += size_bytes
        if self._put_bytes > LOOK_BYTES:
            self._put_bytes = 0
            self._look_at_memory(arena)
        self._last.append((computed_s, beside_s + time.thread_time() - begin_cpu_s))
        if len(self._last) == JUDGED_AFTER and self._row.kept % JUDGED_AFTER == 0:
            one_s, kept_s = (median(spent) for spent in zip(*self._last, strict=True))
            if one_s < WORTH_KEEPING * kept_s:
                told = f"it takes {moment(one_s)}, and keeping its result {moment(kept_s)}: too little to gain"
                raise NoKey(told)

    def _look_at_memory(self, arena: Arena) -> None:
        """Have nothing more come in where memory is short: the trainer looks after it at its decisions only."""
        self._machine = self._machine or MemoryProbe()
        if self._machine.read()[1] > arena.header().stop_bytes > 0:
            arena.freeze()

    def _again(self, kept: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute what was kept, and return that."""
        value = self._fn(*args, **kwargs)
        try:
            if not is_same(value, kept):
                self._refuse(f"computed again it gave another result, behind {self._row.hits} that were handed out")
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
        return value

    def _refuse(self, why: str) -> None:
        """Keep no result of it any more, in no process."""
        self._note(why_not=why)

    def _note(self, **more: Any) -> None:
        """Add up what was seen, for this process and, now and then, for all."""
        self._row = self._row.plus(Row("", **more))
        if self._rows is None or self._place is None:
            return
        now_s, self._untold = time.perf_counter(), self._untold + 1
        is_urgent = "why_not" in more or "checked" in more
        if is_urgent or self._untold >= TOLD_EVERY or now_s - self._told_s >= TOLD_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Add up for all processes what this one has seen since it last told."""
        if self._rows is None or self._place is None or self._process != os.getpid() or self._row is self._told:
            return
        is_told, untold = False, (a - b for a, b in zip(self._row.numbers, self._told.numbers, strict=True))
        with suppress(OSError):
            is_told = self._rows.add(self._place, Row("", self._row.why_not, *untold))
        if is_told:
            self._told, self._told_s, self._untold = self._row, time.perf_counter(), 0
