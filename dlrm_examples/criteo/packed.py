"""The packed format: parsed rows in blocks, each with a checksum, to be mapped into memory.

    header   64 bytes: magic, version, bytes of a dense value (4 or 2), rows of a block, rows of the file
    block    XXH3 of what follows, seeded with the block's number; categories [n, 26] uint32; labels [n] float32;
             dense [n, 13] float32 or float16, log(x + 1); zeros up to a multiple of 8 bytes

All numbers are little-endian. Every block has as many rows as the header says, but the last. Of the categories no
modulus is taken: one file serves tables of any sizes.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.blocks import ArraysRef
from dlrm_examples.criteo.tsv import CATEGORIES, DENSE, Rows
from intune_callbacks.errors import BadData, ConfigError, MissingPackage

try:
    import xxhash
except ModuleNotFoundError:
    raise MissingPackage("xxhash", "criteo") from None

__all__ = ["BLOCK_ROWS", "SUFFIX", "PackedFile", "write_packed"]

SUFFIX = ".packed"
BLOCK_ROWS = 8_192
"""1.3 MB: few calls of Python for a row, and what is made of a block fits the processor's cache."""

MAGIC, VERSION = b"criteo\x00\x01", 1
HEADER, HEADER_BYTES = struct.Struct("<8sIIIIQ"), 64
CHECKSUM_BYTES = 8


class PackedFile:
    """A packed file, mapped into memory.

    Args:
        path: the file.

    Attributes:
        rows: how many it has.
        block_rows: how many of them a block has; the last one may have fewer.

    Raises:
        ConfigError: the file is none, was cut short, or is of another version.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
        magic, version, self._dense_bytes, self.block_rows, _, self.rows = HEADER.unpack_from(header)
        if magic != MAGIC or self._dense_bytes not in (2, 4) or not self.block_rows:
            raise ConfigError([f"paths: {path} is no packed Criteo file; write one with: intune convert PATH OUT"])
        if version != VERSION:
            told = f"has version {version} of the packed format, expected {VERSION}; convert its source anew"
            raise ConfigError([f"paths: {path} {told}"])
        last = self.rows % self.block_rows
        expected = HEADER_BYTES + self.rows // self.block_rows * self._stride(self.block_rows)
        expected += self._stride(last) if last else 0
        if size != expected:
            raise ConfigError(
                [f"paths: {path} has {size} bytes, expected {expected}: it was cut short; convert its source anew"]
            )
        self._data = np.memmap(path, np.uint8, "r").view(np.ndarray)

    def _stride(self, rows: int) -> int:
        """Return the bytes of a block."""
        used = CHECKSUM_BYTES + rows * (4 * CATEGORIES + 4 + self._dense_bytes * DENSE)
        return -(-used // 8) * 8

    def take(self, ref: ArraysRef) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return labels [n], dense [n, 13] and categories [n, 26] of a block."""
        block, rows = self._block(ref), ref.rows
        first, second, third, end = itertools.accumulate(
            (4 * CATEGORIES * rows, 4 * rows, self._dense_bytes * DENSE * rows), initial=CHECKSUM_BYTES
        )
        categories, labels, dense = block[first:second], block[second:third], block[third:end]
        return (
            labels.view("<f4"),
            dense.view(f"<f{self._dense_bytes}").reshape(rows, DENSE),
            categories.view("<u4").reshape(rows, CATEGORIES),
        )

    def check(self, ref: ArraysRef) -> None:
        """Compare the checksum of a block.

        Raises:
            BadData: it is not that of the block.
        """
        block, number = self._block(ref), ref.first_row // self.block_rows
        found, wanted = _checksum(block[CHECKSUM_BYTES:], number), int(block[:CHECKSUM_BYTES].view("<u8")[0])
        if found != wanted:
            raise BadData(
                f"{self._path}: block {number} has the checksum {found:016x}, expected {wanted:016x}: it is damaged; "
                "convert its source anew"
            )

    def _block(self, ref: ArraysRef) -> npt.NDArray[np.uint8]:
        begin = HEADER_BYTES + ref.first_row // self.block_rows * self._stride(self.block_rows)
        return self._data[begin : begin + self._stride(ref.rows)]


def _checksum(data: npt.NDArray[np.uint8] | bytes, number: int) -> int:
    return int(xxhash.xxh3_64_intdigest(data, seed=number))


def write_packed(path: Path, parts: Iterable[Rows], *, block_rows: int, dense: str) -> None:
    """Write rows as a packed file, which is there when it is whole.

    Args:
        path: the file.
        parts: the rows, parsed with `hashing.ALL_BITS` as the rows of all tables.
        block_rows: rows of a block.
        dense: ``float32``, or ``float16``, which rounds them to three digits.
    """
    kind, part, rows = np.dtype(dense).newbyteorder("<"), path.with_name(f".{path.name}.part"), 0
    try:
        with open(part, "wb") as file:
            file.write(bytes(HEADER_BYTES))
            for number, block in enumerate(_blocks(parts, block_rows)):
                data = b"".join(
                    (
                        block.categories.astype("<i4").tobytes(),
                        block.labels.astype("<f4").tobytes(),
                        block.dense.astype(kind).tobytes(),
                    )
                )
                data += bytes(-len(data) % 8)
                file.write(_checksum(data, number).to_bytes(CHECKSUM_BYTES, "little"))
                file.write(data)
                rows += len(block)
            file.seek(0)
            file.write(HEADER.pack(MAGIC, VERSION, kind.itemsize, block_rows, 0, rows))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _blocks(parts: Iterable[Rows], block_rows: int) -> Iterator[Rows]:
    """Cut rows that come in parts of any sizes into blocks of one size, and the rest."""
    held: list[Rows] = []
    for part in parts:
        held.append(part)
        while sum(map(len, held)) >= block_rows:
            whole = Rows.joined(held)
            yield whole.take(slice(0, block_rows))
            held = [whole.take(slice(block_rows, len(whole)))]
    whole = Rows.joined(held) if held else None
    if whole is not None and len(whole):
        yield whole
