"""What stands in the place of the enqueuer of Keras's `PyDatasetAdapter` during one fit, and delivers what it would.

Keras asks an enqueuer to start at the beginning of an epoch and to stop at its end, and takes batches in between. With
`steps_per_epoch`, and where the model was built from a batch, it stops before the batches are at their end: what had
been sent to the workers by then is delivered first in the next epoch, and the rest never, for the numbers begin anew.
So the order of the batches depends on how many are sent ahead. Ours keeps as many as Keras's own would have: one for
each place in its queue, and the one that waits for a place.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from intune_callbacks.pipelines.pydataset.pydataset import WAITING, PyDatasetPipeline, Run
from intune_callbacks.pipelines.workers.line import Hold

__all__ = ["InLoop", "LiveEnqueuer"]

# Every wait is bounded: nobody tells a consumer that asks for more than there is that the fit is over.
WAIT_S = 0.1


class LiveEnqueuer:
    """An `OrderedEnqueuer` whose workers and window are live; what outlasts an epoch is kept in Keras's own.

    Args:
        stock: Keras's, which does not run; it delivers an epoch for which our workers cannot be started.
        steps: batches the training takes in an epoch, None where that is not known.
    """

    def __init__(self, stock: Any, pipeline: PyDatasetPipeline, steps: int | None) -> None:
        self._stock, self._pipeline, self._steps = stock, pipeline, steps
        places = stock.future_queue.maxsize
        self._sent_ahead = places + WAITING if places > 0 else None  # a queue of Python without a size takes all
        self._taken = 0  # since Keras began to count the batches anew
        self._run: Run | None = None
        self._due: Callable[[], None] | None = None
        self._from_stock: Iterator[Any] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def is_running(self) -> bool:
        """Whether batches can be had."""
        has_run = self._run is not None or self._due is not None
        return bool(self._stock.is_running() or (has_run and not self._pipeline.is_closed))

    def start(self) -> None:
        """Begin an epoch, threads at once; without effect while one runs.

        Keras starts an epoch before it calls the dataset's `on_epoch_begin`, and its own processes mostly begin behind
        that. Ours always do, with the first batch that is asked for: they have to know what it has set.
        """
        with self._lock:
            if self.is_running():
                return
            self._due = None
            if self._pipeline.is_closed:
                self._stock.start()
                return
            self._stopped.clear()
            hold_at, steps = None, self._takes()
            if steps is not None and self._sent_ahead is not None:
                hold_at = max(0, steps - self._stock.ready_queue.qsize()) + self._sent_ahead
            # Else some of what is made now is for later epochs.
            takes_all = steps is None or steps == self._stock.py_dataset.num_batches
            before = random.getstate()
            numbers = self._numbers()
            drawn = random.getstate()

            def begin() -> None:
                try:
                    self._run = self._pipeline.begin(lambda: numbers, Hold(hold_at), takes_all)
                except Exception as error:
                    self._pipeline.refused(error, self._pipeline.workers)
                    if random.getstate() == drawn:
                        random.setstate(before)  # Keras draws the same order again
                    self._stock.start()

            self._due = begin
        if not self._pipeline.in_processes:
            self._begun()

    def _begun(self) -> Run | None:
        """Return the run, whose workers are started where they have not been."""
        with self._lock:
            due, self._due = self._due, None
            if due is not None:
                due()
            run = self._run
        if due is not None and run is not None:
            run.engine.prime()
        return run

    def _takes(self) -> int | None:
        """Return the batches of the epoch that begins: fewer where Keras finds that there are no more."""
        batches: int | None = self._stock.py_dataset.num_batches
        if self._steps is None or batches is None:
            return self._steps
        before, self._taken = self._taken, self._taken + self._steps
        if self._taken >= batches:
            self._taken = 0
        return min(self._steps, batches - before)

    def _numbers(self) -> Iterator[int]:
        """Return the numbers of an epoch; without an end they go on where they stopped."""
        stock = self._stock
        return _order(stock.py_dataset, stock.shuffle) or stock.indices

    def get(self) -> Iterator[Any]:
        """Yield the batches, from one epoch to the next; a batch that is None is left out."""
        while self.is_running():
            batch = self._next()
            if batch is not None:
                self._pipeline.delivered += 1
                yield batch
        # As Keras's own.
        raise ValueError("Iterator called after `on_epoch_end` or before `on_epoch_begin`.")

    def _next(self) -> Any:
        run = self._begun()
        try:
            return self._stock.ready_queue.get(block=False)
        except queue.Empty:
            pass
        if run is None:
            if self._from_stock is None:
                self._from_stock = self._stock.get()
            return next(self._from_stock)
        try:
            return next(run)
        except StopIteration:
            self._stopped.wait(WAIT_S)
            return None
        except Exception:
            self.stop()
            raise

    def stop(self, drain_queue_and_join: bool = True) -> None:
        """Stop the workers; without effect where none run.

        Args:
            drain_queue_and_join: keep what Keras would have sent to its workers by now for the next epoch.
        """
        if drain_queue_and_join and self.is_running():
            self._begun()
        with self._lock:
            if not self.is_running():
                return
            run, self._run, self._due = self._run, None, None
            self._stopped.set()
        if run is None:
            self._stock.stop(drain_queue_and_join)
            return
        try:
            if drain_queue_and_join:
                self._keep(run)
        finally:
            run.close()

    def _keep(self, run: Run) -> None:
        stock, ahead, kept = self._stock, self._sent_ahead, 0
        # Numbers without an end go on from here, so that none that was drawn may be lost.
        endless = stock.py_dataset.num_batches is None
        if ahead is not None or endless:
            run.draw_no_more(beyond=ahead or 0)
        while endless or ahead is None or kept < ahead:
            try:
                batch = next(run)
            except StopIteration:
                return
            kept += 1
            if batch is not None:
                stock.ready_queue.put(batch)


class InLoop:
    """The enqueuer of a dataset that Keras computes in the training loop: each iterator has its own run.

    Args:
        shuffle: whether Keras shuffles the numbers.
        pipeline: computes; at 0 workers in the thread that asks.
        steps: batches the training takes in an epoch; none of the next one is made before it is asked for.
    """

    def __init__(self, dataset: Any, shuffle: bool, pipeline: PyDatasetPipeline, steps: int | None) -> None:
        self._dataset, self._shuffle, self._pipeline, self._steps = dataset, shuffle, pipeline, steps

    def is_running(self) -> bool:
        """Whether batches can be had."""
        return not self._pipeline.is_closed

    def start(self) -> None:
        """An iterator starts itself."""

    def stop(self, drain_queue_and_join: bool = True) -> None:
        """An iterator may go on in the next epoch; it ends with the one who holds it."""

    def _numbers(self) -> Iterator[int]:
        return _order(self._dataset, self._shuffle) or itertools.count()

    def get(self) -> Iterator[Any]:
        """Yield the batches of one iterator."""
        run = self._begin()
        try:
            for batch in run:
                self._pipeline.delivered += 1
                yield batch
        finally:
            run.close()

    def _begin(self) -> Run:
        hold = Hold(self._steps, self._steps or 0)
        try:
            return self._pipeline.begin(self._numbers, hold)
        except Exception as error:
            self._pipeline.refused(error, 0)
            return self._pipeline.begin(self._numbers, hold)


def _order(dataset: Any, shuffle: bool) -> Iterator[int] | None:
    """Return the numbers of the batches of an epoch, drawn as Keras draws them; None where there is no end."""
    batches = dataset.num_batches
    if batches is None:
        return None
    numbers = list(range(batches))
    if shuffle:
        random.shuffle(numbers)
    return iter(numbers)
