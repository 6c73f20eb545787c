"""The policies `benchmarks.agent` compares, by the name of their row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.policies.hill_climb import HillClimb
from benchmarks.policies.observe import Scalar
from benchmarks.policies.others import Autotune, PlumberLP, Unoptimized, WaterFilling
from intune_callbacks.decide.dqn import ModelJump
from intune_callbacks.decide.network import Network
from intune_callbacks.decide.policies import EvenSplit
from intune_callbacks.decide.shell import Shell
from intune_callbacks.decide.view import Bools, Floats
from intune_callbacks.errors import InTuneError
from intune_callbacks.pretrain.scenarios import Controller

__all__ = ["BASE", "DQN", "METHODS", "OPTIONAL", "Missing", "build", "named"]

BASE, DQN = "jump + hold", "DQN"
LITERAL_WEIGHTS = Path(__file__).parent / "data" / "literal_dqn.npz"


class Missing(Exception):
    """A method that cannot be compared here; says why."""


def _random_moves() -> Controller:
    rng = np.random.default_rng(0)

    def values(slots: Floats, pipeline: Floats, mask: Bools) -> Floats:
        return rng.normal(size=(*mask.shape, 5))

    return Shell(values)


def _literal() -> Controller:
    try:
        from benchmarks.policies.literal import LiteralDQN
    except ImportError as error:
        raise Missing(str(error)) from error
    if not LITERAL_WEIGHTS.is_file():
        raise Missing(
            f"no weights in {LITERAL_WEIGHTS.name}: make them with python -m benchmarks.literal --out {LITERAL_WEIGHTS}"
        )
    return LiteralDQN.load(LITERAL_WEIGHTS)


def _shipped() -> Controller:
    try:
        from intune_callbacks.decide.network import shipped

        return Shell(shipped())
    except (ImportError, InTuneError) as error:
        raise Missing(f"{error}; or give --weights FILE") from error


def _fine_tuned() -> Controller:
    try:
        from benchmarks.policies.fine_tuned import FineTuned
        from intune_callbacks.decide.network import shipped

        return FineTuned(shipped())
    except (ImportError, InTuneError) as error:
        raise Missing(str(error)) from error


METHODS: dict[str, Callable[[], Controller]] = {
    "unoptimized": Unoptimized,
    "even split": lambda: Scalar(EvenSplit),
    "hill climb": lambda: Scalar(HillClimb),
    "water-filling": WaterFilling,
    "Plumber LP": PlumberLP,
    "HILL_CLIMB of TF 2.11": Autotune,
    "model-jump": lambda: Scalar(ModelJump),
    BASE: lambda: Shell(None),
    "random moves": _random_moves,
}
OPTIONAL: dict[str, Callable[[], Controller]] = {
    "literal DQN": _literal,
    DQN: _shipped,
    "DQN fine-tuned": _fine_tuned,
}
"""Need something that may not be there: weights, torch."""


def named(weights: Sequence[Path]) -> dict[str, Path]:
    """Return row name -> file: ``DQN`` for a single file, ``DQN seed 1``.. for several.

    Args:
        weights: files of `Network.save`.
    """
    if len(weights) == 1:
        return {DQN: weights[0]}
    return {f"{DQN} seed {number}": file for number, file in enumerate(weights, 1)}


def build(name: str, files: Mapping[str, Path]) -> Controller:
    """Return a new controller.

    Args:
        name: of `METHODS`, `OPTIONAL` or `files`.
        files: row name -> weights.

    Raises:
        Missing: it needs something that is not there.
    """
    if name in files:
        return Shell(Network.load(files[name]))
    return {**METHODS, **OPTIONAL}[name]()
