"""The Q network in numpy: three layers, one set of weights for any number of slots; and those that are shipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT
from intune_callbacks.decide.view import Bools
from intune_callbacks.errors import InTuneError

__all__ = ["PARAMETERS", "Network", "Values", "Weights", "shipped"]

PARAMETERS = ("w1", "b1", "w2", "b2", "w3", "b3")
Weights = NDArray[np.float32]
Values = Callable[[NDArray[Any], NDArray[Any], Bools], NDArray[Any]]
"""Slot states [N, S, F], pipeline states [N, G], slots that exist [N, S] -> value of every move [N, S, 5]."""
WEIGHTS = "dqn.npz"
_NOTHING = np.zeros((), np.float32)


@dataclass(frozen=True, slots=True)
class Network:
    """``Q_i = W3 relu(W2 [h_i, mean h, max h])`` with ``h_i = relu(W1 [slot_i, pipeline])``; float32.

    Mean and max run over the slots that exist, so one set of weights serves pipelines of any length.

    Args:
        w1: [len(OF_SLOT) + len(OF_PIPELINE), H].
        b1: [H].
        w2: [3 H, H].
        b2: [H].
        w3: [H, 5].
        b3: [5].

    Raises:
        ValueError: the shapes are not these.
    """

    w1: Weights
    b1: Weights
    w2: Weights
    b2: Weights
    w3: Weights
    b3: Weights

    def __post_init__(self) -> None:
        h = self.w1.shape[1]
        wanted = {
            "w1": (len(OF_SLOT) + len(OF_PIPELINE), h),
            "b1": (h,),
            "w2": (3 * h, h),
            "b2": (h,),
            "w3": (h, 5),
            "b3": (5,),
        }
        wrong = [
            f"{k} is {getattr(self, k).shape}, expected {v}" for k, v in wanted.items() if getattr(self, k).shape != v
        ]
        if wrong:
            raise ValueError(f"these weights do not fit this version of the agent: {'; '.join(wrong)}")

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Network:
        """Return the network with these weights, each an array of the shape above."""
        return cls(**{name: np.ascontiguousarray(arrays[name], np.float32) for name in PARAMETERS})

    @classmethod
    def load(cls, path: Path | str) -> Network:
        """Return the network saved in an ``.npz`` file."""
        with np.load(path) as arrays:
            return cls.of(arrays)

    def save(self, path: Path | str) -> None:
        """Write an ``.npz`` file."""
        np.savez(path, **{name: getattr(self, name) for name in PARAMETERS})

    def __call__(self, slots: Weights, pipeline: Weights, mask: Bools) -> Weights:
        """Return the value of every move of every slot, [..., S, 5].

        Args:
            slots: [..., S, len(OF_SLOT)].
            pipeline: [..., len(OF_PIPELINE)].
            mask: slots that exist, [..., S].
        """
        f, here = slots.shape[-1], mask[..., None]
        h = slots @ self.w1[:f] + (pipeline @ self.w1[f:] + self.b1)[..., None, :]
        h = np.maximum(h, _NOTHING) * here
        mean = h.sum(-2) / np.maximum(mask.sum(-1, dtype=np.float32), 1.0)[..., None]
        size = h.shape[-1]
        context = mean @ self.w2[size : 2 * size] + h.max(-2, initial=0.0) @ self.w2[2 * size :] + self.b2
        h = np.maximum(h @ self.w2[:size] + context[..., None, :], _NOTHING)
        return np.asarray(h @ self.w3 + self.b3)


@lru_cache(maxsize=1)
def shipped() -> Network:
    """Return the network that comes with the package; it is read once.

    Raises:
        InTuneError: the file is missing.
    """
    found = files("intune_callbacks.decide") / "weights" / WEIGHTS
    if not found.is_file():
        raise InTuneError(
            f"{found} is missing from this installation; install the package again, "
            "or make weights and card with: intune pretrain --out DIR"
        )
    with as_file(found) as path:
        return Network.load(path)
