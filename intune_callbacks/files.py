"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of the file; whoever reads it meanwhile sees the old one.

    Args:
        path: its folder is made if it does not exist.
        text: written in UTF-8.

    Raises:
        OSError: when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
