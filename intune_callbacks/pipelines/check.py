"""`check_pipeline`: the conformance kit every adapter must pass, ours and third parties'."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from intune_callbacks.errors import PipelineError
from intune_callbacks.types import Pipeline, Stage

__all__ = ["check_pipeline"]

KINDS = ("cpu", "io", "memory")


def check_pipeline(
    build: Callable[[], tuple[Pipeline, Iterator[Any]]],
    expected: Sequence[Any],
    *,
    seed: int = 0,
    resizes: int = 200,
    resize_limit_s: float = 5.0,
    key: Callable[[Any], Any] = lambda item: item,
) -> int:
    """Check that an adapter keeps the contract of `intune_callbacks.Pipeline` while it is being resized.

    Args:
        build: makes a fresh pipeline and the running iterator it controls.
        expected: what the untouched pipeline delivers, in order.
        seed: of the random resizes.
        resizes: at most so many, spread over the items.
        resize_limit_s: a single `resize` may not block longer, in seconds.
        key: maps a delivered item to something comparable with the items of `expected`.

    Returns:
        The number of resizes made.

    Raises:
        PipelineError: names the first rule that was broken, and how.

    Examples:
        >>> check_pipeline(lambda: (MyAdapter(loader), iter(loader)), list(range(100)))  # doctest: +SKIP
    """
    generator = random.Random(seed)
    pipeline, iterator = build()
    made = 0
    try:
        _check_stages(pipeline.stages())
        if not isinstance(pipeline, Pipeline):
            raise PipelineError(f"{type(pipeline).__name__} lacks one of stages, stats, resize, close")
        every = max(1, len(expected) // max(1, resizes))
        before = pipeline.stats()
        delivered: list[Any] = []
        for number, item in enumerate(iterator):
            delivered.append(key(item))
            if number >= len(expected) or delivered[-1] != expected[number]:
                raise PipelineError(_difference(delivered, expected))
            if number % every == 0:
                _check_resize(pipeline, generator, resize_limit_s)
                made += 1
                after = pipeline.stats()
                _check_monotonic(before, after)
                before = after
        if len(delivered) != len(expected):
            raise PipelineError(f"delivered {len(delivered)} items, expected {len(expected)}")
    finally:
        pipeline.close()
    return made


def _check_stages(stages: Sequence[Stage]) -> None:
    names = [stage.name for stage in stages]
    if not names:
        raise PipelineError("stages() is empty: a pipeline without a number to change is no pipeline")
    if len(set(names)) != len(names):
        raise PipelineError(f"stage names are not unique: {names}")
    for stage in stages:
        least = 0 if stage.unit == "workers" else 1
        if not least <= stage.low <= stage.current <= stage.high:
            limits = f"low {stage.low} <= current {stage.current} <= high {stage.high}"
            raise PipelineError(f"{stage.name}: {limits} is broken")
        if stage.kind not in KINDS:
            raise PipelineError(f"{stage.name}: kind {stage.kind!r} is none of {KINDS}")
        if stage.window_of is not None and stage.window_of not in names:
            raise PipelineError(f"{stage.name}: window_of {stage.window_of!r} names no stage")


def _check_resize(pipeline: Pipeline, generator: random.Random, limit_s: float) -> None:
    stages = pipeline.stages()
    wanted = {
        stage.name: generator.choice([stage.low, stage.current, generator.randint(stage.low, min(stage.high, 12))])
        for stage in stages
        if generator.random() < 0.7 and stage.low <= 12
    }
    begin_s = time.perf_counter()
    try:
        applied = pipeline.resize({**wanted, "no such stage": 3})
    except Exception as error:
        raise PipelineError(f"resize({wanted}) raised {error!r}; it must never raise into training") from error
    if (took_s := time.perf_counter() - begin_s) > limit_s:
        raise PipelineError(f"resize({wanted}) blocked for {took_s:.1f} s, allowed are {limit_s} s")
    names = {stage.name for stage in stages}
    if set(applied) != names:
        raise PipelineError(f"resize returned {sorted(applied)}, expected a value for each of {sorted(names)}")
    after = pipeline.stages()
    now, late = {stage.name: stage.current for stage in after}, {s.name for s in after if s.when == "epoch"}
    if now != applied:
        raise PipelineError(f"resize returned {applied}, but stages() says {now}")
    for stage in stages:
        if not stage.low <= applied[stage.name] <= stage.high:
            raise PipelineError(f"{stage.name}: applied {applied[stage.name]}, outside {stage.low}..{stage.high}")
        at_once = stage.when == "now" and stage.name not in late
        if at_once and stage.name in wanted and applied[stage.name] != wanted[stage.name]:
            raise PipelineError(f"{stage.name}: asked for {wanted[stage.name]}, got {applied[stage.name]}")


def _check_monotonic(before: Any, after: Any) -> None:
    if after.delivered < before.delivered:
        raise PipelineError(f"stats().delivered fell from {before.delivered} to {after.delivered}")
    for name, reading in after.stages.items():
        last = before.stages.get(name)
        for field in ("items", "busy_s", "cpu_s", "starved_s", "blocked_s"):
            if last is not None and getattr(reading, field) < getattr(last, field):
                raise PipelineError(f"stats().stages[{name!r}].{field} fell: counters only grow")


def _difference(delivered: Sequence[Any], expected: Sequence[Any]) -> str:
    at = len(delivered) - 1
    wanted = expected[at] if at < len(expected) else "the end"
    got = delivered[at]
    seen = "delivered before (repeated)" if got in list(delivered[:at]) else "ahead of its turn, foreign or altered"
    return f"item {at}: expected {wanted!r}, got {got!r}: {seen}"
