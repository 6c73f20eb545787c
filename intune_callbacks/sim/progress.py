"""How far a long run is: a bar where somebody looks and rich is installed, else a line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from intune_callbacks.spelling import wrapped
from intune_callbacks.types import Clock

__all__ = ["Progress"]


class Progress:
    """Shows a share and a line of text; use as a context manager.

    Args:
        every_s: seconds between two lines.
        clock: whose seconds.
    """

    def __init__(self, every_s: float = 5.0, clock: Clock | None = None) -> None:
        self._every_s, self._clock = every_s, clock or Clock()
        self._next_s = self._clock.wall()
        self._bar = _bar() if sys.stdout.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, share: float, text: Callable[[], str]) -> None:
        """Show how far it is, if it is time to.

        Args:
            share: done, 0..1.
            text: called only when it is shown.
        """
        if self._clock.wall() >= self._next_s:
            self._next_s = self._clock.wall() + (self._every_s if self._bar is None else 0.5)
            self.say(share, text())

    def say(self, share: float, text: str) -> None:
        """Show it now."""
        if self._bar is None:
            print(wrapped(f"{share:4.0%}  {text}"), flush=True)
        else:
            self._bar.update(self._task, completed=share, description=text)


def _bar() -> Any:
    try:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column
    except ImportError:
        return None
    return Bar(BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}", table_column=Column()))
