"""One iterator of a DataLoader that delivers from the stock engine until our own is needed, and then from that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import DataLoader

from intune_callbacks.pipelines.torch.children import Children
from intune_callbacks.pipelines.torch.engine import Engines
from intune_callbacks.pipelines.torch.stock import LikeStock, Numbered, Stock
from intune_callbacks.pipelines.torch.told import fetched, untied
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.worker import is_of_worker

__all__ = ["LoaderIterator"]

_NONE = object()
GIVE_BACK_S = 5.0


class LoaderIterator(LikeStock):
    """What the loader's `iter()` returns; nothing holds it but its user, so dropping it ends it.

    At first the stock iterator delivers, untouched and feeding itself, and is only timed. When other numbers than the
    user's are wanted, our workers are started, and only when they can compute nothing more is sent to the stock ones:
    what these have in flight is delivered, and ours go on where their sampler is.

    One thread may fetch while another sets numbers (Keras fetches from a DataLoader in a thread of TensorFlow's): who
    comes during a fetch from the stock iterator leaves it to that fetch to put them into force.

    Args:
        engines: what all iterators of the loader share.
        stock: a running iterator of the loader's own; None to `begin` in ours.

    Attributes:
        children: the processes that compute.
        engine: ours, None while the stock iterator feeds itself.
        has_ended: True after the last batch, or when it was closed.
        is_behind: True where a stock iterator hands on these batches: somebody else holds that one.
    """

    def __init__(self, engines: Engines, stock: Any = None) -> None:
        self.engines = engines
        self._stock: Any = None if stock is None else Stock(stock)
        self._source: Any = None
        self.engine: ElasticMap[Any] | None = None
        self.children = Children(engines)
        self._number = self._begun = 0  # batches of all epochs, and those before this one
        self.has_ended = self.is_behind = False
        self._turn, self._is_put_off = threading.Lock(), False
        if stock is not None:
            self.children.base_seed, self._number = stock._base_seed, stock._num_yielded
            self.has_ended = self._number > 0 and Stock(stock).is_over(engines.length())
            engines.begin(stock)

    @classmethod
    def begin(cls, engines: Engines) -> LoaderIterator:
        """Return one at the start of an epoch in our engine, in the stock one if that fails; numbers drawn as there."""
        ours = cls(engines)
        sampler, ours.children.base_seed, again = engines.drawn()
        try:
            ours._start(sampler, 0, 0)
        except Exception as error:
            engines.refused(error, None)
            return cls(engines, engines.stock_from(sampler, again))
        if engines.own[0] > 0 and ours.engine is not None:
            ours.engine.prime()
        return ours

    def __next__(self) -> Any:
        try:
            with self._turn:
                batch = self._from_stock()
                if self._is_put_off:
                    self._apply()
                engine: Any = self.engine
            if batch is _NONE:
                given = engine, self._source, self.engines.own[0], self.is_behind
                batch = fetched(*given) if self._stock is None else self._first(engine)
                self._number += 1
        except StopIteration:
            self._finish()
            raise
        self.engines.delivered += 1
        return batch

    def _from_stock(self) -> Any:
        """Return what the stock iterator delivers, and `_NONE` when it is ours that delivers."""
        engines, engine = self.engines, self.engine
        if engine is None:
            batch = engines.watch.fetch(self._stock.__next__)
            self._number += 1
            return batch
        if self._stock is not None:  # what it still has in flight comes first
            if engine.workers < engines.workers:
                self.children.grow(engine, waiting=False)
            if not self._stock.is_over(None):
                self._prime(engine)  # ours compute while it is waited for
                try:
                    batch = untied(self._stock.__next__)
                finally:  # torch's own, too, asks for the next indices before it raises
                    self._prime(engine)
                self._number += 1
                return batch
        if engine.window != engines.reach:
            self._apply()  # what the sampler does is known now
        if engine.workers < engines.workers:
            engine.prime(asked=True)
            self.children.grow(engine, waiting=True)
        return _NONE

    def _first(self, engine: ElasticMap[Any]) -> Any:
        """Return the first batch of ours; where that fails, of the stock workers, who may have what it depends on."""
        try:
            batch = next(engine)
        except Exception as error:
            if self._stock.is_shut or not is_of_worker(error):
                raise
            failed = error.with_traceback(None)
        else:  # a spawned process takes seconds to end: it cleans up what a forked one leaves to the kernel
            self._drop_stock(waiting=self.engines.start_method != "spawn")
            return batch
        with self._turn:  # behind the handler: what theirs raises is told without ours
            self._return(engine, self._source, again=True)
            self.engines.watch.begin(self._stock.iterator)
            self._is_put_off = True  # unless it comes now
            batch = untied(lambda: self.engines.watch.fetch(self._stock.__next__))
            self.engines.stay(failed)
        return batch

    # -- the numbers ---------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Put the wanted numbers into force, as far as that is possible; else what delivered before goes on."""
        if not self._turn.acquire(blocking=False):
            self._is_put_off = True
            return
        try:
            self._apply()
        finally:
            self._turn.release()

    def _apply(self) -> None:
        engines, engine = self.engines, self.engine
        self._is_put_off = False
        if self.has_ended:
            return
        try:
            if engine is None and engines.is_stock:
                self.children.spare()
            elif engine is None:
                self._engage()
            else:
                engine.resize(min(engines.workers, engine.workers), engines.reach)
                if engine.workers < engines.workers:
                    self.children.grow(engine, waiting=False)
        except Exception as error:
            engines.refused(error, self.engine)

    def _engage(self) -> None:
        """All or nothing: only when our engine runs, the stock one is told to send out nothing more.

        Until our workers can compute, each fetch asks again.
        """
        engines, stock = self.engines, self._stock
        sent = self._number - self._begun if stock.sent is None else stock.sent
        length = engines.length()
        self._is_put_off = sent == length  # nothing is left that ours could compute, unless that length is no end
        if self._is_put_off or self._is_held_up():
            return
        self._start(stock.iterator._sampler_iter, self._begun + sent, sent)
        engines.watch.end()
        if stock.sent is None:
            self._stock = None
        else:
            stock.stop()

    def _prime(self, engine: ElasticMap[Any]) -> None:
        self.engines.prime(engine, 0 if self._stock is None else self._stock.left)

    def _start(self, sampler: Iterator[Any], number: int, pulled: int) -> None:
        pool = self.children.begun()
        self._source = Numbered(sampler, self.children.base_seed, number, pulled)
        try:
            self.engine = self.engines.engine(self._source, pulled, pool, self.children.first())
        except BaseException:
            self.children.drop()
            raise

    def _is_held_up(self) -> bool:
        """Return whether the stock engine goes on, for our workers cannot compute yet or never will."""
        self._is_put_off = self.children.are_late()
        return self._is_put_off or self.engines.is_stock

    # -- somebody else holds the stock iterator ------------------------------------------------------------------

    def stand_behind(self) -> None:
        """Have the stock iterator hand these batches on to whoever holds it, in a frame or as an attribute."""
        self.is_behind = True
        self._stock.cover(self)

    def give_back(self) -> Any:
        """Return a stock iterator that goes on where this one is, and feeds this one, too; None after the end."""
        if not self._turn.acquire(timeout=GIVE_BACK_S):
            return None  # somebody fetches, and nothing comes
        try:
            if not self.has_ended and self.engine is not None:
                self._return(self.engine, self._source)
            return None if self._stock is None or self.engine is not None else self._stock.uncover()
        finally:
            self._turn.release()

    def _return(self, engine: ElasticMap[Any], source: Any, again: bool = False) -> None:
        """Have the stock engine go on with what ours has not delivered, or not well, and then with the sampler."""
        if self._stock is not None and not self._stock.is_shut:
            self._stock.resume(source.rest(again))
        else:
            done = self._number - self._begun
            self._stock = Stock(self.engines.stock_again(source.rest(), self.children.stock_seed, done))
        engine.close()
        self.engine = None
        self.children.drop()

    # -- the next epoch and the end ------------------------------------------------------------------------------

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Start the next epoch with the same children (`persistent_workers`), as the stock iterator does."""
        with self._turn:
            self._reset_alone(loader, first_iter)

    def _reset_alone(self, loader: DataLoader[Any], first_iter: bool) -> None:
        engines, engine = self.engines, self.engine
        self._ends()
        self.has_ended, self._begun = False, self._number
        if engine is None and (engines.is_stock or self._is_held_up()):
            self._stock.reset(loader, first_iter)
            engines.begin(self._stock.iterator)
            return
        sampler = engines.sampling.around(iter(loader._index_sampler))
        if engine is not None:
            self._drop_stock()  # one that is still there sends out nothing more: it is of no use
            engine.close()
            self.engine = None
        if not engines.is_stock or self.children.are_kept:
            try:
                self._start(sampler, self._number, 0)
            except Exception as error:
                engines.refused(error, None)
        if self.engine is not None:
            self._drop_stock()
            self.engine.prime()
            return
        self.children.drop()
        if self._stock is None:
            self._stock = Stock(engines.stock_again(sampler, self.children.stock_seed))
        else:
            self._stock.reset(loader, first_iter)
        engines.begin(self._stock.iterator)

    def _ends(self) -> None:
        """Have the epoch counted: as one that was left, where more of it is in flight than was delivered."""
        if not self.has_ended and (delivered := self._number - self._begun):
            self.engines.epochs.ended(delivered <= (self._stock if self.engine is None else self._source).left)
        self.has_ended = True

    def _finish(self) -> None:
        self._ends()
        if self.engine is None:
            self.engines.watch.end()
        if not self.engines.loader.persistent_workers:
            self.close()  # the stock iterator, too, lets its workers go now

    def close(self) -> None:
        """Stop our workers, then the iterator ends; a stock iterator that feeds itself is the user's and goes on."""
        self._ends()
        if self.engine is not None:
            self._drop_stock()
            self.engine.close()
        self.children.drop()

    def _shutdown_workers(self) -> None:
        """Let all workers go: people ask this of an iterator that its loader keeps."""
        if self.engine is None and self._stock is not None:
            self._stock.end()
        self.close()

    def _drop_stock(self, waiting: bool = True) -> None:
        stock, self._stock = self._stock, None
        if stock is not None:
            stock.end(waiting)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # An interpreter on its way out has no threading left to complain with.
            return
