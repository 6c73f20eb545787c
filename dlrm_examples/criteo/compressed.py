"""Gzip and Zstandard files of Criteo TSV, read a piece at a time.

A compressed stream can be read from its beginning only, so the pieces of one file are read in their order; those of
several files are read side by side. A Zstandard file of several frames that say their sizes (`pzstd`, the seekable
format, one frame per write) is cut at the frames instead, and these can be read in any order.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dlrm_examples.criteo.blocks import pread
from dlrm_examples.criteo.tsv import Block
from intune_callbacks.errors import BadData, MissingPackage

__all__ = ["Cursor", "FrameRef", "NotWhole", "PieceRef", "compression", "read_frames", "scan_compressed"]

SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
GZIP_WINDOW = 31  # zlib's number for "gzip header, largest window"
LARGEST_FRAME = 1 << 26
SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
TAIL_BYTES = 1 << 14
# Workers ask for neighbouring pieces in any order; what was passed on the way to a later one is kept for them.
PIECES_KEPT = 16


@dataclass(frozen=True, slots=True)
class PieceRef:
    """The lines whose newline comes out of the bytes offset .. offset + length - 1 of a file, its piece `number`."""

    path: str
    number: int
    offset: int
    length: int
    last: bool


@dataclass(frozen=True, slots=True)
class FrameRef:
    """The lines that begin after the first newline of some frames and up to the first newline behind them.

    Args:
        path: the file.
        offset, length: the frames' bytes in the file.
        text_offset: where their text begins in the decompressed file; the first line of all belongs to offset 0.
    """

    path: str
    offset: int
    length: int
    text_offset: int


def compression(path: str) -> str | None:
    """Return ``gzip``, ``zstd`` or None, told from the file's name."""
    return SUFFIXES.get(os.path.splitext(path)[1].lower())


def scan_compressed(path: str, block_bytes: int) -> list[PieceRef] | list[FrameRef]:
    """Cut a file into pieces of `block_bytes` compressed bytes, or at its frames into somewhat more."""
    frames = list(_frames(path)) if compression(path) == "zstd" else []
    if len(frames) < 2:
        size = os.path.getsize(path)
        cuts = range(0, size, block_bytes)
        return [
            PieceRef(path, number, offset, min(block_bytes, size - offset), number == len(cuts) - 1)
            for number, offset in enumerate(cuts)
        ]
    refs: list[FrameRef] = []
    text_offset = 0
    for offset, length, text in frames:
        # Frames without text belong to what follows, or two references would begin at one place.
        if refs and (refs[-1].length < block_bytes or refs[-1].text_offset == text_offset):
            refs[-1] = FrameRef(path, refs[-1].offset, refs[-1].length + length, refs[-1].text_offset)
        else:
            refs.append(FrameRef(path, offset, length, text_offset))
        text_offset += text
    return refs


def _frames(path: str) -> Iterator[tuple[int, int, int]]:
    """Yield offset, length and size of the text of each frame; nothing if they do not all say it, or are too large.

    The layout is that of RFC 8878, sections 3.1.1 and 3.1.2.
    """
    zstandard = _zstandard()
    found = []
    with open(path, "rb") as file:
        if not (size := os.path.getsize(path)):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offset = 0
            while offset < size:
                begin, text = offset, 0
                if int.from_bytes(data[offset : offset + 4], "little") in SKIPPABLE_MAGIC:
                    offset += 8 + int.from_bytes(data[offset + 4 : offset + 8], "little")
                else:
                    try:
                        frame = zstandard.get_frame_parameters(data[offset : offset + 18])
                    except zstandard.ZstdError:
                        return
                    if (text := frame.content_size) > LARGEST_FRAME:
                        return
                    offset = _end_of_blocks(data, offset + zstandard.frame_header_size(data[offset : offset + 18]))
                    offset += 4 * frame.has_checksum
                found.append((begin, offset - begin, text))
    if offset == size:
        yield from found


def _end_of_blocks(data: mmap.mmap, offset: int) -> int:
    last = 0
    while not last and offset + 3 <= len(data):
        header = int.from_bytes(data[offset : offset + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        offset += 3 + (1 if kind == 1 else size)  # a run of one byte is that byte
    return offset


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise MissingPackage("zstandard", "criteo") from None
    return zstandard


class NotWhole(BadData, OSError):
    """A compressed file is damaged, or ends too early."""


class _Stream:
    """Decompressed bytes of a file, or of its part from a frame on, given its compressed bytes one after the other."""

    def __init__(self, path: str) -> None:
        self.path, self.zstd = path, compression(path) == "zstd"
        self._decompressor: Any = None

    def feed(self, chunk: bytes) -> bytes:
        """Return what `chunk` decompresses to."""
        parts = []
        try:
            while chunk:
                if self._decompressor is None:
                    # A frame or member begins, or zeros, with which gzip files may be padded.
                    if not (chunk := chunk.lstrip(b"\0")):
                        break
                    self._decompressor = self._fresh()
                parts.append(self._decompressor.decompress(chunk))
                chunk = b""
                if self._decompressor.eof:
                    chunk, self._decompressor = self._decompressor.unused_data, None
        except Exception as error:
            raise NotWhole(f"{self.path}: not a whole {compression(self.path)} file: {error}") from error
        return b"".join(parts)

    def finish(self) -> None:
        """Say that the file has ended."""
        if self._decompressor is not None:
            raise NotWhole(f"{self.path}: not a whole {compression(self.path)} file: it ends too early")

    def _fresh(self) -> Any:
        return _zstandard().ZstdDecompressor().decompressobj() if self.zstd else zlib.decompressobj(GZIP_WINDOW)


def read_frames(ref: FrameRef) -> Block:
    """Read the lines of some frames (possibly none, when one line is longer than they are)."""
    with open(ref.path, "rb", buffering=0) as file:
        stream, position = _Stream(ref.path), ref.offset + ref.length
        parts = [stream.feed(pread(file.fileno(), ref.offset, ref.length))]
        begin = parts[0].find(b"\n") + 1 if ref.text_offset else 0
        if ref.text_offset and begin == 0:
            return Block(ref.path, ref.text_offset, b"")
        while chunk := pread(file.fileno(), position, TAIL_BYTES):
            position += len(chunk)
            tail = stream.feed(chunk)
            parts.append(tail[: tail.find(b"\n") + 1] or tail)
            if parts[-1].endswith(b"\n"):
                break
        else:
            stream.finish()
    return Block(ref.path, ref.text_offset + begin, b"".join(parts)[begin:])


class Cursor:
    """How far one file is read. Pieces that are asked for in about their order are decompressed once.

    A piece before the ones kept, as after a restart in the middle, costs reading the file again from its beginning.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._kept: dict[int, Block] = {}
        self._restart()

    def _restart(self) -> None:
        self._stream, self._next, self._carry, self._text_offset = _Stream(self.path), 0, b"", 0

    def read(self, ref: PieceRef) -> Block:
        """Read one piece; all pieces but the last have the same length."""
        length = ref.offset // ref.number if ref.number else ref.length
        with self._lock:
            if (kept := self._kept.pop(ref.number, None)) is not None:
                return kept
            if ref.number < self._next:
                self._restart()
            try:
                while self._next < ref.number:
                    block = self._advance(length, last=False)
                    if ref.number - self._next < PIECES_KEPT:
                        self._kept[self._next - 1] = block
                block = self._advance(length, last=ref.last)
            except BaseException:
                self._restart()
                raise
            self._kept = {n: b for n, b in self._kept.items() if ref.number - PIECES_KEPT < n < ref.number}
        return block

    def _advance(self, length: int, *, last: bool) -> Block:
        with open(self.path, "rb", buffering=0) as file:
            text = self._carry + self._stream.feed(pread(file.fileno(), self._next * length, length))
        if last:
            self._stream.finish()
        cut = len(text) if last else text.rfind(b"\n") + 1
        block = Block(self.path, self._text_offset, text[:cut])
        self._next, self._carry, self._text_offset = self._next + 1, text[cut:], self._text_offset + cut
        return block
