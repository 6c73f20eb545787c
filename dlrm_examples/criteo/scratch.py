"""Working memory that is used again: a fresh page costs the kernel more than the parser needs for the text on it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["scratch"]

_memory = threading.local()


def scratch(name: str, length: int, dtype: Any = np.uint8) -> Any:
    """Return an array [length] with anything in it, this thread's until it asks for the same name again.

    Args:
        name: what for.
        length: number of elements; the most ever asked for stays allocated as long as the thread lives.
        dtype: of the elements.
    """
    held: npt.NDArray[Any] | None = getattr(_memory, name, None)
    if held is None or len(held) < length:
        # A quarter more: blocks that end at line ends differ a little in size.
        held = np.empty(length + length // 4, dtype)
        setattr(_memory, name, held)
    return held[:length]
