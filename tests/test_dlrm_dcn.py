"""DLRM-DCNv2: the cross layers are the formula, bags of ids are fixed, and all frameworks train it alike."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_examples.models.multihot import bags_of
from dlrm_examples.models.sizes import DLRMConfig
from dlrm_examples.models.tables import MLPERF_BAGS, TABLES
from intune_callbacks.errors import ConfigError
from tests.dlrm_rows import ROOT

SMALL = {"table_rows": (50, 3, 700), "embedding_dim": 4, "dense_features": 5, "bottom": (8, 4), "top": (6, 1)}
SIZES = st.integers(1, 6).flatmap(
    lambda tables: st.tuples(
        st.lists(st.integers(1, 9), min_size=tables, max_size=tables),
        st.lists(st.integers(1, 2**31 - 1), min_size=tables, max_size=tables),
    )
)


def ids(rows: tuple[int, ...], samples: int = 40) -> np.ndarray:
    random = np.random.default_rng(2)
    return np.stack([random.integers(0, n, samples) for n in rows], axis=1).astype(np.int32)


@given(SIZES, st.integers(0, 2**32 - 1))
def test_a_bag_is_its_id_and_others_of_its_table(sizes: tuple[list[int], list[int]], seed: int) -> None:
    bag_sizes, rows = sizes
    categories = np.random.default_rng(seed).integers(0, rows, (5, len(rows))).astype(np.int32)
    bags = bags_of(bag_sizes, rows)
    expanded = bags.expand(categories)
    assert expanded.shape == (5, sum(bag_sizes))
    assert (expanded[:, bags.starts[:-1]] == categories).all()
    assert ((expanded >= 0) & (expanded < np.repeat(rows, bag_sizes))).all()
    assert (bags.expand(categories[::-1])[::-1] == expanded).all(), "an id's bag does not depend on where it stands"


@pytest.mark.parametrize("rows", [1000, 1024, 3_125, 65_536])
def test_further_ids_are_uniform_and_unlike_each_other(rows: int) -> None:
    expanded = bags_of((9,), (rows,)).expand(np.arange(rows, dtype=np.int32)[:, None])
    for column in expanded.T[1:]:
        # Of n uniform draws of n, a share 1 - 1 / e distinct ones, with a standard deviation of about .31 / sqrt(n).
        assert len(np.unique(column)) / rows == pytest.approx(1 - np.exp(-1), abs=5 * 0.31 / rows**0.5)
    correlations = np.corrcoef(expanded.T) - np.eye(9)
    assert np.abs(correlations).max() < 5 / rows**0.5


def test_torch_expands_as_defined() -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.layers_torch import BagsOfIds

    rows = TABLES["criteo-1tb-full"]
    categories = ids(rows, 20)
    categories[0] = np.array(rows) - 1
    expected = bags_of(MLPERF_BAGS, rows).expand(categories)
    assert (BagsOfIds(MLPERF_BAGS, rows)(torch.from_numpy(categories)).numpy() == expected).all()


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_cross_layers_are_the_formula(width: int, layers: int, rank: int) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.layers_torch import LowRankCross

    cross = LowRankCross(width, layers, rank).double()
    first = torch.rand(7, width, dtype=torch.float64)
    expected = []
    for x0 in first.numpy():
        x = x0
        for down, up in zip(cross.down, cross.up, strict=True):
            v, w, b = (p.detach().numpy() for p in (down.weight, up.weight, up.bias))
            x = x0 * (w @ (v @ x) + b) + x
        expected.append(x)
    np.testing.assert_allclose(cross(first).detach().numpy(), expected, rtol=1e-12)


def test_cross_layers_begin_as_torchrecs() -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.dlrm_torch import DLRM

    config = DLRMConfig((10,) * 26, 32, bottom=(32,), top=(1,), interaction="dcn", dcn_layers=2, dcn_low_rank=50)
    model = DLRM(config, torch.Generator().manual_seed(0))
    assert config.interaction_width == 27 * 32
    for down, up in zip(model.cross.down, model.cross.up, strict=True):
        for layer in (down, up):
            assert layer.weight.std().item() == pytest.approx((2 / (27 * 32 + 50)) ** 0.5, rel=0.03)
        assert not up.bias.any()
    again = DLRM(config, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("sparse", [True, False])
def test_bags_are_summed(sparse: bool) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.dlrm_torch import DLRM

    model = DLRM(DLRMConfig(**SMALL, bag_sizes=(3, 1, 7), sparse_gradients=sparse), torch.Generator().manual_seed(1))
    categories = ids(SMALL["table_rows"])
    bags = bags_of((3, 1, 7), SMALL["table_rows"])
    expanded = torch.from_numpy(bags.expand(categories))
    expected = torch.stack(
        [model.table(t)[expanded[:, bags.starts[t] : bags.starts[t + 1]]].sum(dim=1) for t in range(3)], dim=1
    )
    torch.testing.assert_close(model.embed_bags(model.bags(torch.from_numpy(categories))), expected)
    dense = torch.rand(40, 5)
    model(dense, torch.from_numpy(categories)).sum().backward()
    assert model.embeddings.weight.grad.is_sparse == sparse
    looked_up = {int(row) for row in expanded[:, :3].flatten()}
    assert {int(row) for row in model.table_gradient(0).abs().sum(dim=1).nonzero()} == looked_up


def test_state_holds_the_weights_only() -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.dlrm_torch import DLRM

    model = DLRM(DLRMConfig(**SMALL, interaction="dcn", dcn_low_rank=2, bag_sizes=(1, 2, 3)), torch.Generator())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DLRMConfig(**SMALL, interaction="don", dcn_layers=0, dcn_low_rank=True, bag_sizes=(1, 2))
    assert [p.split("=")[0] for p in caught.value.problems] == [
        "interaction",
        "dcn_layers",
        "dcn_low_rank",
        "bag_sizes",
    ]


PARITY = """
import sys
import keras, numpy as np, torch
from dlrm_examples.models.dlrm_keras import DLRM as InKeras
from dlrm_examples.models.dlrm_torch import DLRM as InTorch
from dlrm_examples.models.optimizers_torch import optimizer_for
from dlrm_examples.models.optimizers_keras import optimizer_for as optimizer_in_keras
from dlrm_examples.models.schedule import Schedule
from dlrm_examples.models.sizes import DLRMConfig
from dlrm_examples.models.multihot import bags_of

config = DLRMConfig((50, 3, 700), 4, 5, (8, 4), (6, 1), interaction="dcn", dcn_layers=2, dcn_low_rank=3,
                    bag_sizes=(3, 1, 7))
model, other = InKeras(config, seed=1), InTorch(config)
tensor = lambda array: torch.from_numpy(np.array(array))
with torch.no_grad():
    for index in range(3):
        other.table(index).copy_(tensor(model.table(index)))
    linear = [m for part in (other.bottom, other.top) for m in part if isinstance(m, torch.nn.Linear)]
    crosses = [layer for pair in zip(other.cross.down, other.cross.up) for layer in pair]
    for mine, theirs in zip([*model.bottom, *model.top, *model.cross], [*linear, *crosses], strict=True):
        for weights, parameter in zip(mine.get_weights(), theirs.parameters(), strict=True):
            parameter.copy_(tensor(weights.T))
random = np.random.default_rng(0)
dense = random.random((40, 5), np.float32)
ids = np.stack([random.integers(0, n, 40) for n in config.table_rows], axis=1).astype(np.int32)
labels = (random.random(40) < 0.5).astype(np.float32)
expanded = keras.ops.convert_to_numpy(model.expand(ids))
assert (expanded == bags_of(config.bag_sizes, config.table_rows).expand(ids)).all()

schedule = Schedule(3, 4, 6)
tables = other.embeddings.weight
optimizer = optimizer_for("adagrad", [tables], [p for p in other.parameters() if p is not tables], 0.05, 1e-4)
rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.rate(step, 0.05) / 0.05)
model.compile(optimizer_in_keras("adagrad", 0.05, 1e-4, schedule), keras.losses.BinaryCrossentropy(from_logits=True))
for _ in range(12):
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(other(tensor(dense), tensor(ids)), tensor(labels))
    loss.backward()
    optimizer.step()
    rates.step()
    got = float(model.train_on_batch({"dense": dense, "categories": ids}, labels))
    assert abs(got - float(loss.detach())) < 1e-6, (got, float(loss.detach()))
worst = max(abs(model.table(i) - other.table(i).numpy()).max() for i in range(3))
print(f"{worst:.1e}")
assert worst < 3e-6
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_keras_trains_it_as_torch_does(backend: str) -> None:
    for package in ("torch", "keras", "tensorflow", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    # Keras takes its backend once in a process.
    done = subprocess.run(
        [sys.executable, "-c", PARITY],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
