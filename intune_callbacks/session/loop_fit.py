"""One training loop of the user's own: its loaders, the timer, the tuner and the report, tied together."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from intune_callbacks.measure.device import cuda_wait
from intune_callbacks.measure.wait import StepTimer, StepTotals
from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.length import length_of
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.fit import TunedFit
from intune_callbacks.session.loaders import hints_of, leave, left_of, let_go, look_for, pipeline_of, reasons_of
from intune_callbacks.session.loop_fetches import Together, Unseen, told
from intune_callbacks.session.ranks import place as place_of
from intune_callbacks.session.samples import Samples, batch_size_of
from intune_callbacks.types import Clock, Pipeline

__all__ = ["Fit"]

# The model has run once, so it has told where: looked for CUDA only then.
MEET_CUDA_AT = 2

_open: weakref.WeakValueDictionary[int, Fit] = weakref.WeakValueDictionary()  # no set: other threads add to it


class Fit(TunedFit):
    """From `live` to its end; never built when the mode is ``off``.

    Args:
        loaders: what the loop draws from; batches of the first one are the steps.
        restored: the tuner's state from a checkpoint, empty without one.

    Attributes:
        batches: of the whole run, None where nobody knows.
        is_closed: nothing is measured or tuned any more.
        together: the fetches that are told together.
    """

    _timer: StepTimer
    _why_restored = "this loader was tuned before, and goes on with what was found"

    def __init__(self, settings: Settings, loaders: Sequence[Any], restored: Mapping[str, Any] | None = None) -> None:
        rank, world, local_ranks = place_of()
        super().__init__(settings, rank, world)
        self.batches: int | None = None
        self.is_closed = False
        self._loaders = tuple(loaders)
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._close_others()
        for one in self._loaders:
            self.keep(one)
        self._found = [look_for(one, self.config, len(loaders) == 1, self.give_up) for one in self._loaders]
        self._pipeline = pipeline_of(self._by_name())
        self._timer = StepTimer()
        self._samples = Samples(batch_size_of(self._loaders[0]))
        self._fetches = [0] * len(self._loaders)
        self.together = Together(Clock(), self._samples.count)
        self._compiled = Unseen(self._found[0].pipeline)
        self._running: list[object] = [None] * len(self._loaders)
        self._is_asked = self._is_handed = False
        self._ended: StepTotals | None = None
        self.begin(self._pipeline, local_ranks, restored or left_of(self._loaders))
        _open[id(self)] = self

    # -- the loop ------------------------------------------------------------------------------------------------------

    def iterate(self, place: int, owner: Any) -> Iterator[Any]:
        """Return an iterator over a loader, made as the loop asks for it: an epoch begins if it is the first loader.

        Args:
            owner: what has to live as long as the iterator does.
        """
        if place == 0:
            self._epoch_begin()
        pipeline: Any = self._found[place].pipeline
        if hasattr(pipeline, "late"):
            with self.guarded("the start of an epoch"):
                # What could not be tuned before, for the tf.data operations were still being compiled.
                if self.tuner is not None and pipeline.late():
                    self.tuner.rebind(self._pipeline)
        # A tf.data pipeline is iterated in place of the user's dataset.
        inner = iter(getattr(pipeline, "dataset", self._loaders[place]))
        if pipeline is not None and self.frozen is None:
            with self.guarded("taking the loader over"):
                inner = pipeline.adopt(inner)
        return self.timed(inner, place, owner)

    def timed(self, inner: Any, place: int, owner: Any) -> Iterator[Any]:
        """Return a running iterator with each fetch timed; `owner` lives as long as it does."""
        iterator, self._running[place] = told(inner, self, place, owner)
        return iterator

    def again(self, place: int, token: object) -> None:
        """An epoch begins on an iterator that is used again."""
        if not self.is_closed:
            self._running[place] = token
            if place == 0:
                self._epoch_begin()

    def fetch_begin(self, place: int) -> None:
        """The loop asks for a batch: of the first loader, so its last step is over."""
        try:
            self._tell_together()
            if place == 0:
                self._step_over()
            self._before_fetch()
            self._timer.fetch_begin()
        except Exception as error:
            self.give_up("the moment before a fetch", error)

    def fetch_end(self, place: int, batch: Any, delivered: bool) -> None:
        """The loop has its batch, or its fetch raised: then none was `delivered`."""
        try:
            self._tell_together()
            self._timer.fetch_end(delivered, is_step=place == 0)
            self._after_fetch()
            self._fetches[place] += delivered
            self._is_asked |= place == 0
            if place == 0 and delivered:
                self._batch_samples = self._samples.count(batch)
                self._unseen += self._batch_samples
                if self._fetches[0] == MEET_CUDA_AT:
                    self._cuda = cuda_wait()
            if delivered and len(self._fetches) == 1 and self._fetches[0] >= MEET_CUDA_AT:
                self.together.until_s = self._next_look_s
                self.together.most = sys.maxsize if self._cuda is None else self._cuda.skips
        except Exception as error:
            self.give_up("the moment after a fetch", error)

    def handed_over(self, place: int) -> None:
        """A compiled function takes batches from here on: the steps of the one before are over."""
        if place == 0 and not self.is_closed:
            self._is_handed = True
            self._take_note()
            with self.guarded("a call of a compiled function"):
                self._timer.count(0, 0.0)
                self._step_over()

    def epoch_end(self, place: int, token: object, is_dropped: bool = False) -> None:
        """The loop has all batches of an iterator, or wants no more: what follows is a pause.

        Args:
            token: the iterator's; an older one than the last changes nothing.
            is_dropped: it was not read to its end, and is being finalised, in whatever thread and at whatever moment.
        """
        if self._running[place] is not token or os.getpid() != self._process:
            return
        self._running[place] = None
        if place == 0 and not self.is_closed:
            self._take_note()
            if not is_dropped:
                self.pause()
            self._ended = self._timer.left() if is_dropped else self._timer.read()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is neither data wait nor the model's time."""
        self.pause()
        try:
            yield
        finally:
            self._timer.resume()

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, show_card: bool) -> None:
        """Undo every patch, stop what no running loop needs, and make the report; a second call does nothing."""
        if self.is_closed or self.tuner is None:
            return
        self.is_closed = True
        _open.pop(id(self), None)
        self._take_note()
        left = self._timer.left()
        self.pause()
        with self.guarded("the end of the loop"):
            # What came behind the last epoch, or behind a loop that was left, is not the run's.
            totals = self._ended or left
            self.tuner.end(totals, self._unseen)
            if self.frozen is None and self.config.mode == "tune":
                leave(self._loaders, self.state_dict())
            self.check_reach(totals.steps)
            self.compile_beside()
        for place, found in enumerate(self._found):
            if found.pipeline is None:
                continue
            with self.guarded("the end of the loop"):
                # A loop that goes on gets the rest of its batches, and its workers end with it.
                (found.pipeline.close if self._running[place] is None else found.pipeline.release)()
        with self.guarded("the report"):
            found_of = self._by_name()
            self.unseen = self._compiled.why_none(self._is_asked or self._batch_size, self._is_handed)
            why = (*reasons_of(found_of), *([self.unseen] if self.unseen else []))
            self.report = self.conclude("; ".join(why), show_card, hints_of(found_of))
        # The report may be held for long; what was trained on need not.
        self.tuner, self._loaders, self._found, self._pipeline = None, (), [], Combined({})

    def abandoned(self, place: int) -> None:
        """Nothing refers to a loader any more."""
        if place != 0 or self.is_closed or os.getpid() != self._process:
            return
        show_card = issubclass(getattr(sys, "last_type", None) or KeyboardInterrupt, KeyboardInterrupt)
        if threading.get_ident() in (self._thread, threading.main_thread().ident):
            self.close(show_card)
            return
        # The garbage collector may call this inside any lock of ours; a thread of its own can wait for that lock.
        try:
            threading.Thread(target=self.close, args=(show_card,), name="intune-close").start()
        except RuntimeError:  # Python is on its way out
            self.close(show_card)

    def let_go(self) -> Pipeline | None:
        # A loader that was not asked for a batch yet may still deliver.
        left = [
            let_go(loader, found) if fetches else found
            for loader, found, fetches in zip(self._loaders, self._found, self._fetches, strict=True)
        ]
        if left == self._found:
            return None
        self._found = left
        self._pipeline = pipeline_of(self._by_name())
        return self._pipeline

    # -- inside --------------------------------------------------------------------------------------------------------

    def _close_others(self) -> None:
        """End the fits that have one of these loaders: two would patch it over each other."""
        mine = {id(loader) for loader in self._loaders}
        for other in [held() for held in _open.valuerefs()]:
            if other is None or other._process != self._process:  # of the process that this one was forked from
                continue
            if mine & {id(loader) for loader in other._loaders}:
                other.close(show_card=True)

    def _epoch_begin(self) -> None:
        with self.guarded("the start of an epoch"):
            self._ended = None
            self._tell_together()
            self._timer.left()  # the epoch before, if its iterator is still held
            self._timer.epoch_begin()
            self._thread = threading.get_ident()
            if self.tuner is not None:
                self.tuner.expect(length_of(self._loaders[0]), self.batches)

    def _step_over(self) -> None:
        timer = self._timer  # whose last fetch says without a look at the clock that it is too early
        is_late = timer.last_s >= self._next_look_s and timer.batches > 0
        if is_late and self.tuner is not None and self.frozen is None and self.is_look_due():
            self._look()

    def _tell_together(self) -> None:
        """Count the fetches since the last one that was told by itself."""
        waited_s = self.together.wait_s
        batches, samples = self.together.tell(self._timer)
        if self._cuda is not None:
            self._cuda.skip(batches, waited_s)
        self._fetches[0] += batches
        self._unseen += samples

    def _take_note(self) -> None:
        """Count what was fetched and not told by itself, by compiled functions too: Python did not see them."""
        with self.guarded("the count of batches"):
            self._tell_together()
            self._unseen += self._compiled.tell(self._timer, self._fetches[0])
            self._batch_samples = self._batch_samples or self._compiled.batch_samples

    def pause(self) -> None:
        self._take_note()
        super().pause()

    def compile_beside(self) -> None:
        for found in self._found:
            pipeline: Any = found.pipeline
            if hasattr(pipeline, "compile"):
                pipeline.compile()

    def _by_name(self) -> dict[str, Any]:
        return {str(place): found for place, found in enumerate(self._found)}
