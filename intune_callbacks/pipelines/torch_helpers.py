"""Processes beside the workers of one running iterator, which make whole batches of the calls by `later` in them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

from intune_callbacks.errors import WorkerDied
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.torch_calls import Evaluate, Task, restore, same, states
from intune_callbacks.pipelines.torch_engine import plain
from intune_callbacks.pipelines.torch_later import Batch, Shared
from intune_callbacks.pipelines.torch_relay import Relay
from intune_callbacks.pipelines.torch_workers import Start, carry_tensor, context_of
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.pipelines.workers import Child, ProcessPool
from intune_callbacks.types import Clock

__all__ = ["Helpers"]

# Every wait is bounded, as in `elastic`.
WAIT_S = 1.0
# A batch that has ended so many helpers ends the epoch, as it would have ended the worker.
MOST_DEATHS = 3

DIFFERS = "made in another process, a batch by `later` differs: {}"
OTHER = "the function reads what `__iter__` changes, or its arguments are changed after the call, or it is random by itself"


class _Job:
    """A batch that a helper makes.

    Args:
        batch: as it came from a worker.
        busy_s: seconds the worker has spent on it.
    """

    def __init__(self, batch: Batch, busy_s: float) -> None:
        self.batch, self.busy_s, self.deaths = batch, busy_s, 0
        self.done = threading.Event()
        self.value: Any = None


class Helpers:
    """What one iterator has beside its workers; with none wanted, its workers do what they always do.

    Args:
        loader: the user's.
        clock: wall and CPU clock.
        counters: where to count.
        startup: where the seconds spent starting helpers are added up.
        finish: applied to each batch of a helper, as pinning is; None for nothing.

    Attributes:
        shared: with the workers.
        refused: why there can be none, empty where there can.
        why_not: why some that were wanted are missing.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        clock: Clock,
        counters: Counters,
        startup: Startup,
        finish: Callable[[Any], Any] | None,
    ) -> None:
        self._loader, self._clock, self._counters, self._finish = loader, clock, counters, finish
        self._startup = startup
        context = context_of(loader.multiprocessing_context)
        self.shared = Shared(loader.num_workers, context.Semaphore(0), loader.persistent_workers)
        self._context, self._evaluate = context, Evaluate(loader)
        self._given = plain((loader.dataset, loader.collate_fn))
        self.refused = self.why_not = ""
        self.wanted = self.running = self._granted = self._base_seed = 0
        self._jobs: deque[_Job] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._pool: ProcessPool | None = None
        self._relay: Relay | None = None
        self._sent: dict[Any, float] = {}
        self._arrived: dict[int, float] = {}
        self._closed = False

    def attach(self, iterator: Any) -> None:
        """Receive what the workers of an iterator deliver; it has just been made, and is not kept alive."""
        running = weakref.ref(iterator)
        self._base_seed = iterator._base_seed
        iterator._process_data = partial(self._process_data, running)
        iterator._reset = partial(self._reset, running)
        weakref.finalize(iterator, self.close)

    # -- the number ----------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """True while some are wanted: what the workers do is counted here."""
        return self._relay is not None and self.wanted > 0

    def let_go(self) -> None:
        """Want none for good; what is on its way is still made and delivered."""
        self.refuse("the loader was given back")
        if self._relay is not None:
            self._relay.ended.set()

    def resize(self, wanted: int, iterator: Any) -> None:
        """Have so many; they start one at a time, at `grow`.

        Args:
            wanted: how many.
            iterator: the running one.
        """
        with self._lock:
            self.wanted, self.why_not = 0 if self.refused or self._closed else wanted, ""
            self._settle()
            self._wake.notify_all()
        if self.wanted:
            self.shared.board[Shared.ON] = 1
            if self._relay is None:
                self._relay = iterator._data_queue = Relay(iterator._data_queue, self._seen)
        self.grow()

    def grow(self) -> bool:
        """Start one that is missing, in the caller's thread; return whether one was started."""
        with self._lock:
            if self._closed or self.running >= self.wanted:
                return False
        child: Child | None = None
        try:
            if plain((self._loader.dataset, self._loader.collate_fn)) != self._given:
                raise RuntimeError("the training changed the dataset after its workers had started: no helpers now")
            pool = self._pool = self._pool or self._new_pool()
            child = pool.get()
            threading.Thread(target=self._work, args=(pool, child), daemon=True, name="intune-helper").start()
        except Exception as error:
            if child is not None and self._pool is not None:
                self._pool.put(child)
            self.why_not = f"{type(error).__name__}: {error}"
            with self._lock:
                self.wanted = self.running
            return False
        with self._lock:
            self.running += 1
            self._settle()
        return True

    def _new_pool(self) -> ProcessPool:
        loader = self._loader
        start = Start(loader.dataset, loader.worker_init_fn, self._base_seed, loader.num_workers)
        return ProcessPool(self._evaluate, self._context, start, carry_tensor, self._startup)

    def _settle(self) -> None:
        """Have as many credits out as there are helpers (lock held); one that is in use comes back with its batch."""
        most = min(self.running, self.wanted)
        while self._granted < most:
            self.shared.credits.release()
            self._granted += 1
        while self._granted > most and self.shared.credits.acquire(block=False):
            self._granted -= 1

    def refuse(self, why: str) -> None:
        """Let the workers do all from their next batch on."""
        with self._lock:
            self.refused = self.refused or why
            self.wanted = 0
            self.shared.board[Shared.ON] = 0
            self._settle()
            self._wake.notify_all()

    # -- the results of the workers ------------------------------------------------------------------------------

    def sent(self, number: int) -> None:
        """Note that a worker was asked for a batch."""
        if self._relay is not None:
            self._sent[number] = self._clock.wall()

    def _seen(self, number: Any, data: Any) -> Any:
        """Return what the iterator gets for a result of its workers: a batch that is to be made is given away at once."""
        if type(data) is not Batch:
            return data
        with self._lock:
            now_s = self._clock.wall()
            before_s = self._arrived.get(data.worker, now_s - data.cpu_s)
            begin_s = max(before_s, self._sent.pop(number, before_s))
            self._arrived[data.worker] = now_s
            self._counters.blocked_s += begin_s - before_s
        return self._received(data, max(data.cpu_s, now_s - begin_s))

    def _received(self, batch: Batch, busy_s: float) -> Any:
        if batch.refused:
            self.refuse(batch.refused)
        if self.is_used and (batch.raw is None or batch.proof):
            with self._lock:
                self._counters.computed(busy_s, batch.cpu_s, batch.value)
        if batch.raw is None:
            return batch.value
        job = _Job(batch, busy_s)
        with self._lock:
            self._jobs.append(job)
            self._wake.notify()
        return batch.value if batch.proof else job

    def _process_data(self, running: weakref.ref[Any], data: Any, worker: int) -> Any:
        """In place of the iterator's own method, which has the next indices sent before we wait."""
        iterator: Any = running()
        data = type(iterator)._process_data(iterator, data, worker)
        if type(data) is Batch:  # it came before anybody read ahead
            data = self._received(data, data.cpu_s)
        return self._made(data) if type(data) is _Job else data

    def _made(self, job: _Job) -> Any:
        timeout_s = self._loader.timeout
        until_s = self._clock.wall() + timeout_s if timeout_s else float("inf")
        while not job.done.is_set():
            if not self.grow() and not self.running and self._is_left(job):
                self._run_here(job)
            elif not job.done.wait(min(WAIT_S, max(0.001, until_s - self._clock.wall()))):
                if self._clock.wall() >= until_s:
                    raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds")
        if isinstance(job.value, ExceptionWrapper):
            job.value.reraise()  # type: ignore[no-untyped-call]
        return job.value

    def _reset(self, running: weakref.ref[Any], loader: Any, first_iter: bool = False) -> None:
        """In place of the iterator's own method: workers that live on have to prove themselves in each epoch."""
        iterator: Any = running()
        board = self.shared.board
        board[Shared.PROVED :] = bytes(self.shared.workers)
        board[Shared.EPOCH] = (board[Shared.EPOCH] + 1) % 256
        board[Shared.ON] = int(self.wanted > 0)
        self._sent.clear()
        type(iterator)._reset(iterator, loader, first_iter)

    # -- a helper ------------------------------------------------------------------------------------------------

    def _work(self, pool: ProcessPool, child: Child) -> None:
        try:
            while (job := self._next_job()) is not None and self._run(pool, child, job):
                pass
        finally:
            pool.put(child, surplus=not self._closed)

    def _next_job(self) -> _Job | None:
        with self._lock:
            while not self._jobs or self._closed:
                if self._closed or self.running > self.wanted:
                    self.running -= 1
                    self._settle()
                    return None
                begin_s = self._clock.wall()
                self._wake.wait(WAIT_S)
                self._counters.starved_s += self._clock.wall() - begin_s
            return self._jobs.popleft()

    def _run(self, pool: ProcessPool, child: Child, job: _Job) -> bool:
        """Make a batch; return whether the helper can make more."""
        begin_s, cpu_s = self._clock.wall(), 0.0
        try:
            value, cpu_s, _ = pool.call(child, self._task(job), lambda: self._closed)
            if self._finish is not None and not isinstance(value, ExceptionWrapper):
                value = self._finish(value)
        except WorkerDied:
            job.deaths += 1
            value = ExceptionWrapper(where="in a helper of a DataLoader worker process")
            if job.deaths < MOST_DEATHS:
                value = None
        except BaseException:
            value = ExceptionWrapper(where="in a helper of a DataLoader worker process")
        with self._lock:
            if not child.usable:
                self.running -= 1
                self._settle()
            if value is None and job.deaths and not child.usable:
                self._jobs.appendleft(job)
                self._wake.notify()
                return False
        self._finished(job, value, self._clock.wall() - begin_s, cpu_s)
        return child.usable

    def _task(self, job: _Job) -> Task:
        batch = job.batch
        assert batch.raw is not None
        return batch.worker, self._base_seed + batch.worker, batch.seeds, batch.raw

    def _finished(self, job: _Job, value: Any, busy_s: float, cpu_s: float) -> None:
        if job.batch.proof:
            self._prove(job, value)
        else:
            with self._lock:
                self._counters.computed(job.busy_s + busy_s, job.batch.cpu_s + cpu_s, value)
                if self._granted > min(self.running, self.wanted):
                    self._granted -= 1
                else:
                    self.shared.credits.release()
        job.value = value
        job.done.set()

    def _prove(self, job: _Job, value: Any) -> None:
        board, batch = self.shared.board, job.batch
        if isinstance(value, ExceptionWrapper):
            lines = value.exc_msg.strip().splitlines()
            self.refuse(DIFFERS.format(lines[-1] if lines else value.exc_type.__name__))
        elif not same(value, batch.value):
            self.refuse(DIFFERS.format(OTHER))
        elif batch.epoch == board[Shared.EPOCH]:
            board[Shared.PROVED + batch.worker] = 1

    def _is_left(self, job: _Job) -> bool:
        """Return whether nobody has begun with it; then nobody will."""
        with self._lock:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def _run_here(self, job: _Job) -> None:
        """Make a batch in the training process: no helper is left, and none can be started."""
        info, kept, begin_s = torch_worker._worker_info, states(), self._clock.wall()
        try:
            value = self._evaluate(self._task(job))
        finally:
            torch_worker._worker_info = info
            restore(kept)
        self._finished(job, value, self._clock.wall() - begin_s, 0.0)

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Batches that are here and not delivered."""
        return self._relay.qsize() if self._relay is not None else 0

    def worker_bytes(self) -> float:
        """Return what one helper costs in private memory, in bytes."""
        return self._pool.worker_bytes() if self._pool is not None else 0.0

    def trim(self) -> None:
        """End the helpers that are only kept for later."""
        if self._pool is not None:
            self._pool.trim()

    def close(self) -> None:
        """End all; what a helper is at is lost, so nobody may want a batch of this iterator any more."""
        with self._lock:
            self._closed, self.wanted = True, 0
            self._jobs.clear()
            self._wake.notify_all()
        if self._relay is not None:
            self._relay.ended.set()
        if self._pool is not None:
            self._pool.close()
