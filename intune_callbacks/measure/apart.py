"""Seconds of a run that are told apart, such as those of its validations."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Apart"]


class Apart:
    """Adds up what lies between a begin and an end.

    Args:
        now: seconds, by any clock.

    Attributes:
        total_s: of all that have ended; one that an error has left open is none of them.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since_s: float | None = None
        self.total_s = 0.0

    def begin(self) -> None:
        self._since_s = self._now()

    def end(self) -> None:
        """Without a begin nothing happens."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self.total_s += self._now() - since_s
