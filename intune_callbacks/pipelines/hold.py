"""Where a stage that pulls ahead of its consumer must not look for the end of its source sooner than a stock loader."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Hold"]


@dataclass(frozen=True)
class Hold:
    """Look for the end of the source only when the consumer asks for more than so many items.

    A sampler may draw random numbers at its end, and a trainer that knows the length never asks.

    Args:
        at: items up to the end; None looks without care.
        every: look as carefully after each so many items more; 0 for a source that has one end.
        window: look for the end as soon as fewer results than this are left to deliver, as a stock loader with workers
            does.
    """

    at: int | None = None
    every: int = 0
    window: int = 0

    def end(self, delivered: int) -> float:
        """Return up to where items are of the epoch that is being delivered."""
        if self.at is None or (delivered >= self.at and not self.every):
            return math.inf
        return self.at if delivered < self.at else delivered + self.every - (delivered - self.at) % self.every

    def may_pull(self, pulled: int, left: int, asked: bool) -> bool:
        """Return whether one more item may be pulled now.

        Args:
            left: results not delivered yet, by whomever.
            asked: the consumer wants one.
        """
        return not self._is_end(pulled) or left < self.window or (asked and left == 0)

    def _is_end(self, pulled: int) -> bool:
        if self.at is None or pulled < self.at:
            return False
        return pulled == self.at or bool(self.every and (pulled - self.at) % self.every == 0)
