"""For tests that measure on a machine with other work: its speed moves by a third, and now and then it stalls."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["eventually", "slept", "three_attempts"]


def three_attempts(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test fail only if it fails three times; it makes anew what it measures, and gets the same fixtures.

    It measures, so it is of the tier ``timing``: nothing runs beside it.
    """

    @pytest.mark.timing
    @functools.wraps(test)
    def attempts(*given: Any, **named: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return test(*given, **named)
        return test(*given, **named)

    return attempts


def eventually(true: Callable[[], Any], within_s: float = 60.0) -> bool:
    """Return whether something is so, or becomes so: longer than any machine stalls, and all goes well without it."""
    until_s = time.monotonic() + within_s
    while not true() and time.monotonic() < until_s:
        time.sleep(0.01)
    return bool(true())


def slept(seconds: float) -> float:
    """Sleep, and return the seconds it really took."""
    begin_s = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begin_s
