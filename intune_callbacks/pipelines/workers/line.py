"""The items of a resizable stage: numbered as they are pulled, kept when finished, handed out in their order."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from intune_callbacks.errors import WorkerDied

__all__ = ["WAIT_S", "Hold", "Line", "Raised", "Task"]

# Every wait is bounded: a missed wake-up or a dead worker costs at most this long before somebody looks again.
WAIT_S = 1.0

Task = tuple[int, Any, Any]
"""An item's number, the item, and the source's snapshot after it was pulled."""


class Raised:
    """An exception on its way to its item's place in the order.

    Args:
        error: what was raised.
        item: what raised it in a worker; None where the source did.
    """

    __slots__ = ("error", "item")

    def __init__(self, error: BaseException, item: Any = None) -> None:
        self.error, self.item = error, item

    @property
    def may_be_tried(self) -> bool:
        """Whether the training process may compute the item anew: what has killed a worker might kill that."""
        return self.item is not None and isinstance(self.error, Exception) and not isinstance(self.error, WorkerDied)


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


class Line:
    """What the workers and the consumer of a stage share; all but `abort` is for who holds `lock`.

    Args:
        window: results finished or in progress ahead of the next one to be delivered.
        ordered: results are handed out in the order of the source, not, within an epoch, as they are finished.
        hold: where an epoch ends, and the source is to be looked at with care.

    Attributes:
        space: notified when a worker may find something to do.
        ready: notified when the consumer may.
        inbox: what was pulled for the workers and is not begun.
        results: number -> result and snapshot.
        claimed: places in the window that workers took before they pulled.
        pulled: items of the source so far.
        delivered: results handed out so far.
        exhausted: the source has no more.
        closed: nobody wants more.
        ahead_since_s: wall clock, since when there has always been a result.
    """

    def __init__(self, window: int, ordered: bool, hold: Hold) -> None:
        self.window, self.ordered, self.hold = max(1, window), ordered, hold
        # Reentrant: the garbage collector may run `abort` in a worker that holds it.
        self.lock = threading.RLock()
        self.space = threading.Condition(self.lock)
        self.ready = threading.Condition(self.lock)
        self.inbox: deque[Task] = deque()
        self.results: dict[int, tuple[Any, Any]] = {}
        self.claimed = self.pulled = self.delivered = 0
        self.exhausted = self.closed = False
        self._failed: BaseException | None = None
        self.ahead_since_s = 0.0

    def is_over(self) -> bool:
        """Return whether there is nothing left for a worker."""
        return self.closed or (self.exhausted and not self.inbox)

    def is_drained(self) -> bool:
        """Return whether there is nothing left for the consumer."""
        return self.closed or (self.exhausted and self.delivered == self.pulled)

    def end(self) -> float:
        """Return before which number all others are to be delivered."""
        return self.delivered + 1 if self.ordered else self.hold.end(self.delivered)

    def first(self) -> int:
        """Return the number of the result to deliver next, if it is there."""
        end = self.end()
        return self.delivered if self.ordered else next((n for n in self.results if n < end), -1)

    def put(self, number: int, value: Any, snapshot: Any, now_s: float) -> None:
        """Keep a result until its turn.

        Args:
            value: the result, or a `Raised`.
            snapshot: of the source after its item.
        """
        if not self.results:
            self.ahead_since_s = now_s
        self.results[number] = (value, snapshot)
        if not self.ordered or number == self.delivered:
            self.ready.notify()

    def fail(self, error: BaseException) -> None:
        """End with the error of the source: behind all that was pulled, or where a stock loader would meet it."""
        self.exhausted = True
        if self.ordered and self.hold.window:
            self._failed = error
            return
        self.results[self.pulled], self.hold = (Raised(error), None), Hold(self.pulled)
        self.pulled += 1

    def meet(self) -> None:
        """Raise the error of the source once a stock loader, which pulls as it delivers, would have pulled it."""
        if self._failed is not None and self.delivered > self.pulled - self.hold.window:
            error, self._failed = self._failed, None
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    def wake(self) -> None:
        """Have everybody look again."""
        self.space.notify_all()
        self.ready.notify_all()

    def abort(self) -> None:
        """Tell everybody to stop without waiting for them: a consumer inside `next` gets StopIteration."""
        with self.lock:
            self.closed = True
            self.results.clear()
            self.inbox.clear()
            self.wake()
