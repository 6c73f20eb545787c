"""Whether a model fits in this machine's memory: said before it is made, for the kernel says nothing when it kills."""

from __future__ import annotations

from dataclasses import replace

from intune_callbacks.errors import ConfigError
from intune_callbacks.measure.resources import MachineProbe

from .schema import Config

__all__ = ["check_memory", "tables_bytes"]

FLOAT_BYTES, GIB = 4, 1 << 30
# The rest is for the framework, the batches and the pipeline.
LARGEST_SHARE = 0.8


def tables_bytes(config: Config) -> int:
    """Return the bytes of all tables and of their optimiser's state."""
    dim = config.model.weights_per_row
    state = {"sgd": 0, "adagrad": dim, "rowwise-adagrad": 1}[config.trainer.optimizer]
    return FLOAT_BYTES * (dim + state) * sum(config.model.table_rows)


def check_memory(config: Config, memory_bytes: int | None = None) -> None:
    """Raise an error if the tables do not fit in memory; tables that are divided among ranks are not looked at.

    Args:
        config: what is to be trained.
        memory_bytes: the memory there is; by default the limit of the container or machine.

    Raises:
        ConfigError: says what is needed, what there is, and which `model.max_table_rows` would fit.
    """
    if config.trainer.strategy == "hybrid":
        return
    limit = MachineProbe().read().memory_limit_bytes if memory_bytes is None else memory_bytes
    needed, usable = tables_bytes(config), LARGEST_SHARE * limit
    if needed <= usable:
        return
    cap = config.model.max_table_rows
    while cap > 2 and _capped_bytes(config, cap) > usable:
        cap //= 2
    fits = f"model.max_table_rows={cap} ({_capped_bytes(config, cap) / GIB:.1f} GiB)"
    raise ConfigError(
        [
            f"model: tables and their state take {needed / GIB:.1f} GiB, and this machine has {limit / GIB:.1f} GiB; "
            f"give {fits}, or divide them with trainer.strategy=hybrid; `intune plan` says how"
        ]
    )


def _capped_bytes(config: Config, rows: int) -> int:
    return tables_bytes(replace(config, model=replace(config.model, max_table_rows=rows)))
