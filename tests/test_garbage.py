"""Our start leaves the garbage collector as it was, and does not bring the next full collection forward."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from itertools import count

import pytest

from intune_callbacks.session import garbage
from intune_callbacks.session.garbage import uncounted


class Node:
    """What can be in a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_starts", count())
    gc.collect()
    yield
    gc.unfreeze()
    gc.enable()


def objects() -> list[list[int]]:
    """Return as many new objects as make Python walk the whole heap: over a quarter of the old ones."""
    return [[number] for number in range(max(len(gc.get_objects()), 200_000))]


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its collector is incremental")
@pytest.mark.parametrize("is_first", [True, False])
def test_what_stays_of_the_first_start_alone_does_not_bring_a_full_collection(is_first: bool) -> None:
    if not is_first:
        with uncounted():
            pass
    for _ in range(12):
        gc.collect(1)  # as long a time since the last one as Python waits for
    before = full_collections()
    with uncounted():
        kept = objects()
    later = [[number] for number in range(20_000)]  # in the course of which Python looks whether one is due
    assert (full_collections() > before) != is_first
    del kept, later


def test_garbage_is_collected_and_not_made_old() -> None:
    with uncounted():
        seen = weakref.ref(Node())
        assert seen() is not None
    assert seen() is None


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncounted():
        kept = [[number] for number in range(100)]
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    del kept


def test_nothing_is_frozen_afterwards_and_an_error_passes() -> None:
    with pytest.raises(ValueError, match="ours"), uncounted():
        raise ValueError("ours")
    assert gc.isenabled() and not gc.get_freeze_count()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with uncounted():
        assert not gc.isenabled()
    assert not gc.isenabled()
