"""Items per batch, counted while queues between the stages fill and drain."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from hypothesis import given
from hypothesis import strategies as st

from intune_callbacks.measure.counts import ItemsPerBatch, StageCounts
from intune_callbacks.types import Observation

SEEN = FakeLoop(FakePipeline({"read": Work(0.1), "map": Work(0.1)}, FakeMachine())).observe()


class Line:
    """Reads items, maps each, and makes batches of them; what is made and not yet taken is queued in between."""

    def __init__(self, size: int) -> None:
        self.size, self.read, self.mapped = size, 0, 0

    def window(self, read: int, mapped: int, batches: int) -> Observation:
        """Go on by so many items and batches, as far as there are any to take."""
        self.read += read
        mapped = min(mapped, self.read)
        self.read -= mapped
        self.mapped += mapped
        batches = min(batches, self.mapped // self.size)
        self.mapped -= batches * self.size
        made = {"read": (read, read - mapped), "map": (mapped, mapped - batches * self.size)}
        rates = {name: replace(SEEN.rates[name], items=n, stored=stored) for name, (n, stored) in made.items()}
        return replace(SEEN, batches=batches, rates=rates)


amounts = st.integers(0, 500)


@given(st.integers(1, 64), st.lists(st.tuples(amounts, amounts, amounts), max_size=200))
def test_queues_that_fill_and_drain_leave_it_as_it_is(size: int, windows: list[tuple[int, int, int]]) -> None:
    line, counted = Line(size), ItemsPerBatch()
    for window in windows:
        counted.learn(line.window(*window))
        of = counted.of_stages()
        assert all(each == 0.0 or each == pytest.approx(size) for each in of.values()), of
    for _ in range(10):
        counted.learn(line.window(size * 5, size * 5, 5))
    assert counted.of_stages() == {"read": pytest.approx(size), "map": pytest.approx(size)}


def test_a_deep_window_that_drains_does_not_make_its_stage_look_free() -> None:
    """800 results wait behind a slow item; while they are taken their stage makes next to nothing."""
    line, counts = Line(1), StageCounts()
    for made, batches in (*[(30, 30)] * 10, *[(100, 0)] * 8, *[(2, 60)] * 13):
        counts.learn(line.window(made, made, batches))
    assert {name: each.items_per_batch for name, each in counts.of_stages().items()} == {"read": 1.0, "map": 1.0}


def test_counts_go_on_after_a_restart() -> None:
    line, counted = Line(4), ItemsPerBatch()
    for _ in range(3):
        counted.learn(line.window(40, 40, 10))
    again = ItemsPerBatch()
    again.load_state_dict(json.loads(json.dumps(counted.state_dict())))
    for _ in range(130):
        seen = line.window(8, 8, 2)
        counted.learn(seen)
        again.learn(seen)
        assert again.of_stages() == counted.of_stages()
    assert again.state_dict() == counted.state_dict()


def test_counters_that_make_no_sense_give_numbers() -> None:
    counted = ItemsPerBatch()
    for items, stored in ((0, 0), (5, 50), (0, -3), (7, 7)):
        rates = {"read": replace(SEEN.rates["read"], items=items, stored=stored)}
        counted.learn(replace(SEEN, batches=2, rates=rates))
        assert counted.of_stages()["read"] >= 0.0
