"""An iterable-style DataLoader whose dataset calls `later`: its workers stay, and helpers may stand beside them."""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import DataLoader, _MultiProcessingDataLoaderIter

from intune_callbacks.pipelines.base import MAX_PROCESSES, clamp
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.torch.calls import Shared
from intune_callbacks.pipelines.torch.helpers import Helpers
from intune_callbacks.pipelines.torch.hooks import hook_of
from intune_callbacks.pipelines.torch.later import Begin, Collate
from intune_callbacks.pipelines.torch.reach import has_own_iterator
from intune_callbacks.pipelines.torch.window import WORKERS, WindowLoader
from intune_callbacks.pipelines.watched import FOLLOWS_WORKERS, WORKERS_KNOB, Watch
from intune_callbacks.pipelines.worker_cost import Startup
from intune_callbacks.types import Allocation, Clock, PipelineStats, Stage

__all__ = ["HelpedLoader", "cannot_help", "ends_known"]

# How deep datasets that hold each other are looked into. A choice.
NESTED = 4


def ends_known(loader: DataLoader[Any]) -> bool:
    """Return whether it is known which function makes the samples of an iterable-style loader: by `later` or a hook."""
    # LitData's loader makes iterators of its own, which do what torch's do.
    if has_own_iterator(loader) and not type(loader).__module__.startswith("litdata."):
        return False
    return hook_of(loader.dataset) is not None or _calls_later(loader.dataset)


def _calls_later(dataset: Any, depth: int = NESTED) -> bool:
    """Return whether a dataset, one inside it, or the module of one says `later`.

    Args:
        depth: how many of them are inside each other.
    """
    by_name = sys.modules.get("intune_callbacks.pipelines.later")
    if by_name is None:
        return False  # nobody has asked for it
    held = [value for kind in type(dataset).__mro__ for value in vars(kind).values()]
    held += [
        value
        for kind in type(dataset).__mro__
        if kind.__module__ != "torch.utils.data.dataset"
        for value in vars(sys.modules.get(kind.__module__, object)).values()
    ]
    own = list(getattr(dataset, "__dict__", {}).values())
    if any(value is by_name.later or type(value) is by_name.Later for value in (*held, *own)):
        return True
    inside = [value for value in own if issubclass(type(value), IterableDataset)]
    return depth > 1 and any(_calls_later(value, depth - 1) for value in inside)


def cannot_help(loader: DataLoader[Any]) -> str:
    """Return why a loader whose dataset calls `later` cannot have helpers, empty where it can."""
    given = loader.multiprocessing_context
    # Not asked of a context: that would choose the default for good.
    method = (
        multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if given is None
        else given.get_start_method()
    )
    if method != "fork":
        return f"its workers are started by {method}, and helpers need fork"
    if not loader.in_order:
        return "with in_order=False batches come as they are finished, which helpers would change"
    return ""


class HelpedLoader(WindowLoader):
    """The same as its base, and its stage `load` is live from the user's number on: workers and helpers together.

    Args:
        loader: the user's; its dataset calls `later`.
        max_workers: upper limit of `load`, unless the user's own number is higher.

    Attributes:
        why_not: why the last wanted numbers are not in force, empty if they are.
    """

    def __init__(self, loader: DataLoader[Any], *, clock: Clock, max_workers: int | None = None) -> None:
        super().__init__(loader, clock=clock)
        self._own = loader.num_workers
        self._high = max(self._own, max_workers or MAX_PROCESSES)
        self._workers = self._own
        self._counters, self._helpers_startup = Counters(), Startup()
        self._watch = Watch(self._own, self._window, clock, self._counters)
        self._helpers: weakref.WeakKeyDictionary[Any, Helpers] = weakref.WeakKeyDictionary()
        self._refused = self.why_not = ""
        self._is_counted = self._is_known = False

    # -- taking part ---------------------------------------------------------------------------------------------

    def _make(self) -> Any:
        if self._refused:
            return super()._make()
        loader = self._loader
        helpers = Helpers(loader, self._clock, self._counters, self._helpers_startup, self._is_known)
        collate = Collate(loader.collate_fn)
        own = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
        begin = Begin(loader.worker_init_fn, helpers.shared, collate, hook_of(loader.dataset))
        helpers.shared.board[Shared.ON] = int(self._workers > self._own)
        vars(loader).update(collate_fn=collate, worker_init_fn=begin)
        try:
            iterator = super()._make()
        finally:
            vars(loader).update(own)
        if _is_torchs(iterator) and iterator._collate_fn is collate:
            helpers.attach(iterator)
            self._helpers[iterator] = helpers
        else:
            helpers.close()
        return iterator

    def _take(self, iterator: Any) -> None:
        super()._take(iterator)
        self._watch.begin(iterator)
        self._apply()

    def _fetch(self, iterator: Any) -> Any:
        helpers = self._helpers.get(iterator)
        if helpers is None:
            return self._watch.fetch(partial(super()._fetch, iterator))
        try:
            return self._counted(iterator, helpers)
        except StopIteration:
            if not self._loader.persistent_workers:
                helpers.close()
            raise
        finally:
            self._hear(helpers)

    def _counted(self, iterator: Any, helpers: Helpers) -> Any:
        """Return the next batch; who counts is the one who knows: from outside, or where helpers are."""
        before, self._is_counted = self._is_counted, helpers.is_used
        if helpers.is_used:
            if not before:
                self._watch.end()
            helpers.jobs.grow()
            return super()._fetch(iterator)
        if before:
            self._watch.begin(iterator)
        return self._watch.fetch(partial(super()._fetch, iterator))

    def _was_sent(self, iterator: Any, number: int) -> None:
        helpers = self._helpers.get(iterator)
        if helpers is not None:
            helpers.sent(number)

    def _running_helpers(self) -> Helpers | None:
        iterator = self._iterator
        return None if iterator is None else self._helpers.get(iterator)

    def _hear(self, helpers: Helpers) -> None:
        """Take over what an iterator has learned of its dataset."""
        self._is_known |= helpers.is_proved
        if helpers.refused and not self._refused:
            self._refused = self.why_not = helpers.refused
            self._workers = self._own
        elif helpers.jobs.why_not:
            self.why_not = helpers.jobs.why_not
            self._workers = self._own + helpers.jobs.wanted

    # -- the pipeline protocol -----------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        workers, window = super().stages()
        iterator = self._iterator
        if self._refused:
            remark = f"was {self._own}; the samples' {FOLLOWS_WORKERS}; no helpers beside them: {self._refused}"
            return replace(workers, knob=f"{WORKERS_KNOB}  # {remark}"), window
        if iterator is not None and iterator not in self._helpers:
            return workers, window
        each_s = 0.0 if self._loader.persistent_workers else self._helpers_startup.each_s
        knob = f"# num_workers={self._own}, the others are helpers"
        live = Stage(WORKERS, "cpu", "workers", self._own, self._high, self._workers, knob=knob, startup_s=each_s)
        return live, window

    def stats(self) -> PipelineStats:
        helpers = self._running_helpers()
        if helpers is not None and helpers.is_used:
            reading = self._counters.reading(helpers.queued, self._window, helpers.worker_bytes())
        else:
            reading = self._watch.reading(self._window)
        return PipelineStats(self._clock.wall(), self._delivered, {WORKERS: reading})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        if wanted.get(WORKERS, self._workers) != self._workers:
            self._workers, self.why_not = wanted[WORKERS], ""
            self._apply()
        super().resize(wanted)
        return {stage.name: stage.current for stage in self.stages()}

    def _apply(self) -> None:
        iterator, helpers = self._iterator, self._running_helpers()
        if helpers is None or iterator._shutdown:
            return
        wanted = self._workers - self._own
        if wanted != helpers.jobs.wanted:
            helpers.resize(wanted, iterator)
            self._hear(helpers)

    def trim(self) -> None:
        """End the helpers that are only kept for later."""
        helpers = self._running_helpers()
        if helpers is not None and helpers.jobs.pool is not None:
            helpers.jobs.pool.trim()

    def release(self) -> None:
        """Give the loader its own way back; an iterator that runs has no helpers any more, and goes on without."""
        for helpers in list(self._helpers.values()):
            helpers.let_go()
        super().release()


def _is_torchs(iterator: Any) -> bool:
    """Return whether an iterator does with its workers' results what torch's own does, whatever it does besides."""
    kind, own = type(iterator), _MultiProcessingDataLoaderIter
    names = ("_process_data", "_next_data", "_get_data", "_try_get_data", "_reset")
    return issubclass(kind, own) and all(getattr(kind, name) is getattr(own, name) for name in names)
