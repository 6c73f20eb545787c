"""Several ids per table made of one: the bags of MLPerf's DLRM-DCNv2, for data that has one id per table.

MLPerf draws, once and with a fixed seed, a row of uniform ids for each id of a table, and keeps the id itself as the
first (facebookresearch/dlrm, torchrec_dlrm/multi_hot.py). Those tables of ids would take 160 GB for the list of 40
million rows; here the further ids are a fixed hash of the first, which is as uniform and needs no memory:

    id k of a bag = spread((id * multiplier_k + addend_k) mod 2^32) mod rows

with one odd multiplier and one addend for each place in the bags. Nothing else goes in: no seed, rank or framework.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.hashing import mix64

__all__ = ["MASK", "Bags", "bags_of", "spread"]

MASK = (1 << 32) - 1


def spread(values: Any, shift: Callable[[Any, Any], Any] = operator.rshift, number: Callable[[int], Any] = int) -> Any:
    """Return well mixed 32-bit numbers.

    The hash ``lowbias32`` of https://github.com/skeeto/hash-prospector.

    Args:
        values: integers of 0..2^32 - 1 in 64 bits signed, or in 32 bits unsigned; any shape, any framework.
        shift: right shift of such an array.
        number: makes a constant that such an array can be multiplied by.
    """
    for bits, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        # A product that overflows is right in its lower 32 bits.
        values = ((values ^ shift(values, number(bits))) * number(factor)) & number(MASK)
    return values ^ shift(values, number(16))


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """How ids become bags; S is the sum of the bag sizes, and the ids of all bags of a sample lie side by side.

    Args:
        starts: where each table's bag begins within a sample's ids, [T + 1] int64; the last is S.
        columns: the table of each id, [S] int64.
        first: whether an id is the given one, [S] bool.
        multipliers: [S] int64, below 2^32.
        addends: [S] int64, below 2^32.
        rows: rows of each id's table, [S] int64.
    """

    starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    first: npt.NDArray[np.bool_]
    multipliers: npt.NDArray[np.int64]
    addends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def expand(self, categories: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the ids of all bags, [B, S]: the definition the models are tested against.

        Args:
            categories: one id per sample and table, [B, T].
        """
        ids = categories.astype(np.int64)[:, self.columns]
        return np.where(self.first, ids, spread((ids * self.multipliers + self.addends) & MASK) % self.rows)


def bags_of(bag_sizes: Sequence[int], table_rows: Sequence[int]) -> Bags:
    """Return how ids become bags.

    Args:
        bag_sizes: ids per table, from 1.
        table_rows: rows of each table.
    """
    sizes = np.array(bag_sizes, np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    columns = np.repeat(np.arange(len(sizes)), sizes)
    mixed = mix64(np.arange(2 * len(columns), dtype=np.uint64)).reshape(2, -1) >> np.uint64(32)
    multipliers, addends = (mixed[0] | np.uint64(1)).astype(np.int64), mixed[1].astype(np.int64)
    first = np.isin(np.arange(len(columns)), starts)
    return Bags(starts, columns, first, multipliers, addends, np.array(table_rows, np.int64)[columns])
