"""The workers of a Keras `PyDataset` made live: they take the numbers of batches, what they made comes in that order.

Nothing of Keras is imported or replaced here; `enqueuer.py` stands in the place of Keras's own enqueuer.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from intune_callbacks.errors import first_line
from intune_callbacks.pipelines.base import (
    MAX_PROCESSES,
    MAX_THREADS,
    MAX_WINDOW,
    LiveLoader,
    clamp,
    give_back,
    windowed,
)
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.given import check_same, hints_of_change, hints_of_here
from intune_callbacks.pipelines.look import plain_values
from intune_callbacks.pipelines.pydataset.work import Here, There, reducer
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.line import Hold
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.types import Allocation, Clock, Hint, PipelineStats, Stage

__all__ = ["WAITING", "PyDatasetPipeline", "Run", "knobs"]

WORKERS, WINDOW = "load", "load.window"
# Keras sends each batch to its workers before it waits for a place in its queue.
WAITING = 1


class PyDatasetPipeline(LiveLoader):
    """One stage, `load`, over all epochs of one fit on a `keras.utils.PyDataset`.

    Args:
        dataset: the user's; only its `__getitem__` is called.
        workers: the user's number; 0 where the batches are made in the training loop.
        window: the user's `max_queue_size`: batches in progress or made ahead, beside the one that waits for a place.
        kind: ``process`` or ``thread``.
        max_workers: upper limit of `load`, unless the user's own number is higher.
        in_order: False delivers batches as they are finished.

    Attributes:
        why_not: why what was wanted is not in force: the last error of a start or of a growth, empty if none.
        own: the user's number of workers.
        is_closed: no run begins any more.
        delivered: batches handed out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        workers: int,
        window: int,
        kind: str,
        clock: Clock,
        max_workers: int | None = None,
        in_order: bool = True,
    ) -> None:
        self._dataset, self._kind, self._clock, self._in_order = dataset, kind, clock, in_order
        self.own, self.workers, self.window = workers, workers, min(max(1, window), MAX_WINDOW)
        self._high = max(workers, max_workers or (MAX_PROCESSES if kind == "process" else MAX_THREADS))
        self._counters, self._startup = Counters(), Startup()
        self._run: Run | None = None
        self._runs = 0
        self.delivered = 0
        self.why_not = self._stays = ""
        self.is_closed = False

    def begin(self, order: Callable[[], Iterator[int]], hold: Hold, takes_all: bool = True) -> Run:
        """Start the workers of one run over the batches; `order` has not been asked for a number yet.

        Args:
            order: returns the numbers of the batches; called when the first one is needed.
            hold: how many batches are made ahead of the end of an epoch; one more only when it is asked for.
            takes_all: the training takes what is made in this epoch; else it keeps its order.

        Raises:
            Exception: a worker could not be started; then none is left.
        """
        self._runs += 1
        source = _Numbered(order)
        self._run = Run(self, source, self._engine(source, hold, self._in_order or not takes_all))
        return self._run

    def _engine(self, source: _Numbered, hold: Hold, ordered: bool) -> ElasticMap[Any]:
        here, pool = Here(self._dataset), None
        # As many as the user's enqueuer starts, and at least two; the others while the loop waits anyway.
        workers = min(self.workers, max(2, self.own)) if self.in_processes else self.workers
        if self.in_processes:
            # The context of `multiprocessing.Pool`, which Keras takes: the user's own start method.
            context = multiprocessing.get_context()
            given: Any = {"reducer": reducer(), "startup": self._startup, "name": "PyDataset worker"}
            pool = ProcessPool(There(self._dataset, self._runs), context, **given)
        try:
            return ElasticMap(
                source,
                here if pool is None else None,
                workers=workers,
                window=self.window + WAITING,
                ordered=ordered,
                pool=pool,
                feed=True,
                hold=hold,
                inline=here if self.own == 0 else None,
                refused=self._stay,
                counters=self._counters,
                clock=self._clock,
                name=WORKERS,
            )
        except BaseException:
            if pool is not None:
                pool.close()
            raise

    @property
    def in_processes(self) -> bool:
        """Whether the workers have copies of the dataset."""
        return self._kind == "process"

    def given(self) -> Any:
        """Return the plain values the dataset holds now, None where no process gets a copy."""
        return plain_values(self._dataset) if self.in_processes else None

    def _stay(self, error: BaseException) -> None:
        """Leave it to the training process: it made a batch that a worker could not."""
        self.workers, self._stays = 0, first_line(error)
        self.why_not = self._stays

    def refused(self, error: Exception, workers: int) -> None:
        """Note that workers could not be started: what is in force now becomes what is wanted."""
        self.why_not = f"{type(error).__name__}: {error}"
        self.workers = workers

    # -- the pipeline protocol -----------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        workers, window = knobs(self._kind)
        limits = min(1, self.own), 0 if self._stays else self._high, self.workers
        startup_s = self._startup.expected_s if self._kind == "process" else 0.0
        load = Stage(WORKERS, "cpu", "workers", *limits, knob=workers, startup_s=startup_s)
        # Nothing is made ahead for good where the training process makes all.
        least, most = (self.window,) * 2 if self._stays else (1, MAX_WINDOW)
        return windowed(load, self.window, low=least, high=most, knob=window)

    @property
    def late_hints(self) -> tuple[Hint, ...]:
        """What has shown of the dataset."""
        if self._stays:
            return hints_of_here(self._stays, WORKERS)
        return hints_of_change(self.why_not, WORKERS, self.workers)

    def stats(self) -> PipelineStats:
        run = self._run
        reading = self._counters.reading(0, self.window + WAITING) if run is None else run.engine.stats()
        return PipelineStats(self._clock.wall(), self.delivered, {WORKERS: reading})

    @property
    def is_growing(self) -> bool:
        """True while workers that were asked for cannot compute yet."""
        return self._run is not None and self._run.engine.is_growing(self.workers)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        before = self.workers, self.window
        self.workers = wanted.get(WORKERS, self.workers)
        self.window = wanted.get(WINDOW, self.window)
        if before != (self.workers, self.window):
            self.why_not = ""
            if self._run is not None and not self.is_closed:
                self._run.apply()
        return {WORKERS: self.workers, WINDOW: self.window}

    def trim(self) -> None:
        """End the children that are only kept for later."""
        if self._run is not None and self._run.engine.pool is not None:
            self._run.engine.pool.trim()

    def close(self) -> None:
        self.is_closed = True
        if self._run is not None:
            self._run.close()


class Run:
    """The batches from one start of the workers to their end: an epoch, or all of an iterator."""

    def __init__(self, pipeline: PyDatasetPipeline, source: _Numbered, engine: ElasticMap[Any]) -> None:
        self._pipeline, self._source, self.engine = pipeline, source, engine
        self._given = pipeline.given()

    def draw_no_more(self, beyond: int) -> None:
        """End with what was drawn, or so many batches beyond what was delivered."""
        self._source.end = max(self._source.drawn, self.engine.delivered + beyond)

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> Any:
        """Return the next batch; one thread may ask while another sets numbers."""
        if self.engine.workers < self._pipeline.workers:
            self.engine.prime(asked=True)
            self._grow()
        return next(self.engine)

    def apply(self) -> None:
        """Put the wanted numbers into force, as far as that costs the loop nothing."""
        pipeline, engine = self._pipeline, self.engine
        at_once = pipeline.workers if engine.pool is None else min(pipeline.workers, engine.workers)
        try:
            engine.resize(at_once, pipeline.window + WAITING)
        except Exception as error:  # no thread is to be had: what runs goes on
            self._refused(error)
        engine.prime()

    def _grow(self) -> None:
        """Start missing workers: one process, or as many as can be while the loop has to wait anyway."""
        pipeline, engine, pool = self._pipeline, self.engine, self.engine.pool
        try:
            while engine.workers < pipeline.workers:
                forks = pool is not None and not pool.idle
                if forks:
                    check_same(self._given, pipeline.given())
                engine.resize(engine.workers + 1)
                if forks and not engine.is_waited_for:
                    return
        except Exception as error:
            self._refused(error)

    def _refused(self, error: Exception) -> None:
        pipeline, engine = self._pipeline, self.engine
        pipeline.refused(error, give_back(engine, error, pipeline.own))

    def close(self) -> None:
        """Stop the workers; what they have in progress is dropped."""
        self.engine.close()
        if self.engine.pool is not None:
            self.engine.pool.close()


def knobs(kind: str) -> tuple[str, str]:
    """Return how the user writes workers and window.

    Args:
        kind: ``process`` or ``thread``.
    """
    more = ", use_multiprocessing=True" if kind == "process" else ""
    return f"PyDataset(workers={{}}{more})", "max_queue_size={total}"


class _Numbered:
    """How many batches of a run came before, and the number the dataset knows each by."""

    def __init__(self, order: Callable[[], Iterator[int]]) -> None:
        self._order = order
        self._numbers: Iterator[int] | None = None
        self.drawn = 0
        self.end: int | None = None

    def __iter__(self) -> _Numbered:
        return self

    def __next__(self) -> tuple[int, int]:
        if self.end is not None and self.drawn >= self.end:
            raise StopIteration
        if self._numbers is None:
            self._numbers = self._order()
        number = next(self._numbers)
        self.drawn += 1
        return self.drawn - 1, number
