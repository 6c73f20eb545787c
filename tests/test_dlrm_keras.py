"""The Keras model: equal to Meta's on every backend, its first weights, its gradients, its state."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from dlrm_examples import check_oracle  # noqa: E402
from dlrm_examples.models.dlrm_keras import DLRM  # noqa: E402
from dlrm_examples.models.sizes import DLRMConfig  # noqa: E402
from tests.dlrm_rows import ROOT  # noqa: E402

SMALL = {"table_rows": (50, 3, 700), "embedding_dim": 4, "dense_features": 5, "bottom": (8, 4), "top": (6, 1)}


def small(seed: int = 1) -> DLRM:
    return DLRM(DLRMConfig(**SMALL), seed=seed)


def batch(rows: int = 40) -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    ids = [random.integers(0, n, rows) for n in SMALL["table_rows"]]
    return {"dense": random.random((rows, 5), np.float32), "categories": np.stack(ids, axis=1).astype(np.int32)}


def logits(model: DLRM, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(model(inputs)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_metas_own_numbers(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    folder = Path(os.environ.get("INTUNE_ORACLE_DIR", ROOT.parent / "shared" / "oracle"))
    files = [folder / name for name in ("dlrm_meta_tiny.npz", "dlrm_meta_bags.npz")]
    if not all(file.is_file() for file in files):
        pytest.skip("no dlrm_meta_*.npz: set INTUNE_ORACLE_DIR to the folder that holds them")
    # Keras takes its backend once in a process.
    code = "import sys; from dlrm_examples import check_oracle as c; "
    code += "sys.exit(max(c.main([file, '--model', 'keras']) for file in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("within 1e-05") == 2


@pytest.mark.parametrize("mistake", ["columns first", "no relu", "tables swapped", "sigmoid left out of the loss"])
def test_a_wrong_model_fails(tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("torch")
    from tests.dlrm_oracle import make_oracle

    init = DLRM.__init__

    def wrong(self, config, **options):
        init(self, config, **options)
        if mistake == "columns first":
            features = 1 + len(config.table_rows)
            self._pairs = self._pairs[np.argsort(self._pairs % features, kind="stable")]
        elif mistake == "no relu":
            self.bottom[-1].activation = keras.activations.linear
        elif mistake == "tables swapped":
            self.embed = lambda *lookup: keras.ops.flip(DLRM.embed(self, *lookup), axis=1)

    monkeypatch.setattr(DLRM, "__init__", wrong)
    if mistake == "sigmoid left out of the loss":
        monkeypatch.setattr(keras.losses, "BinaryCrossentropy", lambda **_: keras.losses.MeanSquaredError())
    assert check_oracle.main([str(make_oracle(tmp_path / "o.npz", tables=(5, 5, 5))), "--model", "keras"]) == 1
    failed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "above" in line]
    # The loss that training uses is seen in the weights after the step only.
    assert failed and all(name.startswith("sgd.") for name in failed) == mistake.startswith("sigmoid")


def test_one_id_per_table_is_a_bag_of_one() -> None:
    model, inputs = small(), batch()
    starts = np.tile(np.arange(40, dtype=np.int32), (3, 1))
    bags = {"dense": inputs["dense"], "categories": inputs["categories"].T.copy(), "bag_starts": starts}
    assert logits(model, inputs).shape == (40, 1)
    assert np.array_equal(logits(model, inputs), logits(model, bags))


def test_tables_do_not_overlap() -> None:
    model = small()
    weights = np.concatenate([np.full((rows, 4), table + 1.0) for table, rows in enumerate(SMALL["table_rows"])])
    model.tables.assign(weights)
    assert [float(model.table(t).mean()) for t in range(3)] == [1.0, 2.0, 3.0]
    embedded = np.array(keras.ops.convert_to_numpy(model.embed(batch()["categories"])))
    assert np.array_equal(embedded, np.broadcast_to(np.array([1.0, 2.0, 3.0])[None, :, None], (40, 3, 4)))


def test_initial_weights() -> None:
    model = DLRM(DLRMConfig(table_rows=(10_000, 100)))
    for table, rows in enumerate((10_000, 100)):
        weights, bound = model.table(table), rows**-0.5
        assert np.abs(weights).max() <= bound
        assert weights.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    kernel, bias = model.bottom[1].get_weights()  # 512 -> 256
    assert kernel.std() == pytest.approx((2 / 768) ** 0.5, rel=0.02)
    assert bias.std() == pytest.approx((1 / 256) ** 0.5, rel=0.2)


def test_the_seed_decides_the_weights() -> None:
    one, again, other = (small(seed).get_weights() for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="dense elsewhere, or on request only")
def test_the_tables_gradient_is_sparse() -> None:
    import tensorflow as tf

    model = small()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(batch()))
    gradient = tape.gradient(loss, model.tables.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.values.shape == (40 * 3, 4)


def test_only_rows_that_were_looked_up_are_trained() -> None:
    keras.utils.set_random_seed(3)  # of the order of the samples
    model, inputs = small(), batch()
    before = [model.table(t) for t in range(3)]
    model.compile(keras.optimizers.SGD(0.5), keras.losses.BinaryCrossentropy(from_logits=True))
    labels = (inputs["dense"][:, 0] > 0.5).astype(np.float32)
    losses = model.fit(inputs, labels, batch_size=8, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    for table, old in enumerate(before):
        changed = np.flatnonzero((model.table(table) != old).any(axis=1))
        assert set(changed) == set(inputs["categories"][:, table])


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert isinstance(again, DLRM) and again.config == model.config
    assert np.array_equal(logits(again, batch()), logits(model, batch()))
