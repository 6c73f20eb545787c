"""Freed memory is given back to the system, and looked for before an alarm."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from fakes import GB, FakeLoop, FakeMachine, FakePipeline, Work

from intune_callbacks.config import TunerConfig
from intune_callbacks.measure import freed
from intune_callbacks.session.tuner import Tuner

HOLES = """
import psutil
from intune_callbacks.measure.freed import give_back_freed
rss = psutil.Process().memory_info
held = [bytes(100_000) + bytes([i % 7]) for i in range(2000)]
del held[::2]
full = rss().rss
assert give_back_freed()
print(full - rss().rss, len(held))
"""

LARGE = """
import sys, psutil
from intune_callbacks.measure.freed import LARGE_BYTES, Freed
rss = psutil.Process().memory_info
raised = b"1" * 30_000_000
del raised
freed = Freed()
if sys.argv[1] != "as it is":
    freed.map_large_blocks()
    assert freed._maps
if sys.argv[1] == "mapped no more":
    freed.close()
held, between = [], []
for _ in range(50):
    held.append(b"1" * (2 * LARGE_BYTES))
    between.append(b"1" * 1000)
full = rss().rss
del held
print(full - rss().rss, len(between))
"""
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")


@glibc
@pytest.mark.parametrize(("how", "given_back"), [("mapped", True), ("as it is", False), ("mapped no more", False)])
def test_large_blocks_go_back_when_they_are_freed(how: str, given_back: bool) -> None:
    command = [sys.executable, "-c", LARGE, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (int(run.stdout.split()[0]) > 90_000_000) == given_back


@glibc
def test_holes_between_what_is_held_are_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout.split()[0]) > 50_000_000


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """What one test set going is over before the next one replaces what it calls."""
    yield
    for thread in threading.enumerate():
        if thread.name == "intune-trim":
            thread.join(10.0)


def full_windows(mode: str, item_bytes: float = 0.1 * GB) -> tuple[FakeLoop, Tuner]:
    """A slow model before a full window: with the large items 6.4 of 10 GB are batches."""
    work = Work(0.1, item_bytes=item_bytes, workers=8, window=64)
    pipeline = FakePipeline({"decode": work}, machine := FakeMachine(memory_limit_bytes=10 * GB))
    config = TunerConfig(mode=mode, policy="model-jump")
    return FakeLoop(pipeline, model_s=0.1), Tuner(pipeline, config, probe=machine, clock=machine.clock())


@pytest.mark.parametrize(("mode", "alarmed"), [("tune", False), ("advise", True)])
def test_memory_that_is_only_kept_is_no_alarm(monkeypatch: pytest.MonkeyPatch, mode: str, alarmed: bool) -> None:
    loop, tuner = full_windows(mode)
    machine, calls = loop.pipeline.machine, []

    def give_back() -> bool:
        calls.append(machine.memory_used_bytes)
        machine.memory_used_bytes = 1 * GB
        return True

    monkeypatch.setattr(freed, "give_back_freed", give_back)
    loop.run(tuner, seconds=5.0)
    machine.memory_used_bytes = 3 * GB
    decisions = loop.run(tuner, seconds=4.0)
    assert any("memory alarm" in decision.reason for decision in decisions) == alarmed
    assert bool(calls) == (mode == "tune")


def test_half_empty_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tuner = full_windows("tune")
    loop.pipeline.machine.memory_limit_bytes = 100 * GB
    monkeypatch.setattr(freed, "give_back_freed", lambda: pytest.fail("nothing is short"))
    loop.run(tuner, seconds=5.0)
    assert tuner.frozen is None


@pytest.mark.parametrize(("item_bytes", "mapped"), [(0.1 * GB, True), (1000.0, False)])
def test_blocks_are_mapped_where_batches_are_large(
    monkeypatch: pytest.MonkeyPatch, item_bytes: float, mapped: bool
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(freed, "_set_threshold", lambda size_bytes: not calls.append(size_bytes))
    monkeypatch.setattr(freed, "give_back_freed", lambda: False)
    loop, tuner = full_windows("tune", item_bytes)
    loop.pipeline.machine.memory_used_bytes = 6 * GB
    loop.run(tuner, seconds=5.0)
    assert bool(calls) == mapped
    assert tuner.frozen is None
    tuner.close()
    assert calls == ([freed.LARGE_BYTES, freed.GROWN_BYTES] if mapped else [])


def test_memory_that_is_really_used_still_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tuner = full_windows("tune")
    monkeypatch.setattr(freed, "give_back_freed", lambda: True)
    loop.run(tuner, seconds=5.0)
    loop.pipeline.machine.memory_used_bytes = 3 * GB
    assert any("memory alarm" in decision.reason for decision in loop.run(tuner, seconds=4.0))


def test_what_brings_nothing_is_done_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, calls = [1000.0], []
    monkeypatch.setattr(freed, "give_back_freed", lambda: not calls.append(now_s[0]))
    returns = freed.Freed(lambda: now_s[0])
    for _ in range(3600):
        now_s[0] += 1.0
        returns.give_back(now=True)
    assert len(calls) <= 8 + 3600 / freed.LONGEST_S
    assert calls[1] - calls[0] < 10.0


def test_between_half_and_the_limit_the_training_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return go_on.wait(10.0)

    monkeypatch.setattr(freed, "give_back_freed", slow)
    returns = freed.Freed()
    assert returns.give_back(now=False) is False
    assert begun.wait(5.0)
    assert returns.give_back(now=True) is False  # one at a time
    go_on.set()
