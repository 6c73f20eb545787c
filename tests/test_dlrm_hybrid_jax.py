"""On two JAX devices the tables are cut by rows, and the model learns what it learns on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("keras")
pytest.importorskip("jax")

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys

import jax
import keras
import numpy as np
from dlrm_examples.hybrid.jax import distribute
from dlrm_examples.models.dlrm_keras import DLRM
from dlrm_examples.models.sizes import DLRMConfig
from intune_callbacks.errors import ConfigError

config = DLRMConfig(table_rows=(100, 51, 401, 8), embedding_dim=8, bottom=(16, 8), top=(16, 1))
if sys.argv[1] == "2":
    try:
        distribute(DLRMConfig(table_rows=(3, 4), embedding_dim=8, bottom=(8,), top=(1,)))
    except ConfigError as error:
        assert "7 in all, expected a multiple of 2 devices; add 1 to one of them" in str(error)
    else:
        raise AssertionError("7 rows on 2 devices")
    distribute(config)
random = np.random.default_rng(0)
ids = np.stack([random.integers(0, rows, 640) for rows in config.table_rows], 1).astype(np.int32)
inputs = {"dense": random.random((640, 13), np.float32), "categories": ids}
labels = random.integers(0, 2, 640).astype(np.float32)
model = DLRM(config, seed=1)
model.compile(keras.optimizers.Adagrad(0.05, epsilon=1e-8), keras.losses.BinaryCrossentropy(from_logits=True))
model.fit(inputs, labels, batch_size=64, epochs=2, shuffle=False, verbose=0)
state = [variable.value for variable in model.optimizer.variables if variable.shape == model.tables.shape]
for value in (model.tables.value, *state):
    shapes = [shard.data.shape for shard in value.addressable_shards]
    assert shapes == [(560 // len(jax.devices()), 8)] * len(jax.devices()), shapes
assert len(state) == 1
kernel = model.top[0].kernel.value
assert {shard.data.shape for shard in kernel.addressable_shards} == {kernel.shape}
np.savez(sys.argv[2], *[np.asarray(variable.value) for variable in model.trainable_variables])
"""


def test_two_devices_equal_one(tmp_path: Path) -> None:
    for devices in ("1", "2"):
        given = {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", SCRIPT, devices, str(tmp_path / f"{devices}.npz")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **given})
        assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "1.npz") as one, np.load(tmp_path / "2.npz") as two:
        assert len(one.files) == 9
        for name in one.files:
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5)
