"""The conformance kit accepts an honest adapter and names what a broken one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from intune_callbacks import Allocation, PipelineError, PipelineStats, Stage, StageStats
from intune_callbacks.pipelines.base import Combined, clamp
from intune_callbacks.pipelines.check import check_pipeline

ITEMS = list(range(60))


class Honest:
    """An adapter with one stage that does nothing wrong."""

    def __init__(self) -> None:
        self.values = {"work": 2, "work.window": 4}
        self.delivered = 0

    def __iter__(self) -> Iterator[int]:
        for item in ITEMS:
            self.delivered += 1
            yield item

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage("work", "cpu", "workers", 1, 8, self.values["work"]),
            Stage("work.window", "memory", "items", 1, 64, self.values["work.window"], window_of="work"),
        )

    def stats(self) -> PipelineStats:
        counters = StageStats(self.delivered, float(self.delivered), 0.0, 0.0, 0.0, 0.0, 0, 4)
        return PipelineStats(float(self.delivered), self.delivered, {"work": counters})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        self.values |= clamp(allocation, self.stages())
        return dict(self.values)

    def close(self) -> None:
        self.closed = True


class Loses(Honest):
    def __iter__(self) -> Iterator[int]:
        return (item for item in super().__iter__() if item != 31)


class Repeats(Honest):
    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            yield from [item, item] if item == 31 else [item]


class Reorders(Honest):
    def __iter__(self) -> Iterator[int]:
        return iter([*ITEMS[:30], 31, 30, *ITEMS[32:]])


class StopsEarly(Honest):
    def __iter__(self) -> Iterator[int]:
        return iter(ITEMS[:-1])


class Raises(Honest):
    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        raise KeyError("no")


class Forgets(Honest):
    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        return {"work": super().resize(allocation)["work"]}


class Boasts(Honest):
    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        return {"work": 1, "work.window": 1} | clamp(allocation, self.stages())


class CountsDown(Honest):
    def stats(self) -> PipelineStats:
        reading = super().stats()
        counters = replace(reading.stages["work"], busy_s=-float(self.delivered))
        return replace(reading, stages={"work": counters})


class SameNames(Honest):
    def stages(self) -> tuple[Stage, ...]:
        return (super().stages()[0],) * 2


class OutsideLimits(Honest):
    def stages(self) -> tuple[Stage, ...]:
        return (replace(super().stages()[0], high=1), super().stages()[1])


def check(adapter: Callable[[], Any]) -> int:
    def build() -> tuple[Any, Iterator[Any]]:
        pipeline = adapter()
        return pipeline, iter(pipeline)

    return check_pipeline(build, ITEMS, resizes=30)


def test_an_honest_adapter_passes() -> None:
    assert check(Honest) == 30


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Loses, "item 31: expected 31, got 32: ahead of its turn"),
        (Repeats, r"item 32: expected 32, got 31: delivered before \(repeated\)"),
        (Reorders, "item 30: expected 30, got 31"),
        (StopsEarly, "delivered 59 items, expected 60"),
        (Raises, "it must never raise into training"),
        (Forgets, "expected a value for each of"),
        (Boasts, "but stages\\(\\) says"),
        (CountsDown, "busy_s fell: counters only grow"),
        (SameNames, "stage names are not unique"),
        (OutsideLimits, "work: low 1 <= current 2 <= high 1 is broken"),
    ],
)
def test_a_broken_adapter_is_told_what_it_broke(adapter: Callable[[], Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        check(adapter)


def test_a_slow_resize_is_refused() -> None:
    class Slow(Honest):
        def resize(self, allocation: Mapping[str, int]) -> Allocation:
            total = 0
            for i in range(200_000):
                total += i
            return super().resize(allocation)

    with pytest.raises(PipelineError, match="blocked for"):
        check_pipeline(lambda: (lambda p: (p, iter(p)))(Slow()), ITEMS, resize_limit_s=1e-4)


def test_pipelines_combined_keep_their_names_apart() -> None:
    one, two = Honest(), Honest()
    both = Combined({"clicks": one, "views": two})
    assert [s.name for s in both.stages()] == [
        "clicks/work",
        "clicks/work.window",
        "views/work",
        "views/work.window",
    ]
    assert both.stages()[3].window_of == "views/work"
    applied = both.resize({"views/work": 5, "clicks/work.window": 9})
    assert (one.values, two.values) == ({"work": 2, "work.window": 9}, {"work": 5, "work.window": 4})
    assert applied == {"clicks/work": 2, "clicks/work.window": 9, "views/work": 5, "views/work.window": 4}
    assert set(both.stats().stages) == {"clicks/work", "views/work"}
    assert [s.name for s in Combined({"0": one}).stages()] == ["work", "work.window"]
    both.close()
    assert one.closed and two.closed
