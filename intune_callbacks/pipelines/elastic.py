"""The resizable stage: an ordered parallel map whose workers and window are two live numbers.

A worker pulls its own input under a lock, which numbers it, computes, and stores the result under its number; the
consumer takes the numbers in order. There is no reader thread, no sorter thread and no multiprocessing queue, so a
resize is two integer writes and a notify: nothing in flight is dropped, run twice or reordered. With no workers at all
the consumer computes the next item itself, and nothing ahead.

    claim room in the window -> pull (numbered) -> compute -> store under the number -> consumer takes in order
          blocked_s                starved_s        busy_s         queued
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.hold import Hold
from intune_callbacks.pipelines.worker import READY_S, Child
from intune_callbacks.pipelines.workers import ProcessPool
from intune_callbacks.types import Clock, StageStats

__all__ = ["ElasticMap"]

Y = TypeVar("Y")

# Every wait is bounded: a missed wake-up or a dead worker costs at most this long before somebody looks again.
WAIT_S = 1.0
# A choice: a worker ends with the item it works on; what takes longer is not waited for.
JOIN_S = 10.0

# An item's number, the item, and the source's snapshot after it was pulled.
_Task = tuple[int, Any, Any]
_CLAIMED: _Task = (-1, None, None)


class _Raised:
    """An exception on its way to its item's place in the order."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ElasticMap(Generic[Y]):
    """Apply `fn` to the items of `source` in parallel and deliver the results in order.

    Args:
        source: the iterator the items come from; pulled by one thread at a time.
        fn: what a worker does to one item. With a pool it runs in the pool's children and this one is not called.
        workers: items computed at once.
        window: results finished or in progress ahead of the next one to be delivered.
        ordered: deliver in the order of the source (True) or, within an epoch, as finished.
        pool: child processes for the work; None computes in threads.
        snapshot: called after each pull, under the source's lock; what it returned for an item is in `state` once
            that item was delivered.
        feed: pull the source in the consumer's thread (index samplers that draw random numbers), window ahead.
        hold: with `feed`, where an epoch ends, and the source is to be looked at with care.
        inline: with `feed`, what the consumer does to an item itself while there are 0 workers; None keeps one worker.
        finish: applied to each result in the parent's worker thread (pinning memory).
        delivered: told the number of each result, when the consumer gets it.
        timeout_s: raise RuntimeError if one item takes longer to arrive; 0 waits for as long as a worker lives.
        counters: where to count; a new `Counters` by default.
        clock: wall and CPU clock.
        name: the stage's name, used for thread names and errors.

    Raises:
        ValueError: neither a function nor a pool was given.
        Exception: not all workers could be started; then none is left.
    """

    def __init__(
        self,
        source: Iterator[Any],
        fn: Callable[[Any], Y] | None,
        *,
        workers: int = 1,
        window: int = 2,
        ordered: bool = True,
        pool: ProcessPool | None = None,
        snapshot: Callable[[], Any] | None = None,
        feed: bool = False,
        hold: Hold | None = None,
        inline: Callable[[Any], Y] | None = None,
        finish: Callable[[Y], Y] | None = None,
        delivered: Callable[[int], None] | None = None,
        timeout_s: float = 0.0,
        counters: Counters | None = None,
        clock: Clock | None = None,
        name: str = "map",
    ) -> None:
        if fn is None and pool is None:
            raise ValueError("fn=None: expected a function, or a pool whose children hold one")
        self.name = name
        self.state: Any = None
        self.counters = counters or Counters()
        self._source, self._fn, self._pool = source, fn, pool
        self._snapshot, self._finish, self._timeout_s = snapshot, finish, timeout_s
        self._ordered, self._feeding, self._hold = ordered, feed, hold or Hold()
        self._inline = inline if feed else None
        self._fewest = 1 if self._inline is None else 0
        self._clock, self._tell = clock or Clock(), delivered
        # Reentrant: the garbage collector may run `abort` in a worker that holds it.
        self._lock = threading.RLock()
        self._source_lock = threading.Lock()
        self._space = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._results: dict[int, tuple[Any, Any]] = {}
        self._inbox: deque[_Task] = deque()
        self._claimed = self._pulled = self._delivered = 0
        self._exhausted = self._closed = False
        self._workers, self._window = 0, max(1, window)
        self._alive = self._starting = 0  # worker threads; those of them whose process cannot compute yet
        self._threads: list[threading.Thread] = []
        self._idle_s: float | None = None
        self._ahead_since_s = 0.0  # since when there has always been a result
        self._join_until_s: float | None = None
        try:
            self.resize(workers)
        except BaseException:
            self.close()
            raise

    # -- the two live numbers ------------------------------------------------------------------------------------

    @property
    def pool(self) -> ProcessPool | None:
        """The child processes, None for threads."""
        return self._pool

    @property
    def workers(self) -> int:
        """Items computed at once."""
        return self._workers

    @property
    def window(self) -> int:
        """Results that may be finished or in progress ahead of the next one to be delivered."""
        return self._window

    def resize(self, workers: int | None = None, window: int | None = None) -> None:
        """Change one or both numbers at once; callable at any moment, from any thread.

        Args:
            workers: items computed at once, at least 1, or 0 with `inline`; surplus workers leave after their current
                item.
            window: the reorder window, at least 1; a smaller one takes effect as results are delivered.

        Raises:
            Exception: a worker could not be started; `workers` then says how many there are.
        """
        with self._lock:
            if window is not None:
                self._window = max(1, int(window))
            if workers is not None:
                self._workers = max(self._fewest, int(workers))
                self._idle_s = None
            missing = 0 if self._is_over() else max(0, self._workers - self._alive)
            self._alive += missing
            self._space.notify_all()
            if not self._workers:
                self._ready.notify_all()
        # Children are started here, in the caller's thread, and not by the new worker thread: the training thread
        # sits between two steps, so no lock of the frameworks is held while the process is forked.
        started = 0
        try:
            for _ in range(missing):
                self._start()
                started += 1
        finally:
            if started < missing:
                with self._lock:
                    self._alive -= missing - started
                    self._workers = max(self._fewest, min(self._workers, self._alive))

    def _start(self) -> None:
        child = self._pool.get() if self._pool is not None else None
        with self._lock:
            self._starting += child is not None
        thread = threading.Thread(target=self._work, args=(child,), daemon=True, name=f"intune-{self.name}")
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._starting -= child is not None
            if child is not None and self._pool is not None:
                self._pool.put(child)
            raise
        with self._lock:
            # Another thread may be resizing, too.
            self._threads = [*(known for known in self._threads if known.is_alive()), thread]

    @property
    def delivered(self) -> int:
        """Results handed to the consumer."""
        return self._delivered

    @property
    def is_waited_for(self) -> bool:
        """True if the consumer would have to wait now."""
        with self._lock:
            is_over = self._closed or (self._exhausted and self._delivered == self._pulled)
            return not is_over and self._first() not in self._results

    def stats(self) -> StageStats:
        """Return the counters and the current fill of the window."""
        # Outside the lock: it may take milliseconds.
        worker_bytes = self._pool.worker_bytes() if self._pool is not None else 0.0
        with self._lock:
            return self.counters.reading(len(self._results), self._window, worker_bytes)

    # -- a worker ------------------------------------------------------------------------------------------------

    def _work(self, child: Child | None) -> None:
        wall, cpu, pool = self._clock.wall, self._clock.cpu, self._pool
        try:
            claim = self._first_claim(child)
            while claim is not None:
                task = claim if self._feeding else self._pull()
                if task is None:
                    return
                number, item, snapshot = task
                begin_s, begin_cpu_s = wall(), cpu()
                value: Any
                cpu_s, size_bytes = -1.0, None
                try:
                    if child is not None and pool is not None:
                        value, cpu_s, size_bytes = pool.call(child, item, lambda: self._closed)
                    else:
                        value = self._fn(item)  # type: ignore[misc]
                    if self._finish is not None:
                        value = self._finish(value)
                except StopIteration as error:
                    # Raised as it is, it would end the consumer's loop and lose the rest without a word.
                    value = _Raised(RuntimeError(f"{self.name} raised StopIteration on an item"))
                    value.error.__cause__ = error
                except BaseException as error:
                    value = _Raised(error)
                busy_s = wall() - begin_s
                if cpu_s < 0.0:
                    cpu_s = cpu() - begin_cpu_s
                dead = child is not None and not child.usable
                with self._lock:
                    if not self._results:
                        self._ahead_since_s = wall()
                    self._results[number] = (value, snapshot)
                    if not self._ordered or number == self._delivered:
                        self._ready.notify()
                    with suppress(Exception):  # what cannot be counted has been computed all the same
                        self.counters.computed(busy_s, cpu_s, value, size_bytes)
                    if dead:
                        self._alive -= 1
                        return
                    claim = self._claim()
                del item, value, snapshot, task
        finally:
            if child is not None and pool is not None:
                pool.put(child, surplus=not (self._closed or self._exhausted))

    def _first_claim(self, child: Child | None) -> _Task | None:
        """Claim once the process can compute: an item claimed before holds up all that follow it."""
        while child is not None and not child.ready.wait(READY_S):
            with self._lock:
                if self._is_over() or self._alive > self._workers:
                    self._starting -= 1
                    self._alive -= 1
                    return None
        with self._lock:
            self._starting -= child is not None
            return self._claim()

    def _is_over(self) -> bool:
        return self._closed or (self._exhausted and not self._inbox)

    def _claim(self) -> _Task | None:
        """Wait for room in the window (lock held); None tells the worker to leave."""
        while True:
            # Where there are fewer to be, those that cannot compute yet leave first.
            if self._is_over() or self._alive - self._starting > self._workers:
                self._alive -= 1
                # This worker may have been woken for room it does not use: pass the call on.
                self._space.notify()
                return None
            if self._inbox:
                return self._inbox.popleft()
            if not self._feeding and self._claimed - self._delivered < self._window:
                self._claimed += 1
                return _CLAIMED
            begin_s = self._clock.wall()
            self._space.wait(WAIT_S)
            self.counters.blocked_s += self._clock.wall() - begin_s

    def _pull(self) -> _Task | None:
        """Take the next item and its number; None when the source has ended."""
        begin_s = self._clock.wall()
        error: BaseException | None = None
        with self._source_lock:
            if not (self._exhausted or self._closed):
                try:
                    item = next(self._source)
                    snapshot = self._snapshot() if self._snapshot is not None else None
                    number, self._pulled = self._pulled, self._pulled + 1
                    self.counters.starved_s += self._clock.wall() - begin_s
                    return number, item, snapshot
                except StopIteration:
                    pass
                except BaseException as raised:
                    error = raised
            with self._lock:
                if error is not None:
                    self._break(error)
                self._exhausted = True
                self._alive -= 1
                self._ready.notify_all()
                self._space.notify_all()
        return None

    # -- the consumer --------------------------------------------------------------------------------------------

    def __iter__(self) -> ElasticMap[Y]:
        return self

    def __next__(self) -> Y:
        with self._lock:
            if self._feeding:
                self._feed(asked=True)
            number, entry, task = self._awaited()
            self._delivered += 1
            if self._tell is not None:
                self._tell(number)
            if self._feeding:
                self._feed()
            else:
                self._space.notify()
        if task is not None:
            return self._compute(task)
        value, self.state = entry
        if type(value) is _Raised:
            if self._alive < self._workers:
                # What ended a worker is what the user must hear of, not that nobody could take its place.
                with suppress(Exception):
                    self.resize(self._workers)
            raise value.error
        return value  # type: ignore[no-any-return]

    def _awaited(self) -> tuple[int, Any, _Task | None]:
        """Wait for the next result (lock held); return its number and it, or what the consumer is to compute itself."""
        begin_s: float | None = None
        deadline_s = time.monotonic() + self._timeout_s if self._timeout_s else None
        while True:
            number = self._first()
            entry = self._results.pop(number, None)
            if entry is not None:
                if self._ordered and begin_s is not None and self._results:
                    # It has waited for this one while others, that come later, were there.
                    self.counters.held_s += max(0.0, self._clock.wall() - max(begin_s, self._ahead_since_s))
                return number, entry, None
            task = self._own_task()
            if task is not None:
                return task[0], None, task
            if self._closed or (self._exhausted and self._delivered == self._pulled):
                raise StopIteration
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise RuntimeError(f"stage {self.name!r} timed out after {self._timeout_s} s")
            if begin_s is None:
                begin_s = self._clock.wall()
            wait_s = WAIT_S if deadline_s is None else min(WAIT_S, max(0.001, deadline_s - time.monotonic()))
            self._ready.wait(wait_s)

    def _first(self) -> int:
        """Return the number of the result to deliver next, if it is there (lock held)."""
        end = self._end()
        return self._delivered if self._ordered else next((n for n in self._results if n < end), -1)

    def _end(self) -> float:
        """Return before which number all others are to be delivered (lock held)."""
        return self._delivered + 1 if self._ordered else self._hold.end(self._delivered)

    def _break(self, error: BaseException) -> None:
        """End with the error of the source, behind all that was pulled (lock held)."""
        self._results[self._pulled], self._hold = (_Raised(error), None), Hold(self._pulled)
        self._pulled += 1
        self._exhausted = True

    def _own_task(self) -> _Task | None:
        """Return what the consumer computes itself now (lock held): with no workers, the next item, if nobody has it.

        Order matters: results first, then what was fed while there were workers, then the source. An item in the hands
        of a worker that is leaving is waited for.
        """
        if self._workers or not self._inbox or self._inbox[0][0] >= self._end():
            return None
        return self._inbox.popleft()

    def _compute(self, task: _Task) -> Y:
        assert self._inline is not None
        begin_s, begin_cpu_s = self._clock.wall(), self._clock.cpu()
        value = self._inline(task[1])
        if self._finish is not None:
            value = self._finish(value)
        end_s, cpu_s = self._clock.wall(), self._clock.cpu() - begin_cpu_s
        with self._lock:
            self.counters.computed(end_s - begin_s, cpu_s, value)
            if self._idle_s is not None:
                self.counters.blocked_s += begin_s - self._idle_s
            self._idle_s = end_s
        return value

    def prime(self, asked: bool = False, before: int = 0) -> None:
        """Start pulling now instead of at the first `next` (only with `feed`).

        Args:
            asked: as `next` does, which will be called at once; it may look for the end of the source.
            before: results that somebody else has yet to deliver before ours.
        """
        with self._lock:
            if self._feeding:
                self._feed(asked, before)

    def _feed(self, asked: bool = False, before: int = 0) -> None:
        """Pull the source up to the window, in the consumer's thread (lock held); nothing ahead with no workers."""
        fed, room = 0, self._window if self._workers else int(asked)
        while not (self._exhausted or self._closed) and self._pulled - self._delivered < room:
            if not self._hold.may_pull(self._pulled, self._pulled - self._delivered + before, asked):
                break
            try:
                item = next(self._source)
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                self._break(error)
            else:
                self._inbox.append((self._pulled, item, None))
                self._pulled += 1
                fed += 1
        if self._exhausted:
            self._space.notify_all()
        elif fed:
            self._space.notify(fed)

    # -- the end -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Tell everybody to stop without waiting for them: a consumer inside `next` gets StopIteration."""
        with self._lock:
            self._closed = True
            self._results.clear()
            self._inbox.clear()
            self._space.notify_all()
            self._ready.notify_all()

    def close(self) -> bool:
        """Stop and wait, at most ten seconds in all, until no worker touches the source any more.

        Returns:
            True if all worker threads have ended.
        """
        self.abort()
        if self._join_until_s is None:
            self._join_until_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, self._join_until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
