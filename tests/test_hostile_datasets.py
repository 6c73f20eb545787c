"""Datasets hypothesis makes up, and kinds that are hard to move: what arrives is what the stock loader delivers."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

import numpy as np  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper  # noqa: E402

from benchmarks.hostile import FORK_ONLY, KINDS, Hostile, as_is, identity  # noqa: E402
from benchmarks.hostile_items import Pair  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

# -- what an item may be -----------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)
SIZES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    made = (torch.rand(draw(SIZES), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 9).to(
        draw(st.sampled_from(DTYPES))
    )
    how = draw(st.sampled_from(("plain", "turned", "sliced", "spread", "sparse", "grad")))
    if how == "turned":
        return made.permute(tuple(reversed(range(made.dim()))))
    if how == "sliced" and made.dim():
        return made[::2]
    if how == "spread":
        return made.unsqueeze(-1).expand(*made.shape, 3)
    if how == "sparse" and made.dim() and made.dtype.is_floating_point:
        return made.to_sparse()
    return made.requires_grad_() if how == "grad" and made.dtype.is_floating_point else made


ARRAYS = st.builds(
    lambda shape, kind, step: np.ones(shape, kind)[..., ::step] if shape else np.ones((), kind),
    SIZES,
    st.sampled_from(("f4", "i8", "?", "U3", "c8", "M8[s]")),
    st.sampled_from((1, 2, -1)),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=70_000),
    tensors(),
    ARRAYS,
)
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)


class Walk:
    """Sets random numbers after each batch."""

    def __init__(self, loader: Any, kind: str | None, seed: int) -> None:
        self.loader, self.draw = loader, random.Random(seed)
        self.pipeline: Any = find(loader, workers_kind=kind).pipeline
        self.pipeline.prepare()

    def epoch(self, stop: int | None = None) -> list[Any]:
        seen: list[Any] = []
        iterator = self.pipeline.adopt(iter(self.loader))
        for batch in iterator:
            seen.append(identity(batch))
            if len(seen) == stop:
                break
            stages = self.pipeline.stages()
            self.pipeline.resize({s.name: self.draw.randint(1, min(4, s.high)) for s in stages})
        return seen


def loader(data: Any, workers: int, batch: int | None, context: str = "fork") -> DataLoader[Any]:
    options: dict[str, Any] = {"multiprocessing_context": context} if workers else {}
    shuffled: dict[str, Any] = {} if batch is None else {"shuffle": True, "generator": torch.Generator().manual_seed(7)}
    return DataLoader(data, batch_size=batch, num_workers=workers, collate_fn=as_is, **shuffled, **options)


def same(
    make: Callable[[], Any], kind: str, batch: int | None, seed: int, stop: int | None = None, context: str = "fork"
) -> None:
    # Of its own: what the training process has opened is not for workers.
    stock = loader(make(), 0, batch)
    expected = [[identity(part) for part in stock] for _ in range(2)]
    walk = Walk(loader(make(), 2, batch, context), kind, seed)
    try:
        assert walk.epoch() == expected[0]
        assert walk.epoch(stop) == expected[1][:stop]
    finally:
        walk.pipeline.close()
    assert not multiprocessing.active_children()


@given(
    st.lists(ITEMS, min_size=1, max_size=30),
    st.sampled_from(("process", "thread")),
    st.sampled_from((None, 1, 4)),
    st.integers(0, 999),
)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_items_hypothesis_makes_up(data: list[Any], kind: str, batch: int | None, seed: int) -> None:
    same(lambda: data, kind, batch, seed)


@given(st.lists(ITEMS, min_size=1, max_size=30), st.sampled_from(("process", "thread")), st.integers(0, 999))
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_items_hypothesis_makes_up_through_torchdata(data: list[Any], method: str, seed: int) -> None:
    context = "fork" if method == "process" else None
    source: Any = IterableWrapper(range(len(data)))
    mapper = ParallelMapper(source, data.__getitem__, num_workers=2, method=method, multiprocessing_context=context)  # type: ignore[arg-type]
    walk = Walk(Loader(mapper), None, seed)
    try:
        for _ in range(2):
            assert walk.epoch() == [identity(item) for item in data]
    finally:
        walk.pipeline.close()


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(("process", "thread")), st.integers(1, 60), st.integers(0, 999))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_kinds_that_are_hard_to_move(name: str, kind: str, items: int, seed: int) -> None:
    same(partial(Hostile, name, items), kind, (None, 3)[seed % 2], seed, stop=seed % items + 1)


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_other_start_methods(context: str) -> None:
    assert "objects" not in FORK_ONLY
    same(partial(Hostile, "objects", 12), "process", None, 1, context=context)


# -- the measure itself ------------------------------------------------------------------------------------------------


def different() -> Sequence[tuple[Any, Any]]:
    ones = torch.ones(2, 3)
    return (
        (ones, ones.double()),
        (ones, torch.ones(3, 2)),
        (ones, ones.clone().requires_grad_()),
        (ones, ones.to_sparse()),
        (ones, torch.nn.Parameter(ones)),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1, True),
        (np.float32(1), np.float64(1)),
        (Pair(1, 2), (1, 2)),
        (KINDS["objects"](Hostile("objects", 9), 1), KINDS["objects"](Hostile("objects", 9), 2)),
    )


@pytest.mark.parametrize("pair", different(), ids=range(len(different())))
def test_identity_tells_apart(pair: tuple[Any, Any]) -> None:
    assert identity(pair[0]) != identity(pair[1])
    assert identity(pair[0]) == identity(pair[0])


def test_every_kind_is_the_same_twice() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in KINDS:
            one, two = Hostile(name, 20), Hostile(name, 20)
            assert [identity(one[i]) for i in range(20)] == [identity(two[i]) for i in range(20)], name
