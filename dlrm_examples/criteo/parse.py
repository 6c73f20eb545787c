"""Criteo TSV parsed a block at a time: by numba where it is installed, else by numpy, with the same result."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

from dlrm_examples.criteo import swar
from dlrm_examples.criteo.tsv import Block, Rows, Select

__all__ = ["KERNELS", "chosen_kernel", "parse_block", "warm_up"]

KERNELS = ("numba", "numpy")


def parse_block(
    block: Block,
    table_rows: Sequence[int],
    *,
    on_bad_row: str = "error",
    select: Select | None = None,
    kernel: str | None = None,
) -> Rows:
    """Parse whole lines; `tsv.parse_block_slowly` says what the result must be.

    Args:
        block: the lines.
        table_rows: 26 embedding table sizes, the moduli of the categories.
        on_bad_row: ``error`` raises on the first malformed line, ``skip`` leaves malformed lines out and counts them.
        select: byte offsets of lines in the file [n] int64 -> which of them to parse [n] bool; all by default.
        kernel: ``numba`` or ``numpy``; by default numba where it is installed. The result is the same to the last bit.

    Raises:
        BadRow: names file, byte offset and column of the first malformed line.
        MissingPackage: numba is asked for and not installed.
    """
    rows: Rows = _module(kernel).parse(block, table_rows, on_bad_row, select)
    return rows


def chosen_kernel(kernel: str | None = None) -> str:
    """Return the name of the kernel that `parse_block` uses when given `kernel`."""
    return "numpy" if _module(kernel) is swar else "numba"


def warm_up(kernel: str | None = None) -> None:
    """Compile the kernel now, so that not every thread waits for it at its first block."""
    module = _module(kernel)
    if module is not swar:
        module.warm_up()


@functools.cache
def _module(kernel: str | None) -> ModuleType:
    if kernel == "numpy":
        return swar
    try:
        from dlrm_examples.criteo import kernel as compiled
    except ImportError:
        # Also a numba that does not work with this numpy.
        if kernel == "numba":
            raise
        return swar
    return compiled
