"""The worker processes of one iterator: when they may be started, and whether they can compute."""

from __future__ import annotations

from typing import Any

from intune_callbacks.pipelines.base import cpus_allowed
from intune_callbacks.pipelines.given import check_same
from intune_callbacks.pipelines.torch.engine import Engines
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.pipelines.workers.surroundings import Surroundings

__all__ = ["Children"]


class Children:
    """None before they are needed; all of them with dataset and surroundings as they were when the iterator began.

    Args:
        engines: what all iterators of the loader share.

    Attributes:
        pool: the processes, None if there are none.
        base_seed: of the iterator.
        ended: how often all of them have ended: those that come then are not to draw the same numbers once more.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._given = engines.given()
        engines.epochs.begins_with(self._given)
        self._surroundings = Surroundings.now(engines.places, hangs_up=engines.own[0] < 2)
        self.pool: ProcessPool | None = None
        self.base_seed, self.ended = 0, 0

    @property
    def stock_seed(self) -> int:
        """Where the base seed of the stock iterator that comes behind them is drawn from: each time another one."""
        return self.base_seed + self.ended

    def begun(self) -> ProcessPool | None:
        """Return the pool, a new one where there is none; None for threads.

        Raises:
            RuntimeError: the training changed the dataset meanwhile.
        """
        if self.pool is None:
            self.check()
            self.pool = self._engines.pool(self.base_seed, self._surroundings, self.ended)
        return self.pool

    def first(self) -> int:
        """Return with how many an epoch begins: of those that live on from the last one, where others would differ."""
        count, idle = self._engines.at_once, 0 if self.pool is None else self.pool.idle
        return idle if 0 < idle < count and self.would_differ else count

    @property
    def would_differ(self) -> bool:
        """Whether a worker that starts now would get another dataset than those that started with the iterator."""
        return bool(self._engines.given() != self._given)

    @property
    def are_kept(self) -> bool:
        """Whether they go on also with the user's own numbers: stock workers would get the dataset as it is now."""
        return self.pool is not None and self.would_differ

    def check(self) -> None:
        """Raise where a worker that starts now would get another dataset."""
        check_same(self._given, self._engines.given())

    def are_late(self) -> bool:
        """Have the first ones started where that takes long; return whether they cannot compute yet.

        That they never will is noted: one could not be started, or has ended already, and then none is left.
        """
        if self._engines.starts_at_once:
            return False
        try:
            pool, count = self.begun(), self._engines.at_once
            assert pool is not None
            if pool.idle < count:
                self.check()
            return not pool.prepare(count)
        except Exception as error:
            self.spare()
            self._engines.refused(error, None)
            return False

    def grow(self, engine: ElasticMap[Any], waiting: bool) -> None:
        """Start missing workers: one, or as many as can be while the loop has to wait anyway; parked ones at once.

        Args:
            waiting: the training loop is about to ask it for a batch.
        """
        engines, pool = self._engines, self.pool
        try:
            while engine.workers < engines.workers:
                starts = pool is not None and not pool.idle
                if starts:
                    if self._is_busy_starting():
                        return
                    self.check()
                engine.resize(engine.workers + 1)
                if starts and not (waiting and engine.is_waited_for):
                    return
        except Exception as error:
            engines.refused(error, engine)

    def _is_busy_starting(self) -> bool:
        """True while so many import that one more would take a CPU from those that compute."""
        return self.pool is not None and not self._engines.starts_at_once and self.pool.starting >= cpus_allowed()

    def spare(self) -> None:
        """End those that wait to be used, without waiting for it."""
        if self.pool is not None:
            self.pool.trim()

    def drop(self) -> None:
        """End them; there can be others later."""
        pool, self.pool = self.pool, None
        if pool is not None:
            self.ended += 1
            pool.close()
