"""Helpers at work: processes that make whole batches, and as many credits for the workers to give batches away."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import DataLoader

from intune_callbacks.errors import WorkerDied
from intune_callbacks.pipelines.base import begin, spared
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.given import check_same
from intune_callbacks.pipelines.length import restore, states
from intune_callbacks.pipelines.look import plain_values
from intune_callbacks.pipelines.torch.calls import Batch, Evaluate, Task
from intune_callbacks.pipelines.torch.carry import Carry
from intune_callbacks.pipelines.torch.engine import pinning
from intune_callbacks.pipelines.torch.reach import dataset_of
from intune_callbacks.pipelines.torch.workers import Start, context_of
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.pipelines.workers.surroundings import Surroundings
from intune_callbacks.pipelines.workers.worker import Child
from intune_callbacks.types import Clock

__all__ = ["Job", "Jobs"]

# Every wait is bounded, as in `elastic`.
WAIT_S = 1.0
# A batch that has ended so many helpers ends the epoch, as it would have ended a worker. A choice.
MOST_DEATHS = 3
WHERE = "in a helper of a DataLoader worker process"


class Job:
    """A batch that a helper makes.

    Args:
        batch: as it came from a worker.
        busy_s: seconds the worker has spent on it.

    Attributes:
        done: whether it is made.
        value: the batch then, an error as torch's workers hand it on.
    """

    def __init__(self, batch: Batch, busy_s: float) -> None:
        self.batch, self.busy_s, self.deaths = batch, busy_s, 0
        self.done = threading.Event()
        self.value: Any = None


class Jobs:
    """The helpers of one iterator, and what they are to do.

    Args:
        startup: where the seconds spent starting helpers are added up.
        proved: called with each job that was only a proof, in a helper's thread.

    Attributes:
        credits: a semaphore: how many batches the workers may give away now.
        wanted: helpers.
        running: helpers.
        base_seed: of the iterator.
        why_not: why some that were wanted are missing.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        clock: Clock,
        counters: Counters,
        startup: Startup,
        proved: Callable[[Job], None],
    ) -> None:
        self._clock, self._counters, self._startup, self._proved = clock, counters, startup, proved
        # Not the loader: it may hold the iterator, which holds this.
        self._dataset, self._collate, self._init = dataset_of(loader), loader.collate_fn, loader.worker_init_fn
        self._workers, self._timeout_s = loader.num_workers, loader.timeout
        self._context = context_of(loader.multiprocessing_context)
        self.credits = self._context.Semaphore(0)
        self._evaluate, self._finish = Evaluate(loader), pinning(loader)
        self._given = plain_values((self._dataset, self._collate))
        self._surroundings = Surroundings.now()
        self.why_not = ""
        self.wanted = self.running = self.base_seed = self._granted = 0
        self._queue: deque[Job] = deque()
        # Reentrant: the garbage collector may run `close` in a thread that holds it.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self.pool: ProcessPool | None = None
        self._closed = False

    # -- the number ----------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """Have so many; those that are missing start at `grow`."""
        with self._lock:
            self.wanted, self.why_not = 0 if self._closed else wanted, ""
            self._settle()
            self._wake.notify_all()

    def grow(self) -> bool:
        """Start one that is missing, in the caller's thread; return whether one was started."""
        with self._lock:
            if self._closed or self.running >= self.wanted:
                return False
        child: Child | None = None
        try:
            check_same(self._given, plain_values((self._dataset, self._collate)))
            pool = self.pool = self.pool or self._new_pool()
            child = pool.get()
            begin(threading.Thread(target=self._work, args=(pool, child), daemon=True, name="intune-helper"))
        except Exception as error:
            if child is not None and self.pool is not None:
                self.pool.put(child)
            self.why_not = f"{type(error).__name__}: {error}"
            with self._lock:
                self.wanted = spared(error, self.running, 0)
                if self.wanted < self.running and self.pool is not None:
                    self.pool.is_short = True
                self._settle()
                self._wake.notify_all()
            return False
        with self._lock:
            self.running += 1
            self._settle()
        return True

    def _new_pool(self) -> ProcessPool:
        start = Start(self._dataset, self._init, self.base_seed, self._workers)
        return ProcessPool(self._evaluate, self._context, start, Carry, self._startup, self._surroundings)

    def _settle(self) -> None:
        """Have as many credits out as there are helpers (lock held); one that is in use comes back with its batch."""
        most = min(self.running, self.wanted)
        while self._granted < most:
            self.credits.release()
            self._granted += 1
        while self._granted > most and self.credits.acquire(block=False):
            self._granted -= 1

    # -- the work ------------------------------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """Have a batch made."""
        with self._lock:
            self._queue.append(job)
            self._wake.notify()

    def result(self, job: Job) -> Any:
        """Return a batch when it is made.

        Raises:
            RuntimeError: it took longer than the loader's `timeout`.
            Exception: what the user's function raised.
        """
        timeout_s = self._timeout_s
        until_s = self._clock.wall() + timeout_s if timeout_s else float("inf")
        while not job.done.is_set():
            if not self.grow() and not self.running and self._taken_back(job):
                self._make_here(job)
                continue
            left_s = until_s - self._clock.wall()
            if not job.done.wait(min(WAIT_S, max(0.001, left_s))) and left_s <= 0.0:
                raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds")
        if isinstance(job.value, ExceptionWrapper):
            job.value.reraise()  # type: ignore[no-untyped-call]
        return job.value

    def _taken_back(self, job: Job) -> bool:
        """Return whether nobody had begun with it; now nobody will."""
        with self._lock:
            if job not in self._queue:
                return False
            self._queue.remove(job)
            return True

    def _make_here(self, job: Job) -> None:
        """Make a batch in the training process: no helper is left, and none can be started."""
        info, kept, begin_s = torch_worker._worker_info, states(), self._clock.wall()
        try:
            value = self._evaluate(self._task(job))
        finally:
            torch_worker._worker_info = info
            restore(kept)
        self._finished(job, value, self._clock.wall() - begin_s, 0.0)

    def _work(self, pool: ProcessPool, child: Child) -> None:
        try:
            while (job := self._next()) is not None:
                if not self._make(pool, child, job):
                    return
        finally:
            with self._lock:
                self.running -= 1
                self._settle()
            pool.put(child, surplus=not self._closed)

    def _next(self) -> Job | None:
        with self._lock:
            while not self._closed:
                if self._queue:
                    return self._queue.popleft()
                if self.running > self.wanted:
                    break
                begin_s = self._clock.wall()
                self._wake.wait(WAIT_S)
                self._counters.starved_s += self._clock.wall() - begin_s
            return None

    def _make(self, pool: ProcessPool, child: Child, job: Job) -> bool:
        """Make a batch in a helper; return whether that can make more."""
        begin_s, cpu_s = self._clock.wall(), 0.0
        try:
            value, cpu_s, _ = pool.call(child, self._task(job), lambda: self._closed)
            if self._finish is not None and not isinstance(value, ExceptionWrapper):
                value = self._finish(value)
        except WorkerDied:
            job.deaths += 1
            if job.deaths < MOST_DEATHS:
                with self._lock:
                    self._queue.appendleft(job)
                    self._wake.notify()
                return False
            value = ExceptionWrapper(where=WHERE)  # type: ignore[no-untyped-call]
        except BaseException:
            value = ExceptionWrapper(where=WHERE)  # type: ignore[no-untyped-call]
        self._finished(job, value, self._clock.wall() - begin_s, cpu_s)
        return child.usable

    def _task(self, job: Job) -> Task:
        batch = job.batch
        assert batch.raw is not None
        return batch.worker, self.base_seed + batch.worker, batch.seeds, batch.raw

    def _finished(self, job: Job, value: Any, busy_s: float, cpu_s: float) -> None:
        job.value = value
        if job.batch.proof:
            self._proved(job)
        else:
            with self._lock:
                self._counters.computed(job.busy_s + busy_s, job.batch.cpu_s + cpu_s, value)
                if self._granted > min(self.running, self.wanted):
                    self._granted -= 1
                else:
                    self.credits.release()
        job.done.set()

    def close(self) -> None:
        """End all; what a helper is at is lost, so nobody may want a batch of this iterator any more."""
        with self._lock:
            self._closed, self.wanted = True, 0
            self._queue.clear()
            self._wake.notify_all()
        if self.pool is not None:
            self.pool.close()
