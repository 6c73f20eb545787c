"""What one running iterator has beside its workers, and what it gets from either."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import DataLoader

from intune_callbacks.pipelines.base import begin
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.torch.calls import Batch, Shared, same
from intune_callbacks.pipelines.torch.jobs import Job, Jobs
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.pipelines.workers.line import Raised
from intune_callbacks.types import Clock

__all__ = ["Helpers"]

# How often the reader looks whether the iterator has ended: so long its thread may outlive that one. A choice.
POLL_S = 0.1

DIFFERS = "made in another process, a batch by `later` differs: {}"
OTHER = (
    "the function reads what `__iter__` changes, its arguments are changed after the call, or it is random by itself"
)


class Helpers:
    """The helpers of one iterator; with none wanted, its workers do what they always do.

    Args:
        loader, clock, counters, startup: as for `Jobs`.
        is_known: helpers have made batches of this loader before.

    Attributes:
        shared: with the workers.
        refused: why there can be none, empty where there can.
        is_proved: helpers have made batches.
    """

    def __init__(
        self, loader: DataLoader[Any], clock: Clock, counters: Counters, startup: Startup, is_known: bool
    ) -> None:
        self._clock, self._counters = clock, counters
        self.jobs = Jobs(loader, clock, counters, startup, self._prove)
        self.shared = Shared(loader.num_workers, self.jobs.credits, loader.persistent_workers, is_known)
        self.refused = ""
        self.is_proved = self._is_let_go = False
        self._relay: Relay | None = None
        # When each worker was asked for a batch, and when its last one came.
        self._sent: dict[Any, float] = {}
        self._arrived: dict[int, float] = {}

    def attach(self, iterator: Any) -> None:
        """Receive what the workers of an iterator deliver; it has just been made, and is not kept alive."""
        running = weakref.ref(iterator)
        self.jobs.base_seed = iterator._base_seed
        iterator._process_data = partial(self._process_data, running)
        iterator._reset = partial(self._reset, running)
        weakref.finalize(iterator, self.close)

    # -- the number ----------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """True while some are wanted: what the workers do is counted here."""
        return self._relay is not None and self.jobs.wanted > 0

    def resize(self, wanted: int, iterator: Any) -> None:
        """Have so many; one starts now, the others at `grow`."""
        self.jobs.resize(0 if self.refused or self._is_let_go else wanted)
        if self.jobs.wanted:
            self.shared.board[Shared.ON] = 1
            if self._relay is None:
                self._relay = iterator._data_queue = Relay(iterator._data_queue, self._seen)
            self.jobs.grow()

    def refuse(self, why: str) -> None:
        """Let the workers do all from their next batch on; what is on its way is still made."""
        self.refused = self.refused or why
        self.shared.board[Shared.ON] = 0
        self.jobs.resize(0)

    def let_go(self) -> None:
        """Want none for good, and read nothing ahead."""
        self.shared.board[Shared.ON] = 0
        self.jobs.resize(0)
        self._is_let_go = True
        if self._relay is not None:
            self._relay.ended.set()

    # -- the results of the workers ------------------------------------------------------------------------------

    def sent(self, number: int) -> None:
        """Note that a worker was asked for a batch."""
        if self._relay is not None:
            self._sent[number] = self._clock.wall()

    def _seen(self, number: Any, data: Any) -> Any:
        """Return what the iterator gets for a result of its workers: what is to be made is given away at once."""
        if type(data) is not Batch:
            return data
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
            self._counters.computed(busy_s, batch.cpu_s, batch.value)
        if batch.raw is None:
            return batch.value
        job = Job(batch, busy_s)
        self.jobs.put(job)
        return batch.value if batch.proof else job

    def _process_data(self, running: weakref.ref[Any], data: Any, worker: int) -> Any:
        """In place of the iterator's own method, which has the next indices sent before we wait."""
        iterator: Any = running()
        data = type(iterator)._process_data(iterator, data, worker)
        if type(data) is Batch:  # it came before anybody read ahead
            data = self._received(data, data.cpu_s)
        return self.jobs.result(data) if type(data) is Job else data

    def _reset(self, running: weakref.ref[Any], loader: Any, first_iter: bool = False) -> None:
        """In place of the iterator's own method: workers that live on have to prove themselves in each epoch."""
        iterator: Any = running()
        board = self.shared.board
        board[Shared.PROVED :] = bytes(self.shared.workers)
        board[Shared.EPOCH] = (board[Shared.EPOCH] + 1) % 256
        board[Shared.ON] = int(self.jobs.wanted > 0)
        self._sent.clear()
        type(iterator)._reset(iterator, loader, first_iter)

    def _prove(self, job: Job) -> None:
        board, batch, value = self.shared.board, job.batch, job.value
        if isinstance(value, ExceptionWrapper):
            lines = str(value.exc_msg).strip().splitlines()
            self.refuse(DIFFERS.format(lines[-1] if lines else value.exc_type.__name__))
        elif not same(value, batch.value):
            self.refuse(DIFFERS.format(OTHER))
        elif batch.epoch == board[Shared.EPOCH]:
            board[Shared.PROVED + batch.worker] = 1
            self.is_proved = True

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Batches that were read ahead."""
        return self._relay.qsize() if self._relay is not None else 0

    def worker_bytes(self) -> float:
        """Return what one helper costs in private memory, in bytes."""
        return self.jobs.pool.worker_bytes() if self.jobs.pool is not None else 0.0

    def close(self) -> None:
        """End all; nobody wants a batch of this iterator any more."""
        self.jobs.close()
        if self._relay is not None:
            self._relay.ended.set()


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
                time.sleep(POLL_S)  # not by `ended`: the garbage collector may set it in here, inside its own lock
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
