"""Slow reads for a whole process: a small library that is loaded before the C library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["slow_reads"]

SOURCE = Path(__file__).with_name("slow_reads.c")


def slow_reads(data: Path, folder: Path, read_ms: int) -> dict[str, str]:
    """Return the environment in which each read below `folder` takes `read_ms` longer; empty for 0.

    Args:
        data: where the compiled library is kept.
        folder: whose files are slow.
        read_ms: milliseconds.

    Raises:
        RuntimeError: when there is no C compiler.
    """
    if not read_ms:
        return {}
    library = data.resolve() / "slow_reads.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        data.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(fresh), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError("slow reads need a C compiler: install gcc") from None
        fresh.replace(library)
    return {"LD_PRELOAD": str(library), "SLOW_DIR": str(folder.resolve()), "SLOW_MS": str(read_ms)}
