"""What an audit broke in DataLoaders: whose dataset may leave the training process, whose random numbers count."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")

from lightning.fabric.utilities.seed import pl_worker_init_function  # noqa: E402
from torch.utils.data import DataLoader, Dataset, get_worker_info  # noqa: E402
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper  # noqa: E402

from intune_callbacks import ConfigError  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.measure.idle import IdleCpus  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.torch_carry import _rebuild_spread, carry_tensor  # noqa: E402

# -- num_workers=0: the dataset stays in the training process ----------------------------------------------------------


class Records(Dataset[Any]):
    """One open file, as of h5py, lmdb or tar: seek and read."""

    def __init__(self, path: Path, count: int = 800) -> None:
        path.write_bytes(b"".join(i.to_bytes(8, "little") * 8 for i in range(count)))
        self.file, self.count = path.open("rb", buffering=0), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.file.seek(64 * i)
        return torch.frombuffer(bytearray(self.file.read(64)), dtype=torch.int64)


class Bound(Dataset[Any]):
    """Works in the process that made it only: CUDA tensors, a database handle, TensorFlow or JAX inside."""

    def __init__(self) -> None:
        self.pid, self.hardness = os.getpid(), 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return torch.tensor([float(i), float(self.hardness)])


def pushed(loader: DataLoader[Any], **options: Any) -> list[Any]:
    """All batches, while more workers are asked for at each."""
    pipeline = find(loader, **options).pipeline
    assert pipeline is not None
    iterator, batches = pipeline.adopt(iter(loader)), []
    for batch in iterator:
        pipeline.resize({"load": 4, "load.window": 16})
        batches.append(batch)
    pipeline.close()
    return batches


def test_an_open_file_is_not_shared_behind_the_users_back(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    batches = pushed(DataLoader(records, batch_size=8))
    records.file.close()
    assert [int(row) for batch in batches for row in batch[:, 0]] == list(range(800))


def test_what_the_training_changes_in_the_dataset_is_in_the_next_batch() -> None:
    dataset = Bound()
    loader = DataLoader(dataset, batch_size=4)
    pipeline = find(loader).pipeline
    seen = []
    for batch in pipeline.adopt(iter(loader)):
        pipeline.resize({"load": 4, "load.window": 16})
        seen.append(int(batch[0, 1]))
        dataset.hardness += 1
    pipeline.close()
    assert seen == list(range(10))


class Steps(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(2, 1), 0

    def training_step(self, batch: Any, index: int) -> Any:
        self.steps += 1
        return self.layer(batch[0] if isinstance(batch, list | tuple) else batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(loader: DataLoader[Any], **options: Any) -> tuple[int, dict[str, Any]]:
    callback = InTuneCallback(show_card=False, decide_every_s=0.0, decide_every_batches=1, warmup_batches=0, **options)
    model = Steps()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(model, loader)
    return model.steps, callback.report


def with_a_lambda(rows: list[Any]) -> Any:
    return torch.stack(rows), (lambda: None)


@pytest.mark.parametrize("collate", [None, with_a_lambda])
def test_a_dataset_bound_to_its_process_trains_under_the_callback(collate: Any) -> None:
    steps, report = fit(DataLoader(Bound(), batch_size=4, collate_fn=collate))
    assert steps == 20
    assert report["frozen"] is None
    assert report["changes"] == 0
    assert {stage["name"]: stage["current"] for stage in report["stages"]} == {"load": 0, "load.window": 1}


class Slow(Bound):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, i: int) -> Any:
        import time

        time.sleep(0.002)
        return super().__getitem__(i)


def test_the_report_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleCpus, "read", lambda self: 2.0)  # where all are busy no worker is advised
    steps, report = fit(DataLoader(Slow(), batch_size=4))
    assert steps == 120
    assert report["causes"][0]["kind"] == "loader"
    assert "workers_kind='process' or 'thread'" in report["causes"][0]["sentence"]
    assert "DataLoader(num_workers=" in report["next"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_naming_a_kind_of_workers_is_consent(kind: str) -> None:
    loader = DataLoader(list(range(64)), batch_size=4)
    pipeline = find(loader, workers_kind=kind).pipeline
    iterator = pipeline.adopt(iter(loader))
    first = next(iterator)
    assert pipeline.resize({"load": 2, "load.window": 4})["load"] == 2
    assert [int(i) for batch in [first, *iterator] for i in batch] == list(range(64))
    pipeline.close()


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ConfigError, match="workers_kind='fibre': expected one of process, thread"):
        InTuneCallback(workers_kind="fibre")


# -- the same loader for training and validation -----------------------------------------------------------------------


def test_validating_on_the_same_loader_in_mid_epoch_leaves_the_numbers_with_the_training() -> None:
    loader = DataLoader(list(range(64)), batch_size=4, num_workers=1)
    pipeline = find(loader).pipeline
    training = pipeline.adopt(iter(loader))
    seen = [next(training) for _ in range(4)]
    assert len(list(loader)) == 16
    pipeline.resize({"load": 3, "load.window": 9})
    assert training.engine is not None and training.engine.window == 9
    assert [int(i) for batch in [*seen, *training] for i in batch] == list(range(64))
    second = iter(loader)
    pipeline.resize({"load": 2, "load.window": 5})
    assert second.engine.window == 5
    pipeline.close()


# -- random numbers ----------------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([torch.rand(1).item(), random.random(), np.random.rand()], dtype=torch.float64)


def drawn(workers: int, rank: int | None = 0, seed: int = 42, epochs: int = 2, init: Any = None) -> list[Any]:
    """What the epochs draw that ours compute from the first batch on; the first epoch is stock."""
    torch.manual_seed(seed)
    init = partial(pl_worker_init_function, rank=rank) if rank is not None else init
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2, worker_init_fn=init)
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": workers, "load.window": 2 * workers + 1})
    out = [torch.cat(list(loader)) for _ in range(epochs)]
    pipeline.close()
    return out


def test_ranks_draw_other_numbers_as_with_the_stock_loader() -> None:
    own, other = drawn(3, rank=0), drawn(3, rank=1)
    for column in range(3):
        assert not torch.equal(own[0][:, column], other[0][:, column])


def test_no_sample_depends_on_how_many_workers_there_are() -> None:
    few, many = drawn(3), drawn(5)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))


@pytest.mark.parametrize("rank", [0, None])
def test_epochs_and_seeds_draw_other_numbers(rank: int | None) -> None:
    first, second = drawn(3, rank)
    assert len({float(value) for value in torch.cat([first, second]).reshape(-1)}) == 2 * 32 * 3
    again, other = drawn(3, rank), drawn(3, rank, seed=43)
    assert torch.equal(first, again[0])
    for column in range(3):
        assert not torch.equal(first[:, column], other[0][:, column])


def seeds_numpy(worker_id: int) -> None:
    np.random.seed(7)


def test_a_seed_of_the_users_own_counts() -> None:
    """The user wants the same numpy numbers in each epoch; Python's and torch's go on."""
    first, second = drawn(3, rank=None, init=seeds_numpy)
    assert torch.equal(first[:, 2], second[:, 2])
    assert len(set(first[:, 2].tolist())) == 32
    assert not torch.equal(first[:, 0], second[:, 0])
    assert not torch.equal(first[:, 1], second[:, 1])


def seeds_with_the_largest(worker_id: int) -> None:
    torch.manual_seed(-1)


def test_the_largest_seed_has_a_successor() -> None:
    (first,) = drawn(3, rank=None, init=seeds_with_the_largest, epochs=1)
    assert len(set(first[:, 0].tolist())) == 32


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_the_first_worker_tells_reaches_the_others_with_other_start_methods(method: str) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"multiprocessing_context": method, "worker_init_fn": seeds_numpy}
    loader = DataLoader(Noisy(), batch_size=8, num_workers=1, **options)
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": 2, "load.window": 6})
    first, second = (torch.cat(list(loader))[:, 2] for _ in range(2))
    pipeline.close()
    assert torch.equal(first, second)


class Asks(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        return info.id, info.num_workers


def test_worker_ids_stay_below_the_users_number() -> None:
    loader = DataLoader(Asks(), batch_size=1, num_workers=2)
    pipeline = find(loader).pipeline
    iterator = pipeline.adopt(iter(loader))
    pipeline.resize({"load": 6, "load.window": 12})
    seen = [tuple(int(part) for part in batch) for batch in iterator]
    pipeline.close()
    assert {number for _, number in seen} == {2}
    assert {worker for worker, _ in seen} <= {0, 1}


def augmented(i: int) -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def mapped(seed: int, workers: int) -> list[list[Any]]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loader = Loader(ParallelMapper(IterableWrapper(range(8)), augmented, num_workers=1, method="process"))
    pipeline = find(loader).pipeline
    pipeline.prepare()
    pipeline.resize({"augmented": workers})
    out = [list(loader) for _ in range(2)]
    pipeline.close()
    return out


def test_process_mappers_draw_other_numbers_in_each_epoch_and_for_each_seed() -> None:
    one = mapped(1, 1)
    assert len({value for epoch in one for item in epoch for value in item}) == 2 * 8 * 3
    assert one == mapped(1, 3)
    two = mapped(2, 1)
    assert not {value for epoch in one for item in epoch for value in item} & {
        value for epoch in two for item in epoch for value in item
    }


def test_process_mappers_leave_the_trainings_random_state_alone() -> None:
    mapped(1, 2)
    after = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert after == (torch.rand(1), random.random(), np.random.rand())


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
    loader = DataLoader(Shapes(name), batch_size=None, num_workers=1)
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": 2, "load.window": 5})
    ours = list(loader)
    pipeline.close()
    for i, tensor in enumerate(ours):
        expected = Shapes(name)[i]
        assert torch.equal(tensor, expected)
        assert tensor.dtype == expected.dtype
        assert tensor.sum() == expected.sum()
        if name not in ("one element of a column", "empty view", *FAR_APART):
            assert tensor.stride() == expected.stride()


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
    pipeline = find(loader).pipeline
    expected = [[part.tolist() if torch.is_tensor(part) else part for part in batch] for batch in loader]
    pipeline.prepare()
    pipeline.resize({"load": 2, "load.window": 5})
    seen = [[part.tolist() if torch.is_tensor(part) else part for part in batch] for batch in loader]
    pipeline.close()
    assert seen == expected


def test_tensors_on_one_memory_are_none_of_each_others_views() -> None:
    """A view in autograd's sense shares a version: a change of the one would forbid a gradient by the other."""
    loader = DataLoader(list(range(32)), batch_size=4, num_workers=1, collate_fn=several)
    pipeline = find(loader).pipeline
    list(pipeline.adopt(iter(loader)))
    pipeline.resize({"load": 2, "load.window": 5})
    for batch in loader:
        weight = torch.ones(50, requires_grad=True)
        loss = (batch["row"] * weight).sum()
        batch["whole"].add_(1.0)
        loss.backward()
    pipeline.close()


def sparse(rows: list[int]) -> torch.Tensor:
    return torch.eye(4).to_sparse() * rows[0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_batches_arrive() -> None:
    loader = DataLoader(list(range(40)), batch_size=4, collate_fn=sparse, num_workers=1)
    batches = pushed(loader)
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


INSIDE = """
import faulthandler, sys, numpy as np, torch
from torch.utils.data import DataLoader, Dataset
from intune_callbacks.pipelines.find import find
faulthandler.dump_traceback_later(60, exit=True)
if sys.argv[1] == "tensorflow":
    import tensorflow as tf
    op = lambda x: tf.linalg.matmul(x, x).numpy()
else:
    import jax
    f = jax.jit(lambda x: x @ x)
    op = lambda x: np.asarray(f(x))
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.from_numpy(np.array(op(np.full((64, 64), i, np.float32))))
loader = DataLoader(Data(), batch_size=2)
assert len(list(loader)) == 4
pipeline = find(loader).pipeline
iterator = pipeline.adopt(iter(loader))
pipeline.resize({"load": 2})
print(len(list(iterator)))
"""


@pytest.mark.parametrize("runtime", ["tensorflow", "jax"])
def test_a_dataset_that_calls_another_runtime_does_not_hang(runtime: str) -> None:
    pytest.importorskip(runtime)
    command = [sys.executable, "-W", "ignore", "-c", INSIDE, runtime]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["4"]
