"""What stands between the workers of a torch iterator and the training that asks it for batches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from intune_callbacks.pipelines.base import begin
from intune_callbacks.pipelines.workers.line import Raised

__all__ = ["Relay"]

# How often the reader looks whether the iterator has ended: so long its thread may outlive that one. A choice.
POLL_S = 0.1


class Relay:
    """Stands for an iterator's queue of results and reads that one ahead, in a thread of its own.

    Args:
        seen: called with the number of each result and the result; returns what takes its place.

    Attributes:
        ended: set, nobody reads ahead any more, and results are read when they are asked for.
    """

    def __init__(self, results: Any, seen: Callable[[Any, Any], Any]) -> None:
        self._results, self._seen = results, seen
        self._read: queue.Queue[Any] = queue.Queue()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="intune-results")
        begin(self._thread)

    def _work(self) -> None:
        while not self.ended.is_set():
            try:
                message: Any = self._next(True, POLL_S)
            except queue.Empty:
                continue
            except Exception as error:  # torch has its own words for a worker that ended
                message = Raised(error)
                self.ended.wait(POLL_S)
            self._read.put(message)

    def _next(self, block: bool, timeout: float | None) -> Any:
        number, data = self._results.get(block, timeout)
        return number, self._seen(number, data)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next result with its number; raises what reading it has raised."""
        if self._thread.is_alive() or not self._read.empty():
            message = self._read.get(block, timeout)
        else:
            message = self._next(block, timeout)
        if type(message) is Raised:
            raise message.error
        return message

    def qsize(self) -> int:
        """Return how many results were read ahead."""
        return self._read.qsize()
