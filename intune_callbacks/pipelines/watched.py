"""A stock iterator seen from outside: what `observe` and `advise` measure, and `tune` before it changes anything."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import psutil

from intune_callbacks.pipelines.base import MAX_PROCESSES, LiveLoader, windowed
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.delivered import Delivery
from intune_callbacks.pipelines.timed import INSIDE, TimedIterator, made_ahead
from intune_callbacks.pipelines.worker_cost import WorkerMemory
from intune_callbacks.types import Allocation, Clock, Hint, PipelineStats, Stage, StageStats

__all__ = ["FOLLOWS_WORKERS", "WINDOW_KNOB", "WORKERS_KNOB", "Watch", "WatchedLoader"]

WORKERS_KNOB, WINDOW_KNOB = "DataLoader(num_workers={})", "prefetch_factor={}"
# What a knob has to say of workers that own shards, see `measure.cause`.
FOLLOWS_WORKERS = "order follows the workers"

# A fetch that took longer than this found no batch ready. A choice: one that is ready takes less, a wait mostly more.
BLOCKED_S = 0.0005
# What a round of the workers counts once the next one is over. A choice: some four rounds are followed.
REMEMBERED = 0.75

# In steps shorter than this the thread's CPU clock is read around one fetch in 16: a look at it takes 2 to 6 us in a
# running loop (measured).
QUICK_S, QUICK_UNREAD = 0.002, 15
# So small a share of the time goes into looks at the dataset as epochs begin, which may be short ones.
LOOK_SHARE = 0.01
# What psutil raises: its own errors, and the system's where /proc lacks files or no more files may be open.
UNREAD = (psutil.Error, OSError)

# The workers' CPU time is read at each look at the counters, and a few times early in an epoch: they may end unseen.
FIRST_CPU_S, LAST_CPU_S = 0.05, 1.0


class Watch:
    """Times the fetches of stock iterators of one loader and estimates what their workers do.

    Without workers the time of a batch is that of the fetch. With `n` workers all are busy while the fetch has to
    wait: what they need for a batch is n times the time between two such fetches, over the batches in between. Times
    and batches are added up over some rounds of the workers, for batches come in bursts. With more batches in between
    than can be in flight the workers may have been idle: such a stretch says nothing.

    Args:
        workers: what the user set; 0 computes in the training loop.
        window: batches in flight.
        counters: where to count; new ones by default.

    Attributes:
        ahead: who makes the batches, without workers, before they are asked for; None where the fetch makes them.
        startup_s: seconds the thread that fetches took to start each worker, and waited for what those import that
            are no forks; 0.0 while unknown, or with a single fork.
    """

    def __init__(self, workers: int, window: int, clock: Clock, counters: Counters | None = None) -> None:
        self.counters = counters or Counters()
        self._workers, self._window, self._clock = workers, max(1, window), clock
        self._running: weakref.ref[Any] | None = None
        self._met: weakref.ref[Any] | None = None  # the iterator whose workers' start is known
        self._last_s: float | None = None
        self._service_s: float | None = None
        self._busy_s = self._batches = 0.0
        self._waited_s: float | None = None
        self._since_wait = 0
        self._processes: list[psutil.Process] = []
        self._cpu_s: float | None = None
        self._unread = 0
        self._cpu_due_s, self._cpu_every_s = float("inf"), FIRST_CPU_S
        self._quick, self._cpu_frac, self._thread_cpu_s = 0, 1.0, 0.0
        self._memory = WorkerMemory()
        self.startup_s = 0.0
        self.ahead: Hint | None = None
        self.fetch: Callable[[Callable[[], Any]], Any] = self._fetch_from_workers if workers else self._fetch_here
        """Returns the next batch, which the function it is given takes from the iterator."""

    def begin(self, iterator: Any) -> None:
        """From now on batches come from `iterator`, which has just been made or is already running."""
        self.end()
        self._last_s = self._waited_s = None
        self._quick = 0
        # Weak: whoever drops the iterator ends it.
        self._running = weakref.ref(iterator) if self._workers else None

    def end(self) -> None:
        """The iterator has ended, or somebody else counts from now on."""
        self._count_cpu()
        counters, read = self.counters, self.counters.items - self._unread
        if self._unread and read > 0:
            # The workers ended unseen: their last batches took as much CPU as those before.
            whole_s = counters.cpu_s * counters.items / read
            counters.cpu_s = max(counters.cpu_s, min(whole_s, counters.busy_s))
        self._running, self._processes, self._cpu_s, self._unread = None, [], None, 0

    def _fetch_from_workers(self, take: Callable[[], Any]) -> Any:
        """Return the next batch, which the workers of an iterator compute."""
        wall, counters, last_s = self._clock.wall, self.counters, self._last_s
        begin_s, pulled_s = wall(), counters.pulled_s
        batch = take()
        self._last_s = now_s = wall()
        fed_s = counters.pulled_s - pulled_s  # the batch was there, then the next index was asked for
        self._since_wait += 1
        if now_s - begin_s - fed_s > max(BLOCKED_S, fed_s):  # else it waits for the sampler
            self._waited(now_s)
        service_s = self._service_s or 0.0
        counters.computed(service_s, 0.0, batch)
        if last_s is None:
            self._meet(now_s)
            return batch
        idle_s = max(0.0, self._workers * (now_s - last_s) - service_s)
        starved_s = min(idle_s, self._workers * fed_s)
        counters.starved_s += starved_s
        counters.blocked_s += idle_s - starved_s
        self._unread += 1
        if now_s >= self._cpu_due_s:
            self._count_cpu()
            self._cpu_every_s *= 2.0
            self._cpu_due_s = now_s + self._cpu_every_s if self._cpu_every_s <= LAST_CPU_S else float("inf")
        return batch

    def _fetch_here(self, take: Callable[[], Any]) -> Any:
        """Return the next batch, which this thread computes."""
        wall, cpu, counters, last_s = self._clock.wall, self._clock.cpu, self.counters, self._last_s
        if not self._quick:
            self._thread_cpu_s = cpu()
        begin_s, pulled_s = wall(), counters.pulled_s
        batch = take()
        self._last_s = now_s = wall()
        fed_s = counters.pulled_s - pulled_s  # no worker would do that
        busy_s = now_s - begin_s - fed_s
        counters.starved_s += fed_s
        if self.ahead is not None and last_s is not None and busy_s > BLOCKED_S:
            begin_s, busy_s = last_s, now_s - last_s  # as it had to be waited for, it was made since the last one
        if self._quick and busy_s <= QUICK_S:
            cpu_s = self._cpu_frac * busy_s
        else:
            # Where the clock was not read before, what the steps since then took is in it: little, they were short.
            cpu_s = max(0.0, min(busy_s, cpu() - self._thread_cpu_s))
            self._cpu_frac = cpu_s / busy_s if busy_s > 0.0 else 1.0
        counters.computed(busy_s, cpu_s, batch)
        self._thread_cpu_s += cpu_s
        if last_s is None:
            self.ahead = made_ahead(getattr(take, "__self__", None))  # a generator has begun only now
            return batch
        counters.blocked_s += begin_s - last_s
        self._quick = self._quick - 1 if self._quick else QUICK_UNREAD
        if now_s - last_s > QUICK_S:
            self._quick = 0
        return batch

    def _meet(self, now_s: float) -> None:
        """Look at the workers for the first time: what they did before the first batch is their start."""
        iterator = self._running() if self._running is not None else None
        lives_on = iterator is not None and self._met is not None and self._met() is iterator
        self._met = self._running
        for worker in getattr(iterator, "_workers", ()):
            with suppress(*UNREAD):
                self._processes.append(psutil.Process(worker.pid))
        self._cpu_s, self._unread = self._read(), 0
        if not lives_on:
            self._learn_start(iterator)
        self._cpu_every_s = FIRST_CPU_S
        self._cpu_due_s = now_s + FIRST_CPU_S

    def _learn_start(self, iterator: Any) -> None:
        with suppress(*UNREAD):
            # They are started one after the other.
            begun_s = [process.create_time() for process in self._processes]
            self.startup_s = (max(begun_s) - min(begun_s)) / (len(begun_s) - 1) if len(begun_s) > 1 else 0.0
        many = len(self._processes)
        if self._cpu_s is not None and _import_anew(iterator):
            # What they compute before the first batch is mostly that, on as many CPUs as there are.
            cpus = min(many, psutil.cpu_count() or 1)
            self.startup_s = max(self.startup_s, self._cpu_s / many / cpus)

    def _waited(self, now_s: float) -> None:
        if self._waited_s is not None and self._since_wait <= self._window:
            keep = REMEMBERED ** (self._since_wait / self._workers)
            self._busy_s = keep * self._busy_s + self._workers * (now_s - self._waited_s)
            self._batches = keep * self._batches + self._since_wait
            self._service_s = self._busy_s / self._batches
        self._waited_s, self._since_wait = now_s, 0

    def reading(self, capacity: int) -> StageStats:
        """Return the counters now."""
        self._count_cpu()
        counters = self.counters
        if self._workers and self._service_s is None:
            # It never had to wait, so nothing is known but that a batch takes at least its CPU time.
            counters.busy_s = max(counters.busy_s, counters.cpu_s)
        pids = [process.pid for process in self._processes]
        return counters.reading(self._queued(), capacity, self._memory.read(pids))

    def _queued(self) -> int:
        iterator = self._running() if self._running is not None else None
        if iterator is None:
            return 0
        try:
            early = sum(len(task) == 2 for task in iterator._task_info.values())
            return early + max(0, int(iterator._data_queue.qsize()))
        except (AttributeError, NotImplementedError, OSError, ValueError):  # no semaphores to read, or closed
            return 0

    def _count_cpu(self) -> None:
        now_s = self._read()
        if now_s is not None and self._cpu_s is not None:
            self.counters.cpu_s += max(0.0, now_s - self._cpu_s)
            self._cpu_s, self._unread = now_s, 0

    def _read(self) -> float | None:
        spent_s = 0.0
        for process in self._processes:
            try:
                times = process.cpu_times()
            except UNREAD:
                return None
            spent_s += times.user + times.system
        return spent_s if self._processes else None


def _import_anew(iterator: Any) -> bool:
    """Return whether the workers are no forks: each of them imports all that the training process has imported."""
    methods = [getattr(worker, "_start_method", None) for worker in getattr(iterator, "_workers", ())]
    return bool(methods) and (methods[0] or multiprocessing.get_start_method(allow_none=True) or "fork") != "fork"


class WatchedLoader(LiveLoader):
    """One stage, `load`, with the user's numbers, seen from outside.

    Args:
        workers: what the user set; 0 computes in the training loop.
        window: batches in flight.
        remark: what to know before the number of workers is changed by hand.
        when: ``epoch`` if the numbers could be tuned, ``user`` if they are the user's to change.
        anew: whether its workers are started anew each epoch.
        given: returns what the workers of an epoch get, as `plain_values` does.
        knobs: how the user writes workers and window.
    """

    def __init__(
        self,
        workers: int,
        window: int,
        *,
        clock: Clock,
        remark: str = "",
        when: Literal["epoch", "user"] = "epoch",
        dataset: object = None,
        anew: bool = False,
        given: Callable[[], Any] = lambda: None,
        knobs: tuple[str, str] = (WORKERS_KNOB, WINDOW_KNOB),
    ) -> None:
        self.clock, self._workers, self._window = clock, workers, max(1, window)
        self._knob = f"{knobs[0]}  # {remark}" if remark else knobs[0]
        self._window_knob = knobs[1]
        self._when, self._anew, self._given = when, anew, given
        self.watch = Watch(workers, self._window, clock)
        self.delivery = Delivery(workers, dataset, clock)
        self.delivered, self._due_s = 0, float("-inf")

    def adopt(self, iterator: Any) -> Any:
        """Return the iterator behind a stopwatch."""
        if not isinstance(iterator, TimedIterator):
            self.watch.begin(iterator)
            begin_s = self.clock.wall()
            if begin_s >= self._due_s:
                self.delivery.epochs.begins_with(self._given())
                self._due_s = begin_s + (self.clock.wall() - begin_s) / LOOK_SHARE
            iterator = TimedIterator(iterator, self)
        return iterator

    @property
    def late_hints(self) -> tuple[Hint, ...]:
        """What its workers have shown of the shards; who makes the batches, if not the fetch."""
        ahead = self.watch.ahead
        return self.delivery.hints if ahead is None else (*self.delivery.hints, ahead)

    def stages(self) -> tuple[Stage, ...]:
        high = self._workers if self.watch.ahead is INSIDE else max(MAX_PROCESSES, self._workers)
        load = Stage(
            *("load", "cpu", "workers", min(1, self._workers), high, self._workers),
            when=self._when,
            knob=self._knob,
            startup_s=self.watch.startup_s if self._anew else 0.0,
            once_s=0.0 if self._anew else self.watch.startup_s,
            delivering=self.delivery.delivering,
        )
        return windowed(load, self._window, knob=self._window_knob if self._workers else "")

    def stats(self) -> PipelineStats:
        return PipelineStats(self.clock.wall(), self.delivered, {"load": self.watch.reading(self._window)})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        return {stage.name: stage.current for stage in self.stages()}
