"""All that reads or replaces a private attribute of a Lightning Trainer; what is missing is reported, never raised."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.find import Found
from intune_callbacks.session.loaders import hints_of, let_go, pipeline_of, reasons_of
from intune_callbacks.session.samples import batch_size_of
from intune_callbacks.types import Hint

__all__ = ["BarField", "FetchHooks", "TrainLoaders"]

FIELD = "in"
_FETCH_HOOKS = ("_on_before_fetch", "_on_after_fetch")


class FetchHooks:
    """Runs one function before and one after every fetch of a training batch.

    Lightning calls ``epoch_loop._on_before_fetch`` and ``_on_after_fetch`` around ``next()`` of the train loaders and
    looks both up at the start of each epoch; the gap between two public hooks would also contain the transfer to the
    device, other callbacks, validation and, under DDP, a collective.

    Args:
        before: called before Lightning's own hook.
        after: called after Lightning's own hook, also when the fetch ended in an exception.
    """

    def __init__(self, epoch_loop: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._loop, self._before, self._after = epoch_loop, before, after
        self._installed: dict[str, Callable[[], None]] = {}

    def attach(self) -> str | None:
        """Install both; return why that is impossible, or None."""
        stock = [getattr(self._loop, name, None) for name in _FETCH_HOOKS]
        missing = [name for name, hook in zip(_FETCH_HOOKS, stock, strict=True) if not callable(hook)]
        if missing:
            return (
                f"this version of Lightning has no epoch_loop.{' and no epoch_loop.'.join(missing)}, "
                "so the data wait cannot be measured; nothing is tuned"
            )
        stock_before, stock_after = stock
        before, after = self._before, self._after

        def on_before_fetch() -> None:
            before()
            stock_before()  # type: ignore[misc]

        def on_after_fetch() -> None:
            stock_after()  # type: ignore[misc]
            after()

        self._installed = dict(zip(_FETCH_HOOKS, (on_before_fetch, on_after_fetch), strict=True))
        for name, hook in self._installed.items():
            setattr(self._loop, name, hook)
        return None

    def detach(self) -> None:
        """Give Lightning its own hooks back."""
        for name, hook in self._installed.items():
            if vars(self._loop).get(name) is hook:
                delattr(self._loop, name)
        self._installed = {}


class BarField:
    """A text on the progress bar of a Trainer.

    Not among ``trainer.progress_bar_metrics``: those are numbers, and people's callbacks compute with all of them.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._installed: _WithField | None = None

    def show(self, bar: Any, text: str | None) -> None:
        """Show the text from now on, on the Trainer's `progress_bar_callback`; None where it has none."""
        if self._bar is not bar:
            self.detach()
            if callable(getattr(bar, "get_metrics", None)):
                self._bar, self._installed = bar, _WithField(bar)
                bar.get_metrics = self._installed
        if self._installed is not None:
            self._installed.text = text

    def detach(self) -> None:
        """Give the bar its own method back."""
        bar, installed, self._bar, self._installed = self._bar, self._installed, None, None
        if installed is None or vars(bar).get("get_metrics") is not installed:
            return
        del bar.get_metrics
        if installed.before is not None:
            bar.get_metrics = installed.before


class _WithField:
    """In place of a bar's `get_metrics`; not a function in a function, for bars are copied and pickled."""

    def __init__(self, bar: Any) -> None:
        self.stock, self.before = bar.get_metrics, vars(bar).get("get_metrics")
        self.text: str | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        shown = self.stock(*given, **named)
        return {**shown, FIELD: self.text} if isinstance(shown, Mapping) else shown


class TrainLoaders:
    """The train loaders a Trainer holds, made tunable while they run.

    Args:
        find: returns what can be tuned in one loader (``.pipeline`` and ``.why``).

    Attributes:
        are_paired: a step gets a batch of each of several loaders.
    """

    def __init__(self, fit_loop: Any, find: Callable[[Any], Found]) -> None:
        self._fit_loop, self._find = fit_loop, find
        self._source: Any = None
        self._found: dict[int, tuple[Any, Found]] = {}  # by id(); the loader is kept so that its id stays its own
        self._loaders: list[Any] = []
        self._ours: list[Callable[[], Any]] = []  # weak: an old epoch's workers end when Lightning lets it go
        self._unreachable: str | None = None
        self.are_paired = False

    def attach(self, requested: Callable[[Any], None]) -> None:
        """Call `requested` with each loader the moment Lightning asks for it: before the first ``iter()``."""
        source = getattr(self._fit_loop, "_data_source", None)
        stock = getattr(source, "dataloader", None)
        if source is None or not callable(stock):
            return  # the loaders are still met at the first fetch, only not before their first iter()

        def dataloader() -> Any:
            loaders = stock()
            found = list(_leaves(loaders))
            self.are_paired = len(found) > 1
            for leaf in found:
                requested(leaf)
            return loaders

        source.dataloader, self._source = dataloader, source

    def detach(self) -> None:
        """Give Lightning its own data source back."""
        if self._source is not None:
            vars(self._source).pop("dataloader", None)
            self._source = None

    def prepare(self, loader: Any) -> None:
        """Make `loader` tunable from its first item, if it can be."""
        pipeline = self._of(loader).pipeline
        if pipeline is not None:
            pipeline.prepare()

    def refresh(self) -> bool:
        """Take over every running iterator that is not ours yet.

        Returns:
            True when Lightning holds other loaders than at the last call: then `told` gives a new pipeline.
        """
        combined = getattr(self._fit_loop, "_combined_loader", None)
        iterators = getattr(getattr(combined, "_iterator", None), "iterators", None)
        loaders = getattr(combined, "flattened", None)
        if not isinstance(iterators, list) or not isinstance(loaders, list) or len(iterators) != len(loaders):
            self._unreachable = "the running iterators of this version of Lightning's fit_loop cannot be reached"
            return False
        if len(self._ours) == len(iterators):
            # Once per batch, and so without a generator.
            for ours, iterator in zip(self._ours, iterators, strict=True):
                if ours() is not iterator:
                    break
            else:
                return False
        self._unreachable = None
        changed = list(map(id, loaders)) != list(map(id, self._loaders))
        if changed:
            self._loaders, self.are_paired = list(loaders), len(loaders) > 1
        for place, (loader, iterator) in enumerate(zip(loaders, iterators, strict=True)):
            pipeline = self._of(loader).pipeline
            if pipeline is not None:
                iterators[place] = pipeline.adopt(iterator)
        self._ours = [_weak(iterator) for iterator in iterators]
        return changed

    def told(self) -> tuple[Combined, tuple[str, ...], tuple[Hint, ...]]:
        """Return all that can be tuned, why the rest cannot, and what can be seen of the loaders: see `loaders`."""
        names = _names(getattr(self._fit_loop, "_combined_loader", None), len(self._loaders))
        found = {name: self._of(loader) for name, loader in zip(names, self._loaders, strict=True)}
        why = (self._unreachable,) if self._unreachable else reasons_of(found)
        return pipeline_of(found), why, hints_of(found)

    def batch_size(self) -> int | None:
        """Return how many samples the first loader says are in a batch, None where it does not."""
        return batch_size_of(self._loaders[0]) if self._loaders else None

    def let_go(self) -> bool:
        """Let each loader go whose pipeline delivered no batch; return whether there was one."""
        before = [self._of(loader) for loader in self._loaders]
        after = [let_go(loader, found) for loader, found in zip(self._loaders, before, strict=True)]
        self._found |= {id(loader): (loader, found) for loader, found in zip(self._loaders, after, strict=True)}
        return after != before

    def release_old(self) -> None:
        """Close the pools of loaders Lightning no longer holds."""
        held = {id(loader) for loader in self._loaders}
        for key in [key for key in self._found if key not in held]:
            _close(self._found.pop(key)[1])

    def close(self) -> None:
        """Close every pool, also when one of them fails; safe to call twice."""
        self._loaders, self._ours = [], []
        with ExitStack() as each:
            while self._found:
                each.callback(_close, self._found.popitem()[1][1])

    def _of(self, loader: Any) -> Found:
        if id(loader) not in self._found:
            self._found[id(loader)] = (loader, self._find(loader))
        return self._found[id(loader)][1]


def _leaves(loaders: Any) -> Iterator[Any]:
    """Yield the single loaders in what a user may give as train loaders: one, a collection, or a CombinedLoader."""
    if isinstance(loaders, Mapping):
        for value in loaders.values():
            yield from _leaves(value)
    elif isinstance(loaders, (list, tuple)):
        for value in loaders:
            yield from _leaves(value)
    elif isinstance(getattr(loaders, "flattened", None), list):
        yield from loaders.flattened
    else:
        yield loaders


def _weak(iterator: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(iterator)
    except TypeError:  # some built-in iterators
        return lambda: iterator


def _names(combined: Any, count: int) -> list[str]:
    given = getattr(combined, "iterables", None)
    if isinstance(given, Mapping) and len(given) == count:
        return [str(name) for name in given]
    return [str(place) for place in range(count)]


def _close(found: Found) -> None:
    if found.pipeline is not None:
        found.pipeline.close()
