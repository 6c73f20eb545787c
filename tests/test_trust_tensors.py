"""What an audit broke in DataLoaders: tensors of every layout, and batches that the training changes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper  # noqa: E402

from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.torch.carry import _rebuild_spread, carry_tensor  # noqa: E402


def crossed(loader: DataLoader[Any]) -> list[Any]:
    """Return the batches of an epoch that workers of ours make from the first one on."""
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": 2, "load.window": 5})
    batches = list(loader)
    pipeline.close()
    return batches


# -- tensors of every layout -------------------------------------------------------------------------------------------

TENSORS = {
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(12).reshape(3, 4).t(),
    "a view of a large storage": lambda: torch.arange(1000.0).reshape(10, 100)[2:5, 10:90:7],
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 50),
    "expanded and turned": lambda: torch.arange(6).reshape(2, 1, 3).expand(2, 4, 3).permute(2, 0, 1),
    "overlapping": lambda: torch.arange(10.0).unfold(0, 4, 1),
    "overlapping with gaps": lambda: torch.arange(10.0)[::2].unfold(0, 3, 1),
    "far apart and overlapping": lambda: torch.arange(900.0).as_strided((3, 3), (200, 200)),
    "one element of many": lambda: torch.arange(10.0)[3:4],
    "one element of a column": lambda: torch.arange(10.0)[3:4].as_strided((1,), (0,)),
    "conjugate": lambda: torch.rand(4, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.rand(3, dtype=torch.complex64).conj().imag,
    "empty view": lambda: torch.zeros(4, 5)[:, :0],
    "scalar": lambda: torch.tensor(3.5),
    "bfloat16": lambda: torch.rand(4, 6).to(torch.bfloat16).t(),
    "bool": lambda: (torch.rand(5, 7) > 0.5).t(),
    "complex": lambda: torch.rand(4, 3, dtype=torch.complex64).t(),
}
FAR_APART = ("a view of a large storage", "far apart and overlapping")
"""They arrive with smaller gaps."""


class Shapes(Dataset[Any]):
    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        torch.manual_seed(i)
        return TENSORS[self.name]()


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_every_layout_cross_as_they_are(name: str) -> None:
    for i, tensor in enumerate(crossed(DataLoader(Shapes(name), batch_size=None, num_workers=1))):
        expected = Shapes(name)[i]
        assert torch.equal(tensor, expected)
        assert tensor.dtype == expected.dtype
        assert tensor.sum() == expected.sum()
        if name not in ("one element of a column", "empty view", *FAR_APART):
            assert tensor.stride() == expected.stride()


@pytest.mark.parametrize("size", [1, 300, 70_000])
def test_a_batch_begins_where_torchs_own_memory_does(size: int) -> None:
    """A matrix multiplication may round otherwise from another address on (MKL's own words)."""
    rows = [torch.zeros(size) for _ in range(24)]
    assert {batch.data_ptr() % 64 for batch in crossed(DataLoader(rows, batch_size=2, num_workers=1))} == {0}


def test_only_the_elements_of_a_view_are_sent() -> None:
    rebuild, parts = carry_tensor(torch.zeros(1000, 1000)[:, :10])
    assert rebuild is _rebuild_spread
    assert parts[0].nbytes == 4 * 10_000


SIZES, STRIDES = st.sampled_from((1, 1, 2, 3, 4)), st.sampled_from((0, 1, 1, 2, 3, 4, 6, 9, 12, 50))


@given(st.lists(st.tuples(SIZES, STRIDES), max_size=4), st.integers(0, 50))
def test_any_view_of_a_storage_crosses_as_it_is(dimensions: list[tuple[int, int]], offset: int) -> None:
    shape, strides = zip(*dimensions, strict=True) if dimensions else ((), ())
    view = torch.arange(700.0).as_strided(shape, strides, offset)
    rebuild, (raw, *rest) = carry_tensor(view)
    arrived = rebuild(raw.copy(), *rest)
    assert torch.equal(arrived, view)
    is_dense = 1 + sum((n - 1) * step for n, step in dimensions) <= 2 * view.numel()
    assert view.is_contiguous() or not is_dense or arrived.stride() == view.stride()


@given(st.permutations([0, 1, 2]), st.sampled_from((1, 2, 7)), st.integers(1, 9), st.integers(0, 99))
def test_sums_over_a_view_round_as_they_did(order: list[int], step: int, gap: int, seed: int) -> None:
    storage = torch.randn((23 + gap) * (17 + gap) * 40 * 7, generator=torch.Generator().manual_seed(seed))
    view = storage.as_strided((40, 17, 23), ((17 + gap) * 23 * step + gap, 23 * step + gap, step)).permute(order)
    rebuild, (raw, *rest) = carry_tensor(view)
    arrived = rebuild(raw.copy(), *rest)
    weight = torch.randn(view.shape[-1], 5, generator=torch.Generator().manual_seed(seed))
    for what in (
        torch.sum,
        torch.mean,
        torch.std,
        lambda x: x @ weight,
        *(partial(torch.sum, dim=d) for d in range(3)),
    ):
        assert torch.equal(what(arrived), what(view))


# -- batches that the training changes in their place ------------------------------------------------------------------


def shifted(items: list[Any]) -> Any:
    tokens = torch.stack([torch.arange(33) + item for item in items])
    return tokens[:, :-1], tokens[:, 1:]


def several(items: list[Any]) -> Any:
    whole = torch.rand(40, 50, generator=torch.Generator().manual_seed(items[0]))
    return {"whole": whole, "row": whole[3], "turned": whole.t(), "part": whole[5:9, ::3], "flat": whole.view(-1)}


def expanded(items: list[Any]) -> Any:
    row = torch.tensor(items, dtype=torch.float64)
    return [row, row.expand(3, -1), row.view(torch.int64), row[:1]]


def read_only(items: list[Any]) -> Any:
    small, large = np.arange(10) + items[0], np.arange(1000) + items[0]
    small.flags.writeable = large.flags.writeable = False
    return small, large, np.frombuffer(b"12345678", dtype=np.int64)


def many_read_only(items: list[Any]) -> Any:
    arrays = [np.arange(600) + items[0] for _ in range(600)]
    for array in arrays:
        array.flags.writeable = False
    return arrays


def broadcast(items: list[Any]) -> Any:
    return np.broadcast_to(np.arange(900) + items[0], (3, 900)), np.asfortranarray(np.ones((30, 40)))


def values(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


@pytest.mark.parametrize("collate", [shifted, several, expanded, read_only, many_read_only, broadcast])
def test_a_change_in_its_place_shows_where_it_does_in_a_stock_loader(collate: Any) -> None:
    def changed(tuned: bool) -> list[Any]:
        loader = DataLoader(list(range(32)), batch_size=4, num_workers=2, collate_fn=collate)
        pipeline = find(loader).pipeline if tuned else None
        seen: list[Any] = []
        iterator = iter(loader) if pipeline is None else pipeline.adopt(iter(loader))
        for number, batch in enumerate(iterator):
            if pipeline is not None and number == 0:
                pipeline.resize({"load": 3, "load.window": 8})
            parts = values(batch)
            parts[0] += 7
            parts[-1] *= 3
            forms = [part.strides if isinstance(part, np.ndarray) else part.stride() for part in parts]
            seen.append([forms, *(part.tolist() for part in parts)])
        if pipeline is not None:
            pipeline.close()
        return seen

    assert changed(True) == changed(False)


def nested(items: list[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.arange(float(item % 3 + 1)) for item in items])


def stored(items: list[Any]) -> Any:
    return torch.tensor(items).untyped_storage()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("collate", [nested, stored])
def test_what_looks_like_a_tensor_and_is_none_crosses(collate: Any) -> None:
    loader = DataLoader(list(range(32)), batch_size=4, num_workers=1, collate_fn=collate)
    expected, seen = (
        [[part.tolist() if torch.is_tensor(part) else part for part in batch] for batch in batches]
        for batches in (list(loader), crossed(loader))
    )
    assert seen == expected


def test_tensors_on_one_memory_are_none_of_each_others_views() -> None:
    """A view in autograd's sense shares a version: a change of the one would forbid a gradient by the other."""
    for batch in crossed(DataLoader(list(range(32)), batch_size=4, num_workers=1, collate_fn=several)):
        weight = torch.ones(50, requires_grad=True)
        loss = (batch["row"] * weight).sum()
        batch["whole"].add_(1.0)
        loss.backward()


def sparse(rows: list[int]) -> torch.Tensor:
    return torch.eye(4).to_sparse() * rows[0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_batches_arrive() -> None:
    batches = crossed(DataLoader(list(range(40)), batch_size=4, collate_fn=sparse, num_workers=1))
    assert [int(batch.to_dense()[0, 0]) for batch in batches] == list(range(0, 40, 4))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sizes_of_sparse_tensors() -> None:
    from intune_callbacks.pipelines.counters import nbytes

    coo = torch.eye(100).to_sparse()
    assert nbytes(coo) == 100 * 4 + 200 * 8
    assert nbytes([torch.eye(100).to_sparse_csr()]) == 100 * 4 + 100 * 8 + 101 * 8


def test_a_run_of_mode_observe_survives_any_batch() -> None:
    loader = Loader(ParallelMapper(IterableWrapper(range(8)), lambda i: torch.eye(4).to_sparse(), num_workers=1))
    pipeline = find(loader, live=False).pipeline
    pipeline.prepare()
    assert len(list(loader)) == 8
    pipeline.close()
