"""Blocks that were parsed before, on a local disk: read from there in later epochs, by other ranks, in later runs.

One packed file for each block, named by a hash of the file's absolute path, size and time of change, the block's place
in it, and the version of the parser. So nothing is ever stale, and all may be deleted at any time, also while it is in
use.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_examples.criteo.arrays import taken
from dlrm_examples.criteo.blocks import Arrays, ArraysRef, BlockRef, RowGroupRef
from dlrm_examples.criteo.compressed import FrameRef, PieceRef
from dlrm_examples.criteo.packed import PackedFile, write_packed
from dlrm_examples.criteo.tsv import Rows
from intune_callbacks.errors import ConfigError, warn

__all__ = ["BlockCache"]

PARSER_VERSION = 1  # what a line is parsed to
KEPT_FREE_BYTES = 1 << 30

Source = BlockRef | PieceRef | FrameRef | RowGroupRef


class BlockCache:
    """Parsed blocks in a folder, for any number of threads and processes.

    Args:
        folder: where; made if absent. Nothing is written any more when less than a GiB of its disk is free.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.is_full = folder, False
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError([f"cache_dir={folder}: cannot be made: {error}; give a folder that can"]) from None

    def get(self, ref: Source, *, checked: bool = True) -> Arrays | None:
        """Return a block as it was parsed, None if it is not here, or damaged.

        Args:
            ref: the block in its file.
            checked: read all of it, and compare its checksum.
        """
        path = str(self._path(ref))
        try:
            file = PackedFile(path, is_small=True)
            found = taken(file, ArraysRef(path, 0, file.rows), checked=checked)
        except (OSError, ValueError):  # not there, cut short, damaged
            return None
        return replace(found, path=ref.path)

    def put(self, ref: Source, rows: Rows, offsets: npt.NDArray[np.int64]) -> Arrays:
        """Keep a block for later, as far as there is room, and return it.

        Args:
            ref: the block in its file.
            rows: all its rows, parsed with `hashing.ALL_BITS` as the rows of all tables.
            offsets: what a `Split` knows them by, [n].
        """
        path = self._path(ref)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.is_full = shutil.disk_usage(self.folder).free < KEPT_FREE_BYTES
            if self.is_full:
                warn(f"cache_dir={self.folder}: less than 1 GiB of its disk is free; no more blocks are kept there")
            else:
                write_packed(path, [(rows, offsets)], block_rows=max(1, len(rows)))
        except OSError as error:
            self.is_full = True
            warn(f"cache_dir={self.folder}: {error}; no more blocks are kept there")
        whole = ArraysRef(str(path), 0, len(rows))
        return Arrays(whole, ref.path, offsets, rows.labels, rows.dense, rows.categories.view(np.uint32))

    def _path(self, ref: Source) -> Path:
        status = os.stat(ref.path)
        where = f"{os.path.abspath(ref.path)}\0{status.st_mtime_ns}\0{status.st_size}\0{PARSER_VERSION}\0"
        name = hashlib.blake2b((where + repr(replace(ref, path=""))).encode(), digest_size=16).hexdigest()
        return Path(self.folder, name[:2], f"{name[2:]}.packed")
