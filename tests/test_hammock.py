"""Hammock: the sum of looked-up rows is the product with the one-hot vector; it is saved whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_examples.criteo.reading import Reading
from dlrm_examples.generate import generate
from dlrm_examples.models.hammock import HammockConfig, quantiles
from intune_callbacks.errors import ConfigError

SIZES = HammockConfig(table_rows=(5, 1, 9), buckets=4, hidden=6, dense_features=2)
EDGES = np.array([[0.0, 1.0, 1.0], [-2.5, 0.0, 3.0]], np.float32)
# Values between the edges and on them; some edges are equal.
numbers = st.sampled_from([-9.0, -2.5, 0.0, 0.5, 1.0, 2.0, 3.0, 99.0])
samples = st.lists(
    st.tuples(numbers, numbers, st.integers(0, 4), st.just(0), st.integers(0, 8)), min_size=1, max_size=5
)


def arrays(rows: list[tuple[float, ...]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(rows, np.float32)
    return np.ascontiguousarray(table[:, :2]), table[:, 2:].astype(np.int32)


def one_hot(dense: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Return the inputs as the abstract has them: [B, 4 + 4 + 5 + 1 + 9] zeros and ones."""
    parts = [np.eye(4)[np.searchsorted(EDGES[f], dense[:, f], side="right")] for f in range(2)]
    parts += [np.eye(rows)[categories[:, t]] for t, rows in enumerate(SIZES.table_rows)]
    return np.concatenate(parts, axis=1)


def by_hand(inputs: np.ndarray, first: np.ndarray, bias: np.ndarray, second: np.ndarray, last: float) -> np.ndarray:
    return np.maximum(inputs @ first.astype(np.float64) + bias, 0) @ second.astype(np.float64).reshape(-1) + last


def test_quantiles_cut_into_equal_parts() -> None:
    random = np.random.default_rng(0)
    dense = random.exponential(size=(4_000, 3)).astype(np.float32)
    edges = quantiles(dense, 8)
    assert edges.shape == (3, 7)
    for feature in range(3):
        counts = np.bincount(np.searchsorted(edges[feature], dense[:, feature], side="right"), minlength=8)
        assert counts.min() >= 499


def test_bad_sizes_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        HammockConfig(table_rows=(3, 0), buckets=1, hidden=0)
    assert [problem.partition("=")[0] for problem in caught.value.problems] == ["buckets", "hidden", "table_rows"]


@given(samples)
def test_in_torch_it_is_the_product_with_the_one_hot_vector(rows: list[tuple[float, ...]]) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.hammock_torch import Hammock

    model = Hammock(SIZES, EDGES, torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.bias.normal_()
    dense, categories = arrays(rows)
    got = model(torch.from_numpy(dense), torch.from_numpy(categories)).detach().numpy()
    weights = [w.detach().numpy() for w in (model.embeddings.weight, model.bias, model.out.weight)]
    np.testing.assert_allclose(got, by_hand(one_hot(dense, categories), *weights, model.out.bias.item()), atol=1e-6)


def test_in_torch_the_edges_are_saved_with_the_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.hammock_torch import Hammock

    model, other = Hammock(SIZES, EDGES), Hammock(SIZES, np.zeros_like(EDGES))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    dense, categories = torch.tensor([[0.5, -9.0], [2.0, 1.0]]), torch.tensor([[4, 0, 8], [0, 0, 1]])
    assert torch.equal(model(dense, categories), other(dense, categories))
    model(dense, categories).sum().backward()
    assert model.embeddings.weight.grad.is_sparse


def test_in_keras_it_is_the_product_with_the_one_hot_vector() -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip(keras.backend.backend())
    from dlrm_examples.models.hammock_keras import Hammock

    model = Hammock(SIZES, EDGES, seed=3)
    model.bias.assign(np.random.default_rng(0).standard_normal(6))
    values = (EDGES[0], EDGES[1], range(5), (0,), range(9))
    dense, categories = arrays(list(itertools.product(*values)))
    got = keras.ops.convert_to_numpy(model({"dense": dense, "categories": categories}))
    second, last = model.out.get_weights()
    weights = [keras.ops.convert_to_numpy(w) for w in (model.tables, model.bias)]
    inputs = one_hot(dense, categories)
    np.testing.assert_allclose(got[:, 0], by_hand(inputs, *weights, second, last[0]), atol=1e-6)


def test_in_keras_it_is_saved_whole(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip(keras.backend.backend())
    from dlrm_examples.models.hammock_keras import Hammock

    model = Hammock(SIZES, EDGES, seed=3)
    batch = {"dense": np.array([[0.5, -9.0]], np.float32), "categories": np.array([[4, 0, 8]], np.int32)}
    before = keras.ops.convert_to_numpy(model(batch))
    model.save(tmp_path / "model.keras")
    after = keras.models.load_model(tmp_path / "model.keras")(batch)
    assert np.array_equal(before, keras.ops.convert_to_numpy(after))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_sample_has_rows_of_the_split_only(tmp_path: Path, split: str) -> None:
    files = generate(tmp_path, rows=3_000, shards=3, seed=1)
    reading = Reading(files, 32, split=split, test_fraction=0.3, seed=5, block_bytes=20_000)
    whole = reading.sample(10**9)
    assert abs(len(whole) - (900 if split == "test" else 2_100)) < 120
    some = reading.sample(200)
    assert 200 <= len(some) < 400
    rows = {row.tobytes() for row in whole.categories}
    assert {row.tobytes() for row in some.categories} <= rows
    other = Reading(files, 32, split="test" if split == "train" else "train", test_fraction=0.3, seed=5)
    assert not rows & {row.tobytes() for row in other.sample(10**9).categories}
