"""A DLRM against numbers written by Meta's own: outputs, loss, gradients, and the weights after one SGD step.

    python -m dlrm_examples.check_oracle FILE.npz [--model torch|keras|hybrid] [--ranks N]

The file holds one batch, the weights and everything expected; `oracle.file` reads it. The relative error of a quantity
is max|ours - expected| / max(max|expected|, 1e-8): scaled by the largest entry, because entries that cancel to nearly
nothing carry no correct digits in float32. Exit status: 0 if all errors are at most 1e-5, 1 if not (a NaN is not),
2 if the comparison could not be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from dlrm_examples.oracle.file import Array, Oracle, load
from intune_callbacks.errors import ConfigError

__all__ = ["MODELS", "TOLERANCE", "compare", "main", "run"]

MODELS = ("hybrid", "keras", "torch")
TOLERANCE = 1e-5
SMALLEST_SCALE = 1e-8


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
        from dlrm_examples.oracle import hybrid

        return hybrid.run(oracle, ranks)
    if model == "keras":
        from dlrm_examples.oracle import keras

        return keras.run(oracle)
    from dlrm_examples.oracle import torch

    return torch.run(oracle)


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
    description = (__doc__ or "").partition("\n")[0]
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
