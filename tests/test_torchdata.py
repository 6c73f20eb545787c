"""A torchdata.nodes graph that is being resized delivers, and resumes, what the untouched one does."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
tn = pytest.importorskip("torchdata.nodes")

from torch.utils.data import RandomSampler, SequentialSampler  # noqa: E402

from intune_callbacks.pipelines.check import check_pipeline  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

N = 160


@pytest.fixture(autouse=True)
def _collect_here() -> Iterator[None]:
    """A stock mapper that is collected in one of its own threads tries to join itself: collect in this thread only."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def slow_square(x: int) -> int:
    if x % 31 == 7:
        time.sleep(0.002)
    return x * x


def stack(xs):
    return torch.tensor(xs)


def source(seed: int | None):
    if seed is None:
        return tn.SamplerWrapper(SequentialSampler(range(N)))
    return tn.SamplerWrapper(RandomSampler(range(N), generator=torch.Generator().manual_seed(seed)))


def threads():
    node = tn.ParallelMapper(source(1), slow_square, num_workers=2)
    node = tn.ParallelMapper(tn.Batcher(node, 4, drop_last=False), stack, num_workers=1)
    return tn.Loader(tn.Prefetcher(node, 2))


def processes():
    node = tn.ParallelMapper(source(1), slow_square, num_workers=2, method="process")
    return tn.Loader(tn.Batcher(node, 4, drop_last=False))


def prebatch():
    return tn.Loader(tn.ParallelMapper(source(None), slow_square, num_workers=2, prebatch=3))


def sparse_snapshots():
    node = tn.ParallelMapper(source(None), slow_square, num_workers=2, snapshot_frequency=5)
    return tn.Loader(tn.Prefetcher(node, 3, snapshot_frequency=3))


def several_sources():
    def branch(offset: int):
        wrapped = tn.IterableWrapper(range(offset, offset + 50))
        return tn.ParallelMapper(wrapped, functools.partial(slow_square), num_workers=1)

    mixed = tn.MultiNodeWeightedSampler({"a": branch(0), "b": branch(1000)}, {"a": 0.6, "b": 0.4}, seed=3)
    return tn.Loader(tn.Prefetcher(mixed, 2))


GRAPHS = [threads, processes, prebatch, sparse_snapshots, several_sources]


def key(item):
    return item.tolist() if isinstance(item, torch.Tensor) else item


def stock(build, epochs: int = 1) -> list:
    loader = build()
    runs = [[key(item) for item in loader] for _ in range(epochs)]
    return runs[0] if epochs == 1 else runs


def live(build):
    loader = build()
    pipeline = find(loader).pipeline
    pipeline.prepare()
    return pipeline, pipeline.adopt(iter(loader))


@pytest.mark.parametrize("build", GRAPHS)
def test_exact_while_resized(build) -> None:
    assert check_pipeline(lambda: live(build), stock(build), key=key, resizes=40) > 10


def test_unordered_loses_and_repeats_nothing() -> None:
    def build():
        return tn.Loader(tn.ParallelMapper(source(None), slow_square, num_workers=3, in_order=False))

    pipeline, iterator = live(build)
    got = []
    for number, item in enumerate(iterator):
        got.append(item)
        pipeline.resize({"slow_square": 1 + number % 4})
    pipeline.close()
    assert sorted(got) == sorted(stock(build))


def test_stages_carry_the_users_names() -> None:
    pipeline, _ = live(threads)
    assert [(s.name, s.window_of, s.when) for s in pipeline.stages()] == [
        ("slow_square", None, "now"),
        ("slow_square.window", "slow_square", "now"),
        ("stack", None, "now"),
        ("stack.window", "stack", "now"),
        ("prefetch", None, "now"),
    ]
    pipeline.close()


@pytest.mark.parametrize("build", GRAPHS)
@pytest.mark.parametrize("at", [0, 1, 17])
def test_a_state_taken_in_the_middle_loads_into_stock_and_live(build, at: int) -> None:
    expected = stock(build)
    pipeline, iterator = live(build)
    head = []
    for number in range(at):
        head.append(key(next(iterator)))
        pipeline.resize({s.name: 1 + number % 4 for s in pipeline.stages()})
    state = iterator.state_dict()
    pipeline.close()

    plain = build()
    # MultiNodeWeightedSampler goes on writing into the state it was given.
    plain.load_state_dict(copy.deepcopy(state))
    assert head + [key(item) for item in plain] == expected

    again = build()
    again.load_state_dict(state)
    resumed = find(again).pipeline
    resumed.prepare()
    assert head + [key(item) for item in again] == expected
    resumed.close()


@pytest.mark.parametrize("build", [threads, processes])
def test_epochs_early_stop_and_release(build) -> None:
    expected = stock(build, epochs=3)
    loader = build()
    pipeline = find(loader).pipeline
    pipeline.prepare()
    assert [key(item) for item in loader] == expected[0]
    pipeline.resize({s.name: 3 for s in pipeline.stages()})
    assert [key(item) for item in loader] == expected[1]
    pipeline.release()
    assert [key(item) for item in loader] == expected[2]
    pipeline.close()

    pipeline, iterator = live(build)
    next(iterator)
    pipeline.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("intune-")]


def broken(x: int) -> int:
    if x == 40:
        raise ValueError("the user's own error")
    return x


@pytest.mark.parametrize("method", ["thread", "process"])
def test_an_error_surfaces_at_its_item(method: str) -> None:
    def build():
        return tn.Loader(tn.Prefetcher(tn.ParallelMapper(source(None), broken, num_workers=2, method=method), 2))

    pipeline, iterator = live(build)
    for number in range(40):
        assert next(iterator) == number
        pipeline.resize({"broken": 1 + number % 3})
    with pytest.raises(ValueError, match="the user's own error"):
        next(iterator)
    pipeline.close()


def test_a_graph_without_workers_says_what_would_help() -> None:
    found = find(tn.Loader(tn.Mapper(source(None), slow_square)))
    assert found.pipeline is None and "num_workers=1" in found.why


def test_watching_times_the_functions_and_changes_nothing() -> None:
    expected = stock(threads)
    loader = threads()
    pipeline = find(loader, live=False).pipeline
    pipeline.prepare()
    got = []
    for item in loader:
        got.append(key(item))
        pipeline.resize({"slow_square": 4})
    assert got == expected
    assert {s.name: s.current for s in pipeline.stages()}["slow_square"] == 2
    assert pipeline.stats().stages["slow_square"].items == N
    pipeline.release()
    assert [key(item) for item in loader] == stock(threads, epochs=2)[1]
