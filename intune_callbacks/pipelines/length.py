"""How many batches a loader or its sampler says there are: that is the user's code, which may take long, or draw."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from intune_callbacks.pipelines.base import in_main_thread

__all__ = ["Length", "length_of", "restore", "states"]

QUICK_S, SHARE = 1e-4, 0.01
"""What is answered sooner is asked for whenever it is needed; else so much of the time may go into it. A choice: it is
needed several times at each decision."""


def length_of(value: Any) -> int | None:
    """Return the length of a loader or sampler, None where it does not say; no random state moves.

    To be asked may mean to be iterated over, which draws an order.
    """
    # Beside another thread that trains, what that one draws meanwhile would be drawn again.
    kept = states() if in_main_thread() else None
    try:
        return len(value)
    except Exception:  # of one without a length, TypeError or what its author chose (PyTorch Geometric)
        return None
    finally:
        if kept is not None:
            restore(kept)


class Length:
    """The length of a sampler; one that takes long to answer is asked now and then.

    Args:
        sampler: a loader's.
        is_plain: to ask it costs nothing and draws nothing.
    """

    def __init__(self, sampler: Any, is_plain: bool) -> None:
        self._sampler, self._is_plain = sampler, is_plain
        self._due_s = 0.0
        self._last: int | None = None

    def now(self) -> int | None:
        """Return the batches of an epoch, None if the sampler does not know."""
        if self._is_plain:
            try:
                return len(self._sampler)
            except Exception:  # as above
                return None
        begin_s = time.perf_counter()
        if begin_s >= self._due_s:
            self._last = length_of(self._sampler)
            end_s = time.perf_counter()
            took_s = end_s - begin_s
            self._due_s = end_s + (took_s / SHARE if took_s > QUICK_S else 0.0)
        return self._last


def states() -> tuple[Any, Any, Any]:
    """Return the global random states of Python, numpy and torch; None of what nobody has imported."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(legacy=False),
        None if torch is None else torch.default_generator.get_state(),
    )


def restore(kept: tuple[Any, Any, Any]) -> None:
    """Put back what `states` returned."""
    python, numpy, torch = kept
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
    if torch is not None:
        sys.modules["torch"].default_generator.set_state(torch)
