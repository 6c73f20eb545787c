"""The workers of a resizable stage: threads that compute, or that each pass their items to a child process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from intune_callbacks.pipelines.base import begin, join
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.workers.line import WAIT_S, Line, Raised, Task
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.pipelines.workers.worker import READY_S, Child
from intune_callbacks.types import Clock

__all__ = ["WorkerThreads"]

# A choice: a worker ends with the item it works on; what takes longer is not waited for.
JOIN_S = 10.0

_CLAIMED: Task = (-1, None, None)


class WorkerThreads:
    """As many as are wanted, each pulling, or taking from the inbox, one item after the other.

    Args:
        line: what they share with the consumer.
        source: the iterator the items come from; None where the consumer pulls it and fills the inbox.
        fn, pool, snapshot, finish, may_stop, counters, clock, name: as for `ElasticMap`.

    Attributes:
        wanted: how many there should be.
        alive: how many there are.
        starting: those of them whose process cannot compute yet.
        threads: what was started and may still run.
    """

    def __init__(
        self,
        line: Line,
        source: Iterator[Any] | None,
        fn: Callable[[Any], Any] | None,
        *,
        pool: ProcessPool | None,
        snapshot: Callable[[], Any] | None,
        finish: Callable[[Any], Any] | None,
        may_stop: bool,
        counters: Counters,
        clock: Clock,
        name: str,
    ) -> None:
        self._line, self._source, self._fn, self._pool = line, source, fn, pool
        self._snapshot, self._finish, self._counters, self._clock = snapshot, finish, counters, clock
        self._may_stop, self._name = may_stop, name
        self._source_lock = threading.Lock()
        self.wanted = self.alive = self.starting = 0
        self.threads: list[threading.Thread] = []
        self._join_until_s: float | None = None

    def want(self, workers: int | None) -> int:
        """Set how many there should be, None for as many as before, and return how many to `start` (lock held)."""
        line = self._line
        if workers is not None:
            self.wanted = workers
        missing = 0 if line.is_over() else max(0, self.wanted - self.alive)
        self.alive += missing
        line.space.notify_all()
        if not self.wanted:
            line.ready.notify_all()
        return missing

    def start(self, missing: int, fewest: int) -> None:
        """Start what `want` found missing.

        Children are started here, in the caller's thread, and not by the new worker thread: the training thread sits
        between two steps, so no lock of the frameworks is held while the process is forked.

        Args:
            fewest: `wanted` does not fall below it where some cannot be started.

        Raises:
            Exception: one could not be started; `wanted` then says how many there are.
        """
        started = 0
        try:
            for _ in range(missing):
                self._start()
                started += 1
        finally:
            if started < missing:
                with self._line.lock:
                    self.alive -= missing - started
                    self.wanted = max(fewest, min(self.wanted, self.alive))

    def join(self) -> bool:
        """Wait, at most ten seconds from the first call on, for the threads to end; return whether all have."""
        if self._join_until_s is None:
            self._join_until_s = time.monotonic() + JOIN_S
        for thread in self.threads:
            if thread.ident != threading.get_ident():
                join(thread, max(0.0, self._join_until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _start(self) -> None:
        lock, child = self._line.lock, self._pool.get() if self._pool is not None else None
        with lock:
            self.starting += child is not None
        thread = threading.Thread(target=self._work, args=(child,), daemon=True, name=f"intune-{self._name}")
        try:
            begin(thread)
        except BaseException:
            with lock:
                self.starting -= child is not None
            if child is not None and self._pool is not None:
                self._pool.put(child)
            raise
        with lock:
            # Another thread may be resizing, too.
            self.threads = [*(known for known in self.threads if known.is_alive()), thread]

    def _work(self, child: Child | None) -> None:
        wall, cpu, pool, line = self._clock.wall, self._clock.cpu, self._pool, self._line
        try:
            claim = self._first_claim(child)
            while claim is not None:
                task = claim if self._source is None else self._pull(self._source)
                if task is None:
                    return
                number, item, snapshot = task
                begin_s, begin_cpu_s = wall(), cpu()
                value: Any
                cpu_s, size_bytes = -1.0, None
                try:
                    if child is not None and pool is not None:
                        value, cpu_s, size_bytes = pool.call(child, item, lambda: line.closed)
                    else:
                        value = self._fn(item)  # type: ignore[misc]
                    if self._finish is not None:
                        value = self._finish(value)
                except StopIteration as error:
                    value = Raised(error)
                    if not self._may_stop:  # it would end the consumer's loop and lose the rest without a word
                        value = Raised(RuntimeError(f"{self._name} raised StopIteration on an item"))
                        value.error.__cause__ = error
                except BaseException as error:
                    value = Raised(error, item)
                made_s, pulled_s = wall(), self._counters.pulled_s
                busy_s = made_s - begin_s
                if cpu_s < 0.0:
                    cpu_s = cpu() - begin_cpu_s
                dead = child is not None and not child.usable
                with line.lock:  # whoever feeds the stage holds it meanwhile
                    self._waited(made_s, pulled_s)
                    line.put(number, value, snapshot, wall())
                    with suppress(Exception):  # what cannot be counted has been computed all the same
                        self._counters.computed(busy_s, cpu_s, value, size_bytes)
                    # A worker that waits for room holds none of it: an error's traceback has this frame, and those it
                    # was raised through, with all that the training holds there.
                    del item, value, snapshot, task
                    if dead:
                        self.alive -= 1
                        return
                    claim = self._claim()
        finally:
            if child is not None and pool is not None:
                pool.put(child, surplus=not (line.closed or line.exhausted))

    def _first_claim(self, child: Child | None) -> Task | None:
        """Claim once the process can compute: an item claimed before holds up all that follow it."""
        lock = self._line.lock
        while child is not None and not child.ready.wait(READY_S):
            with lock:
                if self._line.is_over() or self.alive > self.wanted:
                    self.starting -= 1
                    self.alive -= 1
                    return None
        with lock:
            self.starting -= child is not None
            return self._claim()

    def _claim(self) -> Task | None:
        """Wait for room in the window (lock held); None tells the worker to leave."""
        line = self._line
        while True:
            # Where there are fewer to be, those that cannot compute yet leave first.
            if line.is_over() or self.alive - self.starting > self.wanted:
                self.alive -= 1
                # This worker may have been woken for room it does not use: pass the call on.
                line.space.notify()
                return None
            if line.inbox:
                return line.inbox.popleft()
            if self._source is not None and line.claimed - line.delivered < line.window:
                line.claimed += 1
                return _CLAIMED
            begin_s, pulled_s = self._clock.wall(), self._counters.pulled_s
            line.space.wait(WAIT_S)
            self._waited(begin_s, pulled_s)

    def _waited(self, begin_s: float, pulled_s: float) -> None:
        """Count the time since then (lock held), as waited for the source where that was asked meanwhile."""
        waited_s = self._clock.wall() - begin_s
        fed_s = min(waited_s, self._counters.pulled_s - pulled_s)
        self._counters.starved_s += fed_s
        self._counters.blocked_s += waited_s - fed_s

    def _pull(self, source: Iterator[Any]) -> Task | None:
        """Take the next item and its number; None when the source has ended."""
        line = self._line
        begin_s = self._clock.wall()
        error: BaseException | None = None
        with self._source_lock:
            if not (line.exhausted or line.closed):
                try:
                    item = next(source)
                    snapshot = self._snapshot() if self._snapshot is not None else None
                    number, line.pulled = line.pulled, line.pulled + 1
                    self._counters.starved_s += self._clock.wall() - begin_s
                    return number, item, snapshot
                except StopIteration:
                    pass
                except BaseException as raised:
                    error = raised
            with line.lock:
                if error is not None:
                    line.fail(error)
                line.exhausted = True
                self.alive -= 1
                line.wake()
        return None
