"""What a torchdata.nodes graph with live numbers says of an error, and of a state, is what the stock one says."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
tn = pytest.importorskip("torchdata.nodes")

from test_torchdata import N, live, slow_square, source, stock  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402


@pytest.fixture(autouse=True)
def _collect_here() -> Iterator[None]:
    """A stock mapper that is collected in one of its own threads tries to join itself: collect in this thread only."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


class Two(Exception):
    """Cannot be made anew of its words."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


def raises(kind: type[Exception], x: int) -> int:
    if x == 8:
        raise (Two("one", "two") if kind is Two else kind("the user's own error"))
    return x


class BreaksAtEight:
    def __iter__(self) -> Iterator[int]:
        return (raises(ValueError, x) for x in range(20))


def ends_of(method: str):
    """Of graphs with an error, by what raises it."""
    return {
        "function": lambda kind: tn.ParallelMapper(source(None), functools.partial(raises, kind), 2, method=method),
        "function, read ahead": lambda kind: tn.Prefetcher(
            tn.ParallelMapper(source(None), functools.partial(raises, kind), 2, method=method), 2
        ),
        "source": lambda kind: tn.ParallelMapper(tn.IterableWrapper(BreaksAtEight()), slow_square, 2, method=method),
    }


def told_by(iterator) -> list:
    """Return the items, and the error behind them without the frames it came through."""
    got = []
    try:
        for item in iterator:
            got.append(item)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
        got.append((type(error), lines))
    return got


@pytest.mark.parametrize("method", ["thread", "process"])
@pytest.mark.parametrize("kind", [ValueError, KeyError, Two, StopIteration])
@pytest.mark.parametrize("where", ["function", "function, read ahead", "source"])
def test_an_error_is_told_as_in_stock(method: str, kind: type[Exception], where: str) -> None:
    def build():
        return tn.Loader(ends_of(method)[where](kind))

    expected = told_by(iter(build()))
    pipeline, iterator = live(build)
    got = told_by(iterator)
    pipeline.close()
    assert got == expected


def test_a_source_that_changes_the_state_it_was_given() -> None:
    """As MultiNodeWeightedSampler does: the state of a graph that was resumed resumes once more."""

    def build():
        few, many = tn.IterableWrapper(range(5)), tn.IterableWrapper(range(50, 70))
        mixed = tn.MultiNodeWeightedSampler({"a": few, "b": many}, {"a": 0.5, "b": 0.5}, "ALL_DATASETS_EXHAUSTED")
        node = tn.ParallelMapper(mixed, slow_square, num_workers=1, snapshot_frequency=0)
        return tn.Loader(node, restart_on_stop_iteration=False)

    def begun(state):
        loader = build()
        if state is not None:
            loader.load_state_dict(state)
        pipeline = find(loader).pipeline
        pipeline.prepare()
        return pipeline, iter(loader)

    pipeline, iterator = begun(None)
    head = [next(iterator) for _ in range(4)]
    state = iterator.state_dict()
    pipeline.close()
    pipeline, iterator = begun(state)
    assert head + list(iterator) == stock(build)
    state = iterator.state_dict()
    pipeline.close()
    pipeline, iterator = begun(state)
    assert list(iterator) == []
    pipeline.close()


def test_a_state_that_lies_behind_the_end_is_refused_as_in_stock() -> None:
    loader = tn.Loader(tn.ParallelMapper(source(None), slow_square, num_workers=1))
    pipeline, _ = live(lambda: loader)
    iterator = iter(loader)
    state = copy.deepcopy(iterator.state_dict())
    state["root"]["it_state"]["steps_since_snapshot"] = N + 1
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=f"fast-forward {N + 1} items during init but hit StopIteration after {N} "):
        iter(loader)
    pipeline.close()
