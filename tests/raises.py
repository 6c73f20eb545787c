"""Whether a number that was lowered on a running iterator rises again: what `test_raise_means_raise` measures with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["bursts", "rises_again", "steady"]

LOWERED, BACK = 0.8, 0.7
Rate = Callable[[Iterator[Any]], float]


def steady(count: int, settle: int = 0) -> Rate:
    """Items a second of a consumer that never rests; the first `settle` were made before."""

    def rate(stream: Iterator[Any]) -> float:
        for _ in range(settle):
            next(stream)
        begin_s = time.perf_counter()
        for _ in range(count):
            next(stream)
        return count / (time.perf_counter() - begin_s)

    return rate


def bursts(size: int, rest_s: float, times: int = 4) -> Rate:
    """Items a second of one that rests and then takes many: what counts is how many wait for it."""

    def rate(stream: Iterator[Any]) -> float:
        for _ in range(2 * size):
            next(stream)
        begin_s = time.perf_counter()
        for _ in range(times):
            time.sleep(rest_s)
            for _ in range(size):
                next(stream)
        return times * size / (time.perf_counter() - begin_s)

    return rate


def rises_again(build: Callable[[], tuple[Any, Iterator[Any]]], name: str, high: int, low: int, rate: Rate) -> None:
    """Fail unless a number raised, lowered and raised again on one iterator is worth as much as before.

    Args:
        build: makes the pipeline and its running iterator.
        name: the number.
        high: what it is raised to; the first time from what the user wrote.
        low: what it is lowered to.
        rate: measures.
    """
    for last in (False, False, True):  # the machine has other work: twice more before it is said
        pipeline, stream = build()
        try:
            next(stream)
            rates = []
            for value in (high, low, high):
                assert pipeline.resize({name: value})[name] == value
                assert {s.name: s.current for s in pipeline.stages()}[name] == value
                rates.append(rate(stream))
        finally:
            pipeline.close()
        before, lowered, after = rates
        # On cores that others use, too, the second busy worker may have had none of its own.
        if (lowered < LOWERED * before or name == "busy") and after >= BACK * before:
            return
        if last:
            raise AssertionError(
                f"{name}: {before:.0f} items/s at {high}, {lowered:.0f} at {low}, {after:.0f} at {high} again"
            )
