"""A 64-bit hash of whole arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["mix64"]


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a well mixed 64-bit number for each value.

    The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014, fig. 14).

    Args:
        values: uint64, any shape.
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
