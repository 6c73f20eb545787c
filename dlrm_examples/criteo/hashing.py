"""Whole arrays: a 64-bit hash, and remainders."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALL_BITS", "mix64", "remainders"]

ALL_BITS = 1 << 32
"""As a table's rows: what leaves a category the 32-bit number it is, in an int32 by its bits."""

AT_ONCE = 2048  # rows of 26 stay in the processor's cache


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


def remainders(numbers: npt.NDArray[Any], modulus: int) -> npt.NDArray[Any]:
    """Return 32-bit numbers modulo one number, from 0 also where they are negative; `ALL_BITS` leaves them as they are.

    numpy divides by one number four times as fast as it takes remainders.

    Args:
        numbers: int32 or uint32, any shape.
        modulus: 1 .. 2^31 - 1, or `ALL_BITS`.
    """
    if modulus == ALL_BITS:
        return numbers
    divisor, left = numbers.dtype.type(modulus), np.empty(numbers.shape, numbers.dtype)
    for begin in range(0, len(numbers), AT_ONCE):
        part, out = numbers[begin : begin + AT_ONCE], left[begin : begin + AT_ONCE]
        np.floor_divide(part, divisor, out=out)
        np.multiply(out, divisor, out=out)
        np.subtract(part, out, out=out)
    return left
