"""One `fit` of a Lightning Trainer: the loaders, the timer, the tuner and the report, tied together."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intune_callbacks.config import TunerConfig
from intune_callbacks.history import History
from intune_callbacks.lightning_hooks import FetchHooks, TrainLoaders, samples_in
from intune_callbacks.monitor.device import CudaWait, cuda_wait
from intune_callbacks.monitor.resources import MachineProbe
from intune_callbacks.monitor.wait import StepTimer
from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.find import find
from intune_callbacks.report import build_report, end_card, write_report
from intune_callbacks.tuner import Tuner
from intune_callbacks.types import Clock, Observation

__all__ = ["Fit", "metrics"]

log = logging.getLogger(__name__)


class Fit:
    """From `setup` to `teardown` of one fit; never built when the mode is ``off``.

    Args:
        trainer: a Trainer of either Lightning.
        config: how to tune.
        mode_source: where the mode came from, for the report.
        run_dir: where the history and the report are written; None writes nothing.
        show_card: print the end card at rank zero.
    """

    def __init__(
        self, trainer: Any, config: TunerConfig, mode_source: str, run_dir: Path | None, show_card: bool
    ) -> None:
        self.trainer, self.config, self.mode_source, self.show_card = trainer, config, mode_source, show_card
        world = int(getattr(trainer, "world_size", 1))
        self.run_dir = run_dir / f"rank{trainer.global_rank}" if run_dir is not None and world > 1 else run_dir
        self.frozen: str | None = None
        self.tuner: Tuner | None = None
        self.timer = StepTimer(Clock())
        self.cuda: CudaWait | None = None
        self.loaders = TrainLoaders(
            trainer.fit_loop,
            lambda loader: find(
                loader,
                max_workers=config.max_workers,
                workers_kind=config.workers_kind,
                live=config.mode == "tune",
            ),
        )
        self.hooks = FetchHooks(trainer.fit_loop.epoch_loop, self._before_fetch, self._after_fetch)
        self.why: tuple[str, ...] = ()
        self._no_wait: str | None = None
        self._first_wait_frac: float | None = None
        self._outer_error: BaseException | None = None

    def attach(self) -> None:
        """Hook in, before Lightning asks for its loaders."""
        self._no_wait = self.hooks.attach()
        if self._no_wait is None:
            self.loaders.attach(self._requested)

    def start(self, restored: Mapping[str, Any]) -> None:
        """Take over the iterators Lightning has just made and begin to measure."""
        pipeline = Combined({})
        if self._no_wait is None and self.frozen is None:
            try:
                self.loaders.refresh()
                self.why = self.loaders.why()
                pipeline = self.loaders.pipeline()
            except Exception as error:
                self.give_up("the first look at the running loaders", error)
        if self.trainer.strategy.root_device.type == "cuda":
            self.cuda = cuda_wait()
        config = self.config
        self.tuner = Tuner(
            pipeline,
            config,
            probe=MachineProbe(
                local_ranks=_local_ranks(self.trainer), trainer_cpus=config.trainer_cpus, cpus=config.cpus
            ),
            history=History(None if self.run_dir is None else self.run_dir / "history.jsonl"),
        )
        if restored:
            self.tuner.load_state_dict(restored)

    def batch(self, batch: Any) -> None:
        """Give the tuner its turn: the step is over, the next batch not asked for yet."""
        if self.tuner is None or self.frozen is not None or self._no_wait is not None:
            return
        exposed_wait_s = None if self.cuda is None else self.cuda.read()
        decision = self.tuner.batch(self.timer.read(), samples_in(batch), exposed_wait_s)
        if decision is not None:
            if decision.applied:
                log.info("InTune: %s; %s -> %s", decision.reason, decision.before, decision.after)
            self._publish(decision.observation)

    def pause(self) -> None:
        """What follows, up to the next fetch, is neither data wait nor the model's time."""
        if self.tuner is not None:
            self.timer.pause()

    def give_up(self, where: str, error: BaseException) -> None:
        """Freeze the allocation where it is and say so once; training goes on."""
        if self.frozen is None:
            self.frozen = f"{type(error).__name__} in {where}: {error}"
            # Where warnings are errors, the promise not to raise into the training is the stronger one.
            with contextlib.suppress(RuntimeWarning):
                warnings.warn(
                    f"InTune froze, training goes on with the last allocation: {self.frozen}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the tuner's state for a checkpoint; empty before the first batch."""
        return {} if self.tuner is None else self.tuner.state_dict()

    def close(self, show_card: bool) -> dict[str, Any]:
        """Undo every hook, stop every pool, and return the report.

        Args:
            show_card: False keeps the end card from being printed, whatever the user asked for.
        """
        report: dict[str, Any] = {}
        for end in (self.hooks.detach, self.loaders.detach, self.loaders.close):
            try:
                end()
            except Exception as error:
                self.give_up("the end of the fit", error)
        try:
            report = self._report()
            if report and show_card and self.show_card and self.trainer.is_global_zero:
                print(end_card(report))
        except Exception as error:
            self.give_up("the report", error)
        return report

    def _report(self) -> dict[str, Any]:
        if self.tuner is None:
            return {}
        self.tuner.close()
        summary = self.tuner.summary()
        summary["frozen"] = self.frozen or summary["frozen"]
        note = "; ".join([self._no_wait] if self._no_wait is not None else self.why)
        report = build_report(summary, mode_source=self.mode_source, note=note or None)
        if self.run_dir is not None:
            write_report(self.run_dir, report)
        return report

    def _requested(self, loader: Any) -> None:
        if self.frozen is None:
            try:
                self.loaders.prepare(loader)
            except Exception as error:
                self.give_up("the first look at a train loader", error)

    def _before_fetch(self) -> None:
        if self.tuner is None or self.frozen is not None:
            return
        try:
            if self.loaders.refresh():
                self.tuner.rebind(self.loaders.pipeline())
                self.loaders.release_old()
                self.why = self.loaders.why()
            if self.cuda is not None:
                self.cuda.batch_end()  # here, so that the work of validation and of other callbacks is in it
                self.cuda.fetch_begin()
            self._outer_error = sys.exc_info()[1]
            self.timer.fetch_begin()
        except Exception as error:
            self.give_up("the hook before a fetch", error)

    def _after_fetch(self) -> None:
        if self.tuner is None or self.frozen is not None:
            return
        # Lightning calls this in a `finally`: an error on its way, StopIteration too, means no batch was delivered.
        self.timer.fetch_end(delivered=sys.exc_info()[1] is self._outer_error)
        if self.cuda is not None:
            self.cuda.fetch_end()

    def _publish(self, seen: Observation) -> None:
        trainer = self.trainer
        if self._first_wait_frac is None:
            self._first_wait_frac = seen.wait_frac
        # A string: self.log() takes numbers only, and would cost something at each step.
        trainer.progress_bar_metrics["in"] = f"{self._first_wait_frac:.0%}>{seen.wait_frac:.0%}"
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        for logger in trainer.loggers:
            separator = getattr(logger, "group_separator", "/")
            logger.log_metrics({k.replace("/", separator): v for k, v in metrics(seen).items()}, step=step)


def metrics(seen: Observation) -> dict[str, float]:
    """Return what is logged at a decision; the keys are listed in `InTuneCallback`."""
    resources = seen.resources
    logged = {
        "intune/throughput_samples_per_s": seen.samples_per_s,
        "intune/wait_frac": seen.wait_frac,
        "intune/rss_frac": resources.memory_used_bytes / max(1, resources.memory_limit_bytes),
    }
    if seen.exposed_wait_frac is not None:
        logged["intune/exposed_wait_frac"] = seen.exposed_wait_frac
    for stage in seen.stages:
        if stage.window_of is not None:
            logged[f"intune/window/{stage.window_of}"] = float(stage.current)
        else:
            logged[f"intune/{'workers' if stage.unit == 'workers' else 'window'}/{stage.name}"] = float(stage.current)
    for name, rates in seen.rates.items():
        logged[f"intune/queue_fill/{name}"] = rates.queue_fill
    return logged


def _local_ranks(trainer: Any) -> int:
    """Return how many ranks share this node's CPUs (LOCAL_WORLD_SIZE is not set by Lightning)."""
    devices = getattr(trainer, "num_devices", 1)
    return devices if isinstance(devices, int) and devices > 0 else 1
