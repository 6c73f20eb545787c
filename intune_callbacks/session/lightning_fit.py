"""One `fit` of a Lightning Trainer: the loaders, the timer, the tuner and the report, tied together."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from intune_callbacks.measure.device import cuda_wait
from intune_callbacks.measure.wait import StepTimer
from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.find import Found
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.fit import TunedFit
from intune_callbacks.session.lightning_hooks import BarField, FetchHooks, TrainLoaders
from intune_callbacks.session.loaders import found_in
from intune_callbacks.session.metrics import metrics
from intune_callbacks.session.samples import Samples
from intune_callbacks.types import Hint, Observation, Pipeline

__all__ = ["Fit"]


class Fit(TunedFit):
    """From `setup` to `teardown` of one fit; never built when the mode is ``off``."""

    _timer: StepTimer

    def __init__(self, trainer: Any, settings: Settings) -> None:
        super().__init__(settings, trainer.global_rank, int(getattr(trainer, "world_size", 1)))
        self.trainer = trainer
        self._timer = StepTimer()
        self._done = 0  # steps
        self._samples = Samples()
        self.loaders = TrainLoaders(trainer.fit_loop, self._found_in)
        self.hooks = FetchHooks(trainer.fit_loop.epoch_loop, self._before_fetch, self._after_fetch)
        self.bar = BarField()
        self.why: tuple[str, ...] = ()
        self.hints: tuple[Hint, ...] = ()
        self._no_wait: str | None = None
        self._outer_error: BaseException | None = None

    def _found_in(self, loader: Any) -> Found:
        # What comes first decides what an epoch that is cut short gets, and what is paired with what.
        limit = getattr(self.trainer, "limit_train_batches", 1.0)
        is_whole = isinstance(limit, float) and limit >= 1.0
        return found_in(loader, self.config, is_alone=is_whole and not self.loaders.are_paired)

    def attach(self) -> None:
        """Hook in, before Lightning asks for its loaders."""
        self._no_wait = self.hooks.attach()
        if self._no_wait is None:
            self.loaders.attach(self._requested)

    def start(self, restored: Mapping[str, Any]) -> None:
        """Take over the iterators Lightning has just made and begin to measure."""
        pipeline = Combined({})
        if self._no_wait is None and self.frozen is None:
            with self.guarded("the first look at the running loaders"):
                self.loaders.refresh()
                self._samples = Samples(self.loaders.batch_size())
                pipeline, self.why, self.hints = self.loaders.told()
        if self.trainer.strategy.root_device.type == "cuda":
            self._cuda = cuda_wait()
        self.begin(pipeline, _local_ranks(self.trainer), restored)

    def batch(self, batch: Any) -> None:
        """Give the tuner its turn: the step is over, the next batch not asked for yet."""
        if self.tuner is None or self.frozen is not None or self._no_wait is not None:
            return
        self._done += 1
        self._batch_samples = self._samples.count(batch)
        self._unseen += self._batch_samples
        if self.is_look_due():
            self._look()

    def let_go(self) -> Pipeline | None:
        if not self.loaders.let_go():
            return None
        pipeline, self.why, self.hints = self.loaders.told()
        return pipeline

    def epoch_begin(self) -> None:
        """What follows, up to the first batch, is the start of an epoch."""
        if self.tuner is not None:
            self._timer.epoch_begin()
            self.tuner.expect(*_length(self.trainer, self._timer.read().steps))

    def end(self) -> None:
        """The training is over."""
        if self.tuner is not None:
            totals = self._timer.read()
            # Lightning knows an epoch's length and asks for no batch behind it: only the hook tells of its last step.
            self.tuner.end(replace(totals, steps=max(totals.steps, self._done)))
            self._timer.pause()

    def close(self, show_card: bool) -> dict[str, Any]:
        """Undo every hook, stop every pool, and return the report."""
        for end in (self._check_last, self.bar.detach, self.hooks.detach, self.loaders.detach, self.loaders.close):
            with self.guarded("the end of the fit"):
                end()
        note = "; ".join([self._no_wait] if self._no_wait is not None else self.why)
        return self.conclude(note, show_card, self.hints)

    def _check_last(self) -> None:
        self.check_reach(self._timer.read().steps)

    def _requested(self, loader: Any) -> None:
        if self.frozen is None:
            epochs = self.trainer.fit_loop.max_epochs
            self.keep(loader, epochs if isinstance(epochs, int) and epochs >= 0 else None)
            with self.guarded("the first look at a train loader"):
                self.loaders.prepare(loader)

    def _before_fetch(self) -> None:
        if self.tuner is None or self.frozen is not None:
            return
        try:
            if self.loaders.refresh():
                pipeline, self.why, self.hints = self.loaders.told()
                self.tuner.rebind(pipeline)
                self._samples = Samples(self.loaders.batch_size())
                self.loaders_changed(self._timer.read().steps)
                self.loaders.release_old()
            super()._before_fetch()
            self._outer_error = sys.exc_info()[1]
            self._timer.fetch_begin()
        except Exception as error:
            self.give_up("the hook before a fetch", error)

    def _after_fetch(self) -> None:
        if self.tuner is None or self.frozen is not None:
            return
        # Lightning calls this in a `finally`: an error on its way, StopIteration too, means no batch was delivered.
        self._timer.fetch_end(delivered=sys.exc_info()[1] is self._outer_error)
        super()._after_fetch()

    def publish(self, seen: Observation) -> None:
        trainer = self.trainer
        # A string: self.log() takes numbers only, and would cost something at each step.
        self.bar.show(getattr(trainer, "progress_bar_callback", None), self.waited)
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        for logger in trainer.loggers:
            separator = getattr(logger, "group_separator", "/")
            logger.log_metrics({k.replace("/", separator): v for k, v in metrics(seen).items()}, step=step)


def _length(trainer: Any, steps: int) -> tuple[int | None, int | None, int | None]:
    """Return the batches of one epoch and of the whole fit, and the epochs left, None for what is not known."""
    loop = trainer.fit_loop
    epoch, epochs, most = loop.max_batches, loop.max_epochs, loop.max_steps
    epoch = int(epoch) if isinstance(epoch, (int, float)) and 0 < epoch < math.inf else None
    left = []
    epochs_left = epochs - trainer.current_epoch if isinstance(epochs, int) and epochs >= 0 else None
    if epoch is not None and epochs_left is not None:
        left.append(epoch * epochs_left)
    if isinstance(most, int) and most >= 0:
        left.append((most - trainer.global_step) * int(getattr(trainer, "accumulate_grad_batches", 1)))
    return epoch, steps + max(0, min(left)) if left else None, epochs_left


def _local_ranks(trainer: Any) -> int:
    """Return how many ranks share this node's CPUs: Lightning's devices, or in each of Ray Train's workers, theirs."""
    devices, told = getattr(trainer, "num_devices", 1), os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, devices if isinstance(devices, int) else 1, int(told) if told.isdigit() else 1)
