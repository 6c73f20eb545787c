"""One `model.fit` of Keras: the dataset or loader, what is measured, the tuner and the report, tied together."""

from __future__ import annotations

import _thread
import atexit
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from intune_callbacks.decide.reward import worth
from intune_callbacks.measure.device import cuda_wait
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.find import Found
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.fit import TunedFit
from intune_callbacks.session.keras_bar import Bar, put_first
from intune_callbacks.session.keras_hooks import Fetches, TrainData, batch_rows, from_fit, why_not
from intune_callbacks.session.keras_source import take_over
from intune_callbacks.session.keras_timer import LoopReading, LoopTimer
from intune_callbacks.session.loaders import let_go
from intune_callbacks.session.metrics import stage_metrics
from intune_callbacks.session.ranks import place
from intune_callbacks.types import Clock, Hint, Pipeline

__all__ = ["Fit"]


class Fit(TunedFit):
    """From `on_train_begin` to `on_train_end` of one fit; never built when the mode is ``off``.

    Attributes:
        why: what can be changed, what cannot, and the smallest change that would help.
    """

    _timer: LoopTimer
    _why_restored = "this callback has trained on the same data before, and goes on with what it found"

    def __init__(self, settings: Settings) -> None:
        rank, world, self._local_ranks = place()
        super().__init__(settings, rank, world)
        self.data: TrainData | None = None
        self.pipeline: Pipeline = Combined({})
        self.why = ""
        self.hints: tuple[Hint, ...] = ()
        self._state: dict[str, Any] = {}
        self._source: weakref.ref[Any] | None = None
        self._clock = Clock()
        self._sink: Any = None
        self._from_python = False
        self._rows = 1
        self._bar = Bar(None)
        self._fetches = Fetches(self._clock, self._before_fetch, self._after_fetch)
        self._begin_s = self._clock.wall()
        self._timer = LoopTimer(self._read, self._clock)
        self._begun = 0
        self._counted = 0
        self._epoch = StepTotals()
        self._epoch_steps = self._epoch_samples = 0
        self._epoch_exposed_s = 0.0
        self._keys: tuple[str, ...] = ()
        self._finalizer: Any = None
        self._closed = False

    # -- what the callback forwards ------------------------------------------------------------------------------------

    def start(self, frame: Any, callback: Any, last: Fit | None) -> None:
        """Find what is trained on, put the tunable in its place, and begin.

        Args:
            last: the callback's fit before this one; if it had the same data, its allocation is where this one starts.
        """
        iterator, callbacks = from_fit(frame)
        put_first(callbacks, callback)
        self._bar = Bar(callbacks)
        self.why = self.unseen = why_not(iterator, frame)
        if not self.why:
            with self.guarded("the first look at the training data"):
                self.data = TrainData(iterator)
                self.keep(self.data.source)
                # Not `callback.model`, which brings the state of a training on JAX into its model.
                self._attach(self.data, getattr(getattr(callback, "_model", None), "train_function", None))
            # `on_train_end` is not called after an exception; then this fit ends with its iterator, or with Python.
            self._finalizer = weakref.finalize(iterator, _abandoned, self)
            _open.add(self)
            # Behind what `weakref` has registered, and so called before it.
            atexit.unregister(_close_open)
            atexit.register(_close_open)
        goes_on = last is not None and self._source is not None and last._source == self._source
        self.begin(self.pipeline, self._local_ranks, last._state if last is not None and goes_on else {})

    def let_go(self) -> Pipeline | None:
        data, found = self.data, Found(self.pipeline, self.why, self.hints)  # type: ignore[arg-type]
        if data is None or data.loader is None or not self.pipeline.stages():
            return None
        left = let_go(data.loader, found)
        if left is found:
            return None
        data.in_adapter("_dataloader", data.loader)
        self.pipeline, self.why, self.hints = Combined({}), left.why, left.hints
        return self.pipeline

    def epoch_begin(self, epoch: int, params: Mapping[str, Any]) -> None:
        """From here on the loop waits for data or computes.

        Args:
            params: what Keras tells its callbacks: ``epochs`` and, once it is known, ``steps``.
        """
        self._begin_late()
        steps, epochs = params.get("steps"), params.get("epochs")
        if self.tuner is not None and isinstance(epochs, int):
            left = epochs - epoch
            batches = self._timer.read().steps + steps * left if isinstance(steps, int) else None
            self.tuner.expect(steps if isinstance(steps, int) else None, batches, left)
        self._timer.epoch_begin()

    def batch_begin(self) -> None:
        """Give the tuner its turn: the steps before this one are over."""
        self._begun += 1
        if self.tuner is None or self.frozen is not None or self._begun < 2:
            return
        if not self.is_look_due() and not self._timer.is_starting:
            return
        # The first step compiles the model and starts the pipeline: it is no example of what follows.
        self._timer.resume()
        totals, samples = self._timer.read(), self._timer.samples
        self._unseen, self._counted = samples - self._counted, samples
        self._batch_samples = round(samples / totals.steps) if totals.steps else 0
        self.turn(totals)
        self._bar.show(self.waited)

    def compile_beside(self) -> None:
        if self._sink is not None:
            self._sink.compile()

    def epoch_logs(self) -> dict[str, float]:
        """Return what is logged of the epoch just finished; the keys are the same in every epoch."""
        totals, (untimed, untimed_samples) = self._timer.read(), self._timer.untimed
        steps, samples = totals.steps - untimed, self._timer.samples - untimed_samples
        wait_s = totals.wait_s - self._epoch.wait_s
        active_s = wait_s + totals.model_s - self._epoch.model_s
        assert self.tuner is not None
        (stages, resources), counters = self.tuner.setting(), self.pipeline.stats().stages
        logged = {"intune/rss_frac": _ratio(resources.memory_used_bytes, resources.memory_limit_bytes)}
        if self._read().delivered:  # where no batch is ever seen, nothing is known
            logged["intune/throughput_samples_per_s"] = _ratio(samples - self._epoch_samples, active_s)
            logged["intune/wait_frac"] = _ratio(wait_s, active_s)
            cpu_shares = {name: _ratio(reading.cpu_s, reading.busy_s) for name, reading in counters.items()}
            batches_per_s = _ratio(steps - self._epoch_steps, active_s)
            logged["intune/reward"] = worth(batches_per_s, stages, cpu_shares, resources)
        exposed_s = self.exposed_wait_s()
        if exposed_s is not None:
            logged["intune/exposed_wait_frac"] = min(1.0, _ratio(exposed_s - self._epoch_exposed_s, active_s))
            self._epoch_exposed_s = exposed_s
        logged |= stage_metrics(stages)
        for name, reading in counters.items():
            logged[f"intune/queue_fill/{name}"] = min(1.0, _ratio(reading.queued, reading.capacity))
        self._epoch, self._epoch_steps, self._epoch_samples = totals, steps, samples
        # Those of a later epoch may be others, as of stages that could be tuned from then on only: columns of several
        # lengths, of which pandas makes no table.
        self._keys = self._keys or tuple(logged)
        return {key: logged.get(key, math.nan) for key in self._keys}

    def close(self, show_card: bool) -> None:
        """Undo every hook, stop every pool, and make the report; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        if self._finalizer is not None:
            self._finalizer.detach()
        for end in self._ends():
            with self.guarded("the end of the fit"):
                end()
        with self.guarded("the end of the fit"):
            if self._sink is not None and self.data is not None and self.data.own:  # known at the end only
                self.why, self.hints = self._sink.why, self._sink.hints
            self._state = self.state_dict()
            if self.tuner is not None:  # it has not heard of the last steps
                self.tuner.end(self._timer.read(), self._timer.samples - self._counted)
        with self.guarded("the report"):
            note = None if self.pipeline.stages() else self.why
            self.report = self.conclude(note, show_card, self.hints, pipeline=self.why or None)
        # The callback may live on for long; what the user trained on need not.
        self.tuner, self.data, self._sink, self.pipeline = None, None, None, Combined({})

    # -- inside --------------------------------------------------------------------------------------------------------

    def _attach(self, data: TrainData, step: Any) -> None:
        config, tune = self.config, self.config.mode == "tune"
        self.why = data.why
        self.unseen = data.why if data.is_spread else ""
        self._timer = LoopTimer(self._read, self._clock, data.together, self._begin_s)
        found = take_over(data, config, self._clock, self.give_up)
        if found is not None:
            self.why, self.hints = found.why, found.hints
            self.pipeline = found.pipeline or self.pipeline
            self._source = weakref.ref(data.source)
        if data.dataset is not None:
            # Only here: TensorFlow is there already when there is a dataset.
            from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline, is_compiled

            self._rows = batch_rows(data.dataset) or data.batch_rows or 1
            # What Keras makes of arrays, generators and loaders runs through a dataset, too: it is timed, not changed.
            if data.own or is_compiled():
                self._sink = sink = DatasetPipeline(
                    data.dataset,
                    clock=self._clock,
                    max_workers=config.max_workers,
                    live=tune and data.own,
                    own=data.own,
                    wait=False,
                    in_order=config.order == "same",
                )
                data.give_dataset(sink.dataset)
                if data.own:
                    self.pipeline = sink
                    self._source = weakref.ref(data.dataset)
        data.time(self._fetches, self._watched, step)
        if data.on_torch:
            self._cuda = cuda_wait()

    def _begin_late(self) -> None:
        """Tune what could not be tuned before, for our operations were still being compiled."""
        data, sink = self.data, self._sink
        if data is None or sink is None or not data.restarts or not sink.late():
            return
        # What was fetched before is counted in Python, and where every fetch can be, the rest is, too.
        self._from_python = data.in_python
        data.give_dataset(sink.dataset)
        if data.own and self.tuner is not None:
            self.tuner.rebind(sink)

    def _read(self) -> LoopReading:
        """The sink knows best, where there is one: the fetch in Python also holds conversions of the batch."""
        fetches = self._fetches
        waits = None if self._sink is None else self._sink.waits()
        if waits is None or not waits.delivered or self._from_python:
            return LoopReading(fetches.delivered, fetches.wait_s, fetches.samples)
        if self.data is not None and self.data.in_python:
            return LoopReading(waits.delivered, waits.wait_s, fetches.samples)
        samples = fetches.samples + (waits.samples or waits.delivered * self._rows)
        return LoopReading(fetches.delivered + waits.delivered, fetches.wait_s + waits.wait_s, samples)

    def _watched(self) -> int:
        return 0 if self._sink is None else self._sink.waits().iterators

    def _ends(self) -> Iterator[Any]:
        yield lambda: self.check_reach(self._timer.read().steps)
        yield self._timer.pause  # while the counters can still be read
        yield self._bar.close
        if self.data is not None:
            yield self.data.restore
        yield self.pipeline.close
        yield self.compile_beside
        if self._sink is not None:
            yield self._sink.close


_open: weakref.WeakSet[Fit] = weakref.WeakSet()


def _close_open() -> None:
    """Close what an error has left open, now that Python ends: a thread of `_abandoned` would be cut off."""
    for fit in list(_open):
        fit.close(_is_interrupted())


def _is_interrupted() -> bool:
    return getattr(sys, "last_type", None) is KeyboardInterrupt


def _abandoned(fit: Fit) -> None:
    """Close a fit whose data is gone."""
    interrupted = _is_interrupted()
    try:
        # The garbage collector may call this inside any lock of ours; a thread of its own can wait for that lock.
        _thread.start_new_thread(_close_apart, (fit, interrupted))
    except RuntimeError:  # Python is on its way out
        fit.close(interrupted)


def _close_apart(fit: Fit, interrupted: bool) -> None:
    """Close a fit in a thread that `threading` knows: of any other, whoever asks for it there, it keeps a dummy."""
    try:
        threading.Thread(target=fit.close, args=(interrupted,), name="intune-close", daemon=True).start()
    except RuntimeError:  # no thread is to be had, or Python is on its way out
        fit.close(interrupted)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
