"""One of a DataLoader's own iterators, as far as ours has to do with it, and the numbers of its batches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from intune_callbacks.pipelines.base import begin

if TYPE_CHECKING:
    from intune_callbacks.pipelines.torch.iterator import LoaderIterator

__all__ = ["Kept", "LikeStock", "Numbered", "Stock", "going_on", "shown_by"]


class Stock:
    """A running iterator of torch's own, of a map-style loader.

    Args:
        iterator: the exact type of it is torch's.
    """

    def __init__(self, iterator: Any) -> None:
        self._held: Callable[[], Any] = lambda: iterator
        self._is_cover = False

    @property
    def iterator(self) -> Any:
        """The iterator itself; None when it hands on ours and its user has dropped it."""
        return self._held()

    @property
    def sent(self) -> int | None:
        """Indices it has drawn from the sampler in this epoch; None without workers, where it draws none ahead."""
        return getattr(self.iterator, "_send_idx", None)

    @property
    def left(self) -> int:
        """Batches it has in flight or ready."""
        return 0 if self.sent is None else int(self.iterator._send_idx - self.iterator._rcvd_idx)

    @property
    def is_shut(self) -> bool:
        """True once its workers were let go, by whomever."""
        return bool(getattr(self.iterator, "_shutdown", False))

    def is_over(self, length: int | None) -> bool:
        """Return whether it has no batch left, as far as that can be seen."""
        iterator = self.iterator
        if self.sent is None:
            return length is not None and iterator._num_yielded >= length
        return self.is_shut or not iterator._task_info

    def __next__(self) -> Any:
        iterator = self._held()
        return type(iterator)._next_data(iterator) if self._is_cover else next(iterator)

    def reset(self, loader: DataLoader[Any], first_iter: bool) -> None:
        """Begin the next epoch with the same workers."""
        type(self.iterator)._reset(self.iterator, loader, first_iter)

    def stop(self) -> None:
        """Send out nothing more; what is in flight is still delivered."""
        self.iterator._try_put_index = lambda: None

    def resume(self, sampler: Iterator[Any]) -> None:
        """Go on sending, after `stop`.

        Args:
            sampler: the indices that follow on those in flight.
        """
        iterator = self.iterator
        iterator._sampler_iter = sampler
        vars(iterator).pop("_try_put_index", None)
        for _ in range(iterator._prefetch_factor * iterator._num_workers - (iterator._send_idx - iterator._rcvd_idx)):
            iterator._try_put_index()

    def end(self, waiting: bool = True) -> None:
        """Let the workers go, if there are any.

        Args:
            waiting: until they have ended, as torch does; False leaves that to a thread.
        """
        iterator = self.iterator
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is None:
            return
        if getattr(iterator, "_worker_pids_set", False):
            # Else torch raises in the training when one ends with an error, as all do in Python 3.11 that a thread of
            # TensorFlow's has forked.
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        if not waiting:
            with suppress(RuntimeError):  # no thread is to be had
                begin(threading.Thread(target=shutdown, daemon=True, name="intune-end"))
                return
        shutdown()

    def cover(self, ours: LoaderIterator) -> None:
        """Let whoever holds the iterator get the batches of `ours` from it, in this epoch and the next ones.

        Args:
            ours: from now on held by the iterator, and by nobody else that counts.
        """
        iterator = self.iterator
        # Weak: in a cycle with ours it would be finalised at some collection, perhaps in a forked child.
        self._held = weakref.ref(iterator)
        iterator._next_data, iterator._reset = ours.__next__, ours._reset
        self._is_cover = True

    def uncover(self) -> Any:
        """Return the iterator as it was before `cover`."""
        iterator = self.iterator
        if self._is_cover and iterator is not None:
            self._held, self._is_cover = lambda: iterator, False
            for name in ("_next_data", "_reset"):
                vars(iterator).pop(name, None)
        return iterator


class LikeStock:
    """What people reach for in an iterator that a DataLoader keeps, other than batches.

    While a stock iterator delivers it answers itself; then the loader and our workers do.
    """

    def __iter__(self) -> Any:
        return self

    @property
    def __class__(self) -> type:
        # Lightning leaves running iterators out of a copied trainer, and tells them by this.
        kind: type = _BaseDataLoaderIter
        return kind

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError(f"a running iterator is no {kind.__name__}")

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")  # as the stock one does

    def __len__(self) -> int:
        return len(vars(self)["engines"].loader)

    def __getattr__(self, name: str) -> Any:
        held = vars(self)
        if name.startswith("__") or "_begun" not in held:
            raise AttributeError(name)
        stock, loader, pool = held["_stock"], held["engines"].loader, held["children"].pool
        if name == "_num_yielded":
            return held["_number"] - held["_begun"]
        if stock is not None:
            return getattr(stock.iterator, name)
        if name == "_workers":
            return [] if pool is None else pool.processes
        if name == "_shutdown":
            return held["has_ended"] and pool is None
        return getattr(loader, name if hasattr(loader, name) else name.removeprefix("_"))


def shown_by(iterator: object) -> Any:
    """Return what a stock iterator hands on instead of its own batches, None if they are its own."""
    if not issubclass(type(iterator), _BaseDataLoaderIter):
        return None
    return getattr(vars(iterator).get("_next_data"), "__self__", None)


class Numbered:
    """The indices of a sampler with their numbers; those not delivered yet are remembered.

    No iterator of a loader is in it: the engine's threads, which hold it, must not keep one alive.

    Args:
        sampler: a running iterator over indices.
        base_seed: of the epoch; stands before each number.
        first: the number of the first one.
        before: those of the epoch that came before it.

    Attributes:
        last: which one of the epoch was delivered last.
    """

    def __init__(self, sampler: Iterator[Any], base_seed: int, first: int, before: int = 0) -> None:
        self._sampler, self._base_seed, self._number = sampler, base_seed, first
        self._ahead: dict[int, Any] = {}
        self._last: tuple[Any, ...] = ()
        self._before, self._pulled, self.last = before, 0, before

    def __iter__(self) -> Numbered:
        return self

    def __next__(self) -> tuple[int, int, Any]:
        index = next(self._sampler)
        self._ahead[self._pulled] = index
        self._pulled += 1
        self._number += 1
        return self._base_seed, self._number - 1, index

    @property
    def left(self) -> int:
        """Those that were not delivered yet."""
        return len(self._ahead)

    def forget(self, place: int) -> None:
        """Remember what was delivered no longer.

        Args:
            place: how many were pulled before it.
        """
        self.last = self._before + place
        self._last = (self._ahead.pop(place),) if place in self._ahead else ()

    def rest(self, again: bool = False) -> Iterator[Any]:
        """Return what was not delivered yet, and then what the sampler still gives.

        Args:
            again: what was delivered last comes once more, before them.
        """
        return chain(self._last if again else (), tuple(self._ahead.values()), self._sampler)


def going_on(loader: DataLoader[Any], sampler: Iterator[Any], generator: torch.Generator, done: int = 0) -> Any:
    """Return a stock iterator of a loader that goes on with `sampler`.

    Args:
        sampler: a running iterator over indices; nothing is pulled from it before its workers have started.
        generator: where the base seed of its workers is drawn from.
        done: batches of the epoch that were delivered before.
    """
    # Of torch's own class: a subclass may end its workers where its instances end.
    twin: DataLoader[Any] = DataLoader.__new__(DataLoader)
    given: dict[str, Any] = {"sampler": (), "generator": generator}
    if loader.batch_sampler is not None:
        given["batch_sampler"] = ()
    vars(twin).update(vars(loader) | given)
    iterator: Any = DataLoader._get_iterator(twin)
    iterator._index_sampler, iterator._sampler_iter = loader._index_sampler, sampler
    iterator._num_yielded = done
    if loader.num_workers:
        iterator._send_idx = iterator._rcvd_idx = done
    for _ in range(loader.num_workers * (loader.prefetch_factor or 0)):
        iterator._try_put_index()
    return iterator


class Kept:
    """Stands for an iterator that the loader keeps (`persistent_workers`) and whose workers have ended with a training.

    A loader without one would draw a seed for a new one, and from then on other orders than those of stock.
    """

    def __init__(self, base_seed: int) -> None:
        self._base_seed = base_seed

    def _shutdown_workers(self) -> None:
        """Do nothing: they have ended."""

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next epoch: with a stock iterator in this one's place."""
        again = torch.Generator().manual_seed(self._base_seed)
        loader._iterator = going_on(loader, iter(loader._index_sampler), again)
