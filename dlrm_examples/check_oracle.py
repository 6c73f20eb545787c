"""A DLRM against numbers written by Meta's own: outputs, loss, gradients, and the weights after one SGD step.

    python -m dlrm_examples.check_oracle FILE.npz [--model torch|keras|hybrid] [--ranks N]

The file holds one batch, the weights and everything expected (its `cfg` names the sizes). The relative error of a
quantity is max|ours - expected| / max(max|expected|, 1e-8): scaled by the largest entry, because entries that cancel
to nearly nothing carry no correct digits in float32. Exit status: 0 if all errors are at most 1e-5, 1 if not
(a NaN is not), 2 if the comparison could not be made.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from intune_callbacks.errors import ConfigError

__all__ = ["MODELS", "TOLERANCE", "Oracle", "compare", "load", "main", "run"]

MODELS = ("hybrid", "keras", "torch")
TOLERANCE = 1e-5
SMALLEST_SCALE = 1e-8
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


def run(oracle: Oracle, model: str, ranks: int = 2) -> dict[str, Array]:
    """Push the batch through one of our models; return everything named by `Oracle.expected`.

    Args:
        oracle: the batch and the weights.
        model: one of `MODELS`; ``keras`` runs on the backend ``KERAS_BACKEND`` names.
        ranks: over which ``hybrid`` divides its tables.

    Raises:
        ImportError: the model's framework is not installed.
    """
    # Imported here: whoever checks one model need not have the frameworks of the others.
    if model == "hybrid":
        from dlrm_examples import oracle_hybrid

        return oracle_hybrid.run(oracle, ranks)
    if model == "keras":
        from dlrm_examples import oracle_keras

        return oracle_keras.run(oracle)
    from dlrm_examples import oracle_torch

    return oracle_torch.run(oracle)


def compare(oracle: Oracle, got: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest relative error of each quantity; infinite for one that is missing or of another shape."""
    errors = {}
    for name, shape in oracle.expected().items():
        expected = oracle.arrays[name].astype(np.float64)
        if name not in got or got[name].shape != shape:
            errors[name] = float("inf")
            continue
        scale = max(float(np.abs(expected).max(initial=0.0)), SMALLEST_SCALE)
        errors[name] = float(np.abs(got[name] - expected).max(initial=0.0)) / scale
    return errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m dlrm_examples.check_oracle", description=description)
    parser.add_argument("file", metavar="FILE.npz")
    parser.add_argument("--model", choices=MODELS, default="torch")
    parser.add_argument("--ranks", metavar="N", type=int, default=2, help="of the hybrid model (default 2)")
    given = parser.parse_args(arguments)
    try:
        oracle = load(given.file)
        errors = compare(oracle, run(oracle, given.model, given.ranks))
    except (ConfigError, ImportError) as error:
        print(f"check_oracle: {error}", file=sys.stderr)
        return 2
    width = max(map(len, errors))
    print(f"{'quantity':<{width}}  largest relative error")
    for name, value in errors.items():
        print(f"{name:<{width}}  {value:.2e}{'' if value <= TOLERANCE else f'  above {TOLERANCE:.0e}'}")
    passed = all(value <= TOLERANCE for value in errors.values())
    print(f"{given.model}: largest {max(errors.values()):.2e}, {'within' if passed else 'NOT within'} {TOLERANCE:.0e}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
