"""Files that are there as a whole or not at all, and whether a folder can take them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

__all__ = ["nearest_folder", "unwritable", "write_whole"]


def nearest_folder(folder: Path) -> Path:
    """Return the folder itself or, where it is not there yet, the nearest one above it: a file where it cannot be."""
    for path in (folder, *folder.absolute().parents):
        if os.path.lexists(path):
            return path
    return folder


def unwritable(folder: Path) -> str | None:
    """Return why files cannot be written into a folder, also one that is to be made; None where they can."""
    there = nearest_folder(folder)
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"this process may not write into {there}"


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of the file; whoever reads it meanwhile sees the old one.

    Raises:
        OSError: when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # on a shared disk pids are not enough
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
