"""Hybrid parallelism under Keras 3 on its JAX backend, without TorchRec: one process, several devices.

    distribute(config, devices)       # before the model is made
    model = dlrm_keras.DLRM(config)

The tables are cut by rows over the same devices that share the batch, the MLPs are on all of them; XLA puts in the
collectives (keras.io/guides/distribution, ModelParallel). Gradients and optimiser state of the tables are cut likewise,
but dense: every step touches all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from dlrm_examples.models.sizes import DLRMConfig
from intune_callbacks.errors import ConfigError

__all__ = ["distribute"]

AXIS = "batch"
TABLES = ".*tables"


def distribute(config: DLRMConfig, devices: Sequence[str] | None = None) -> Any:
    """Divide the tables and the batches of all models made from now on; return the distribution.

    Args:
        config: the sizes of the model.
        devices: as `keras.distribution.list_devices` names them; all by default.

    Raises:
        ConfigError: Keras runs on another backend than JAX, or the rows cannot be divided equally.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise ConfigError([f"KERAS_BACKEND={backend}: expected jax; on torch, hybrid.keras divides the tables"])
    names = list(keras.distribution.list_devices() if devices is None else devices)
    rows = sum(config.table_rows)
    if rows % len(names):
        longer = -rows % len(names)
        raise ConfigError(
            [f"table_rows: {rows} in all, expected a multiple of {len(names)} devices; add {longer} to one of them"]
        )
    mesh = keras.distribution.DeviceMesh((len(names),), [AXIS], names)
    layout = keras.distribution.LayoutMap(mesh)
    layout[TABLES] = (AXIS, None)
    divided = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name=AXIS)
    keras.distribution.set_distribution(divided)
    return divided
