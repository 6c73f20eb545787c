"""The packed format: parsed rows in blocks, each with a checksum, to be mapped into memory.

    header   64 bytes: magic, version, bytes of a dense value (4 or 2), rows of a block, rows of the file
    block    XXH3 of what follows, seeded with the block's number; offsets [n] int64; categories [n, 26] uint32;
             labels [n] float32; dense [n, 13] float32 or float16, log(x + 1); zeros up to a multiple of 8 bytes

All numbers are little-endian. Every block has as many rows as the header says, but the last. Of the categories no
modulus is taken: one file serves tables of any sizes. The offsets are those of `blocks.row_offsets` in the file that
the rows were parsed from, so that a `Split` holds out the same rows.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.blocks import Arrays, ArraysRef
from dlrm_examples.criteo.tsv import CATEGORIES, DENSE, Rows
from intune_callbacks.errors import BadData, ConfigError, MissingPackage

try:
    import xxhash
except ModuleNotFoundError:
    raise MissingPackage("xxhash", "criteo") from None

__all__ = ["BLOCK_ROWS", "PackedFile", "write_packed"]

BLOCK_ROWS = 8_192
"""1.4 MB: few calls of Python for a row, and what is made of a block fits the processor's cache."""

MAGIC, VERSION = b"criteo\x00\x01", 1
HEADER, HEADER_BYTES = struct.Struct("<8sIIIIQ"), 64
CHECKSUM_BYTES = 8

MOST_MAPPED = 256
"""Each mapped file has a descriptor for as long as anybody holds rows of it; a process often has 1,024."""
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

Part = tuple[Rows, npt.NDArray[np.int64]]


class PackedFile:
    """A packed file, mapped into memory.

    Args:
        path: the file.
        is_small: read it instead, where `MOST_MAPPED` others are mapped.

    Attributes:
        rows: how many it has.
        block_rows: how many of them a block has; the last one may have fewer.

    Raises:
        ConfigError: the file is none, was cut short, or is of another version.
    """

    def __init__(self, path: str, *, is_small: bool = False) -> None:
        self._path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or (is_small and len(_mapped) >= MOST_MAPPED):
                data: mmap.mmap | bytes = file.read()
            else:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _mapped.add(data)
        header = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
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
        self._data = np.frombuffer(data, np.uint8)

    def _stride(self, rows: int) -> int:
        """Return the bytes of a block."""
        used = CHECKSUM_BYTES + rows * (8 + 4 * CATEGORIES + 4 + self._dense_bytes * DENSE)
        return int(-(-used // 8) * 8)

    def take(self, ref: ArraysRef) -> Arrays:
        """Return the rows of a block, as they lie in the file."""
        block, rows = self._block(ref), ref.rows
        sizes = (8 * rows, 4 * CATEGORIES * rows, 4 * rows, self._dense_bytes * DENSE * rows)
        ends = itertools.accumulate(sizes, initial=CHECKSUM_BYTES)
        offsets, categories, labels, dense = (block[begin:end] for begin, end in itertools.pairwise(ends))
        return Arrays(
            ref,
            ref.path,
            offsets.view("<i8"),
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
        found, wanted = _checksum(block[CHECKSUM_BYTES:].data, number), int(block[:CHECKSUM_BYTES].view("<u8")[0])
        if found != wanted:
            raise BadData(
                f"{self._path}: block {number} has the checksum {found:016x}, expected {wanted:016x}: it is damaged; "
                "convert its source anew"
            )

    def _block(self, ref: ArraysRef) -> npt.NDArray[np.uint8]:
        begin = HEADER_BYTES + ref.first_row // self.block_rows * self._stride(self.block_rows)
        return self._data[begin : begin + self._stride(ref.rows)]


def _checksum(data: memoryview | bytes, number: int) -> int:
    return int(xxhash.xxh3_64_intdigest(data, seed=number))


def write_packed(path: Path, parts: Iterable[Part], *, block_rows: int, dense: str = "float32") -> None:
    """Write rows as a packed file, which is there when it is whole.

    Args:
        path: the file.
        parts: the rows, parsed with `hashing.ALL_BITS` as the rows of all tables, each part with its rows' offsets [n].
        block_rows: rows of a block.
        dense: ``float32``, or ``float16``, which rounds them to three digits.
    """
    kind, rows = np.dtype(dense).newbyteorder("<"), 0
    written = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with open(written, "wb") as file:
            file.write(bytes(HEADER_BYTES))
            for number, (block, offsets) in enumerate(_blocks(parts, block_rows)):
                columns = ((offsets, "<i8"), (block.categories, "<i4"), (block.labels, "<f4"), (block.dense, kind))
                data = b"".join(column.astype(its, copy=False).tobytes() for column, its in columns)
                data += bytes(-len(data) % 8)
                file.write(_checksum(data, number).to_bytes(CHECKSUM_BYTES, "little"))
                file.write(data)
                rows += len(block)
            file.seek(0)
            file.write(HEADER.pack(MAGIC, VERSION, kind.itemsize, block_rows, 0, rows))
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def _blocks(parts: Iterable[Part], block_rows: int) -> Iterator[Part]:
    """Cut rows that come in parts of any sizes into blocks of one size, and the rest."""
    held: list[Part] = []
    for part in parts:
        held.append(part)
        if sum(len(rows) for rows, _ in held) < block_rows:
            continue
        rows, offsets = _joined(held)
        rest = len(rows) // block_rows * block_rows
        for begin in range(0, rest, block_rows):
            block = slice(begin, begin + block_rows)
            yield rows.take(block), offsets[block]
        held = [(rows.take(slice(rest, None)), offsets[rest:])]
    if sum(len(rows) for rows, _ in held):
        yield _joined(held)


def _joined(parts: Sequence[Part]) -> Part:
    return Rows.joined([rows for rows, _ in parts]), np.concatenate([offsets for _, offsets in parts])
