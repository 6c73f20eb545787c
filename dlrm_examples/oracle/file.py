"""A file of numbers written by Meta's own DLRM: one batch, the weights, and everything expected."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.models.sizes import DLRMConfig
from intune_callbacks.errors import ConfigError

__all__ = ["Array", "Oracle", "load"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Oracle:
    """One file, checked: everything is there and has the shape `cfg` says.

    Args:
        table_rows, embedding_dim, bottom, top, interact_itself: as in `DLRMConfig`.
        dense_features: width of the dense input.
        learning_rate: of the one SGD step.
        arrays: the file's arrays by name.
    """

    table_rows: tuple[int, ...]
    embedding_dim: int
    dense_features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interact_itself: bool
    learning_rate: float
    arrays: Mapping[str, Array]

    @property
    def sizes(self) -> DLRMConfig:
        """The sizes of the model."""
        return DLRMConfig(
            table_rows=self.table_rows,
            embedding_dim=self.embedding_dim,
            dense_features=self.dense_features,
            bottom=self.bottom,
            top=self.top,
            interact_itself=self.interact_itself,
        )

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the names of all weights and their shapes."""
        dim = self.embedding_dim
        shapes: dict[str, tuple[int, ...]] = {f"emb.{t}": (rows, dim) for t, rows in enumerate(self.table_rows)}
        features = 1 + len(self.table_rows)
        pairs = features * (features - 1) // 2 + (features if self.interact_itself else 0)
        for part, inputs, widths in (
            ("bot", self.dense_features, self.bottom),
            ("top", dim + pairs, self.top),
        ):
            for layer, (before, after) in enumerate(zip((inputs, *widths), widths, strict=False)):
                shapes |= {f"{part}.{layer}.w": (after, before), f"{part}.{layer}.b": (after,)}
        return shapes

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Return the names of all quantities to compare and their shapes."""
        batch, tables = len(self.arrays["dense"]), len(self.table_rows)
        weights = self.weights()
        return {
            "out.bot": (batch, self.embedding_dim),
            "out.emb": (tables, batch, self.embedding_dim),
            "out.interact": (batch, weights["top.0.w"][1]),
            "out.prob": (batch, 1),
            "out.loss": (),
            **{f"grad.{name}": shape for name, shape in weights.items()},
            **{f"sgd.{name}": shape for name, shape in weights.items()},
        }


def load(path: str) -> Oracle:
    """Read and check a file.

    Raises:
        ConfigError: all that is wrong with it at once.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("no such file" if not Path(path).exists() else "not a zip archive")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError([f"{path}: not a readable .npz file ({error})"]) from error
    oracle = _configured(path, arrays)
    problems = [f"{path}: {problem}" for problem in _problems(oracle)]
    if problems:
        raise ConfigError(problems)
    return oracle


def _configured(path: str, arrays: Mapping[str, Array]) -> Oracle:
    try:
        cfg = json.loads(str(arrays["cfg"][()])) if "cfg" in arrays else {}
        absent = [name for name in ("d", "tables", "bot", "top", "lr") if name not in cfg]
        if absent:
            raise ConfigError([f"{path}: cfg lacks {', '.join(absent)}; expected a JSON object that names the sizes"])
        return Oracle(
            table_rows=tuple(int(rows) for rows in cfg["tables"]),
            embedding_dim=int(cfg["d"]),
            dense_features=int(cfg["bot"][0]),
            bottom=tuple(int(width) for width in cfg["bot"][1:]),
            top=tuple(int(width) for width in cfg["top"]),
            interact_itself=bool(cfg.get("itself", False)),
            learning_rate=float(cfg["lr"]),
            arrays=arrays,
        )
    except (ValueError, TypeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"{path}: cfg {arrays['cfg']!s} cannot be read: {error}"]) from error


def _problems(oracle: Oracle) -> Iterable[str]:
    arrays = oracle.arrays
    missing = [name for name in ("dense", "idx", "off", "labels") if name not in arrays]
    missing += [name for name in oracle.weights() if name not in arrays]
    counted = "dense" not in missing and arrays["dense"].ndim == 2
    if counted:
        missing += [name for name in oracle.expected() if name not in arrays]
    if missing:
        yield f"missing {', '.join(missing)}"
    if not counted:
        if "dense" in arrays:
            yield f"dense has shape {list(arrays['dense'].shape)}, expected [batch, {oracle.dense_features}]"
        return
    batch, tables = len(arrays["dense"]), len(oracle.table_rows)
    shapes: dict[str, tuple[int, ...]] = {
        "dense": (batch, oracle.dense_features),
        "labels": (batch, 1),
        "off": (tables, batch),
        **oracle.weights(),
        **oracle.expected(),
    }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            yield f"{name} has shape {list(arrays[name].shape)}, expected {list(shape)}"
    if "idx" in arrays and "off" in arrays:
        yield from _bag_problems(arrays["idx"], arrays["off"], oracle.table_rows)


def _bag_problems(ids: Array, starts: Array, table_rows: Sequence[int]) -> Iterable[str]:
    if ids.ndim != 2 or len(ids) != len(table_rows) or ids.dtype.kind not in "iu":
        yield f"idx is {ids.dtype} {list(ids.shape)}, expected whole numbers [{len(table_rows)}, ids]"
        return
    for table, rows in enumerate(table_rows):
        if ids.shape[1] and not 0 <= ids[table].min() <= ids[table].max() < rows:
            yield f"idx[{table}] runs from {ids[table].min()} to {ids[table].max()}, expected 0 to {rows - 1}"
    if starts.ndim == 2 and (
        (starts[:, :1] != 0).any() or (np.diff(starts) < 0).any() or (starts > ids.shape[1]).any()
    ):
        yield f"off: expected each row to begin with 0 and to grow up to {ids.shape[1]}"
