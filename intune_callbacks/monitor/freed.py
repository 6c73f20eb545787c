"""Memory that was freed, but that the C library keeps for later."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["LARGE_BYTES", "give_back_freed", "map_large_blocks"]

LARGE_BYTES = 1 << 20
"""Blocks of this size and more are given back at once after `map_large_blocks`."""
M_MMAP_THRESHOLD = -3
"""The number of the setting in glibc's malloc.h."""


@functools.cache
def map_large_blocks() -> bool:
    """Let the C library map blocks of `LARGE_BYTES` and more one by one, from now on; False where it cannot.

    By default it does so only until the first was freed; later ones, up to 32 MB, come from its arenas, one for each
    few threads, which keep what was freed: the memory in use is then twice what is held, and says nothing about what
    another buffer would cost. A mapped block goes back when it is freed; its first use is slower, .5 s per GB
    (mallopt(3)).
    """
    mallopt = _glibc("mallopt", ctypes.c_int, ctypes.c_int)
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))


def give_back_freed() -> bool:
    """Let the C library give freed memory back to the system; False where it cannot.

    A process may stand at its limit while half of its memory is free. Takes milliseconds per GB (malloc_trim(3)).
    """
    trim = _glibc("malloc_trim", ctypes.c_size_t)
    return trim is not None and bool(trim(0))


def _glibc(name: str, *arguments: type[ctypes._SimpleCData[int]]) -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None)[name]
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
