"""The resizable stage: an ordered parallel map whose workers and window are two live numbers.

A worker pulls its own input under a lock, which numbers it, computes, and stores the result under its number; the
consumer takes the numbers in order. No reader or sorter thread, no multiprocessing queue: a resize is two integer
writes and a notify. With no workers at all the consumer computes the next item itself, and nothing ahead.

    claim room in the window -> pull (numbered) -> compute -> store under the number -> consumer takes in order
          blocked_s                starved_s        busy_s         queued
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.workers.line import WAIT_S, Hold, Line, Raised, Task
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.pipelines.workers.threads import WorkerThreads
from intune_callbacks.types import Clock, StageStats

__all__ = ["ElasticMap"]

Y = TypeVar("Y")


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
        inline: with `feed`, what the consumer does itself, with 0 workers or where one failed; None keeps one worker.
        refused: told the error of a worker whose item the consumer then made itself; there are 0 workers from then on.
        finish: applied to each result in the parent's worker thread (pinning memory).
        may_stop: a StopIteration of `fn` ends the consumer's loop, as it does in a DataLoader; else it is an error.
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
        refused: Callable[[BaseException], None] = lambda error: None,
        finish: Callable[[Y], Y] | None = None,
        may_stop: bool = False,
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
        self._source, self.pool, self._finish, self._timeout_s = source, pool, finish, timeout_s
        self._feeding, self._inline = feed, inline if feed else None
        self._fewest = 1 if self._inline is None else 0
        self._clock, self._tell, self._refused = clock or Clock(), delivered, refused
        self._idle_s: float | None = None
        self._line = Line(window, ordered, hold or Hold())
        self._threads = WorkerThreads(
            self._line,
            None if feed else source,
            fn,
            pool=pool,
            snapshot=snapshot,
            finish=finish,
            may_stop=may_stop,
            counters=self.counters,
            clock=self._clock,
            name=name,
        )
        try:
            self.resize(workers)
        except BaseException:
            self.close()
            raise

    # -- the two live numbers ------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Items computed at once."""
        return self._threads.wanted

    @property
    def window(self) -> int:
        """Results that may be finished or in progress ahead of the next one to be delivered."""
        return self._line.window

    def is_growing(self, wanted: int) -> bool:
        """Return whether there is something left to compute for workers that cannot compute yet.

        Args:
            wanted: workers that were asked for.
        """
        return not self._line.exhausted and (self.workers < wanted or self._threads.starting > 0)

    def resize(self, workers: int | None = None, window: int | None = None) -> None:
        """Change one or both numbers at once; callable at any moment, from any thread.

        Args:
            workers: items computed at once, at least 1, or 0 with `inline`; surplus workers leave after their current
                item.
            window: the reorder window, at least 1; a smaller one takes effect as results are delivered.

        Raises:
            Exception: a worker could not be started; `workers` then says how many there are.
        """
        with self._line.lock:
            if window is not None:
                self._line.window = max(1, int(window))
            if workers is not None:
                workers, self._idle_s = max(self._fewest, int(workers)), None
            missing = self._threads.want(workers)
        self._threads.start(missing, self._fewest)

    @property
    def delivered(self) -> int:
        """Results handed to the consumer."""
        return self._line.delivered

    @property
    def is_waited_for(self) -> bool:
        """True if the consumer would have to wait now."""
        with self._line.lock:
            return not self._line.is_drained() and self._line.first() not in self._line.results

    def stats(self) -> StageStats:
        """Return the counters and the current fill of the window."""
        # Outside the lock: it may take milliseconds.
        worker_bytes = self.pool.worker_bytes() if self.pool is not None else 0.0
        with self._line.lock:
            return self.counters.reading(len(self._line.results), self._line.window, worker_bytes)

    # -- the consumer --------------------------------------------------------------------------------------------

    def __iter__(self) -> ElasticMap[Y]:
        return self

    def __next__(self) -> Y:
        line = self._line
        with line.lock:
            if self._feeding:
                self._feed(asked=True)
            number, entry, task = self._awaited()
            line.delivered += 1
            if self._tell is not None:
                self._tell(number)
            if self._feeding:
                self._feed()
                line.meet()
            else:
                line.space.notify()
        if task is not None:
            return self._compute(task)
        value, self.state = entry
        if type(value) is Raised:
            if self._inline is not None and value.may_be_tried:
                return self._made_here((number, value.item, None), value.error)
            if self._threads.alive < self.workers:
                with suppress(Exception):  # what ended a worker is to be heard of, not that nobody could take its place
                    self.resize(self.workers)
            try:
                raise value.error
            finally:
                del value, entry  # its traceback has this frame: workers would live on till the collector comes
        return value  # type: ignore[no-any-return]

    def _awaited(self) -> tuple[int, Any, Task | None]:
        """Wait for the next result (lock held); return its number and it, or what the consumer is to compute itself."""
        line = self._line
        begin_s: float | None = None
        deadline_s = time.monotonic() + self._timeout_s if self._timeout_s else None
        while True:
            number = line.first()
            entry = line.results.pop(number, None)
            if entry is not None:
                if line.ordered and begin_s is not None and line.results:
                    # It has waited for this one while others, that come later, were there.
                    self.counters.held_s += max(0.0, self._clock.wall() - max(begin_s, line.ahead_since_s))
                return number, entry, None
            task = self._own_task()
            if task is not None:
                return task[0], None, task
            if line.is_drained():
                line.meet()
                raise StopIteration
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")  # torch's words
            begin_s = self._clock.wall() if begin_s is None else begin_s
            wait_s = WAIT_S if deadline_s is None else min(WAIT_S, max(0.001, deadline_s - time.monotonic()))
            line.ready.wait(wait_s)

    def _own_task(self) -> Task | None:
        """Return what the consumer computes itself now (lock held): with no workers, the next item, if nobody has it.

        Order matters: results first, then what was fed while there were workers, then the source. An item in the hands
        of a worker that is leaving is waited for.
        """
        line = self._line
        if self.workers or not line.inbox or line.inbox[0][0] >= line.end():
            return None
        return line.inbox.popleft()

    def _made_here(self, task: Task, error: BaseException) -> Y:
        """Return what a worker could not make, as the consumer could all along; what that raises is the user's own."""
        made = self._compute(task)
        self._refused(error)  # first, so that whoever asks for others meanwhile asks for none
        self.resize(0)
        return made

    def _compute(self, task: Task) -> Y:
        assert self._inline is not None
        begin_s, begin_cpu_s = self._clock.wall(), self._clock.cpu()
        value = self._inline(task[1])
        if self._finish is not None:
            value = self._finish(value)
        end_s, cpu_s = self._clock.wall(), self._clock.cpu() - begin_cpu_s
        with self._line.lock:
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
        with self._line.lock:
            if self._feeding:
                self._feed(asked, before)

    def _feed(self, asked: bool = False, before: int = 0) -> None:
        """Pull the source up to the window, in the consumer's thread (lock held); nothing ahead with no workers."""
        line = self._line
        fed, room = 0, line.window if self.workers else int(asked)
        while not (line.exhausted or line.closed) and line.pulled - line.delivered < room:
            if not line.hold.may_pull(line.pulled, line.pulled - line.delivered + before, asked):
                break
            try:
                item = next(self._source)
            except StopIteration:
                line.exhausted = True
            except Exception as error:
                line.fail(error)
            else:
                line.inbox.append((line.pulled, item, None))
                line.pulled += 1
                fed += 1
        if line.exhausted:
            line.space.notify_all()
        elif fed:
            line.space.notify(fed)

    # -- the end -------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Tell everybody to stop without waiting for them: a consumer inside `next` gets StopIteration."""
        self._line.abort()

    def close(self) -> bool:
        """Stop, wait ten seconds at most until no worker touches the source, and return whether all threads ended."""
        self.abort()
        return self._threads.join()
