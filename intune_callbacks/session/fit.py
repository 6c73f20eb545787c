"""What a fit under tuning does in every framework: start warm, take turns, freeze on an error, report at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from intune_callbacks.config import is_address, sourced
from intune_callbacks.errors import frozen_by, pass_on, stay_interrupted, warn
from intune_callbacks.measure.device import CudaWait
from intune_callbacks.measure.resources import MachineProbe
from intune_callbacks.measure.wait import Apart, StepTimer, StepTotals
from intune_callbacks.record.files import unwritable
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.fingerprint import versions
from intune_callbacks.record.history import History
from intune_callbacks.record.report import Report, Span, not_measured, write_report
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.cache import Cache
from intune_callbacks.session.found import found_by, send_found, write_found
from intune_callbacks.session.keras_timer import LoopTimer
from intune_callbacks.session.ranks import exchange
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.session.warm_start import WarmStart
from intune_callbacks.show.card import show
from intune_callbacks.show.page.commands import at_the_end
from intune_callbacks.types import Clock, Hint, Observation, Pipeline
from intune_callbacks.words import short_percent, six_digits

__all__ = ["TunedFit"]

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
"""Steps shorter than this share one look at the counters: with cold caches a look costs 50 to 200 us."""

COMPILE_AFTER_S = 10.0
"""A shorter training is not to notice the compiler of the tf.data operations: it begins at its end (ADR 0020)."""


class TunedFit:
    """One fit under tuning, as far as it is the same in every framework.

    Args:
        settings: the callback's; the end card is printed at rank zero only.
        rank: this process among those that train together.
        world: how many train together; each of several writes into a folder ``rank{r}`` of its own.

    Attributes:
        frozen: why nothing is tuned any more, None while all is well.
        tuner: the one loop, None until training has begun.
        waited: what the progress bar shows: the share of data wait at first and now; None before the first decision.
        warm: whether and why it started from another run.
        report: what `report.json` holds, once the fit is closed.
    """

    _timer: StepTimer | LoopTimer
    _why_restored = "a checkpoint was resumed, and its state goes first"

    def __init__(self, settings: Settings, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.config, self.mode_source, self.show_card = settings.config, settings.mode_source, settings.show_card
        self._sources = dict.fromkeys(settings.given, "argument")
        folder = settings.run_dir
        if folder is not None and (why := unwritable(folder)) is not None:
            # It could be written when the callback was made; a training is not ended for want of a report.
            warn(f"InTune writes no files: run_dir={str(folder)!r}: {why}. Training goes on and is tuned all the same")
            folder = None
        if folder is not None and world > 1:
            folder = folder / f"rank{rank}"
        # The training may go to another folder before its end; the card names it as the user did.
        self._named, self.run_dir = folder, None if folder is None else folder.absolute()
        self.frozen: str | None = None
        self.unseen = ""  # why no step of this training can be seen, and what would change that
        self.tuner: Tuner | None = None
        self.waited: str | None = None
        service = self.config.policy if is_address(self.config.policy) else None
        self.warm = WarmStart(settings.warm_start or service, rank, world)
        self.report: dict[str, Any] = {}
        self._cache = Cache(self.config, rank, world)
        self.now = Clock().wall
        self.validation = Apart(self.now)
        self._next_look_s = 0.0
        self._cuda: CudaWait | None = None
        self._unseen = self._batch_samples = 0
        self._batch_size = 0
        self._is_reached = False
        self._reach_since = 0

    def begin(self, pipeline: Pipeline, local_ranks: int, restored: Mapping[str, Any]) -> None:
        """Make the tuner.

        Args:
            local_ranks: processes that share this node's CPUs.
            restored: the state of a tuner to go on with, empty without one.
        """
        config = self.config
        self.tuner = Tuner(
            pipeline,
            config,
            probe=MachineProbe(local_ranks=local_ranks, trainer_cpus=config.trainer_cpus, cpus=config.cpus),
            history=History(None if self.run_dir is None else self.run_dir / "history.jsonl"),
            cache=self._cache,
        )
        if restored:
            self.warm.leave(self._why_restored)
            self.tuner.load_state_dict(restored)

    def keep(self, loader: Any, epochs: int | None = None) -> None:
        """Have what is known to be pure in a loader's datasets kept in memory; called before its workers start."""
        with self.guarded("the look for what can be kept"):
            self._cache.cut(loader, epochs)

    def is_look_due(self) -> bool:
        """Return whether the counters are to be looked at after this step; if so, the next look is a while away."""
        now_s = self.now()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + min(LOOK_EVERY_S, self.config.decide_every_s / 10.0)
        return True

    def turn(self, totals: StepTotals) -> None:
        """Give the tuner its turn behind a step, show what it decided, and once a batch's size is known, start warm."""
        assert self.tuner is not None
        if totals.wall_s > COMPILE_AFTER_S:
            self.compile_beside()
        if self._batch_samples and not self._batch_size:
            self._batch_size = self._batch_samples
            self.warm.begin(self.tuner, self._batch_size, versions())
        if self.tuner.is_warm:
            self.check_reach(totals.steps)
        samples, self._unseen = self._unseen, 0
        decision = self.tuner.batch(totals, samples, self.exposed_wait_s())
        if decision is None:
            return
        if decision.applied:
            log.info("InTune: %s; %s -> %s", decision.reason, decision.before, decision.after)
        wait = short_percent(decision.observation.wait_frac)
        self.waited = f"{wait if self.waited is None else self.waited.partition('>')[0]}>{wait}"
        self.publish(decision.observation)

    def _look(self) -> None:
        self.turn(self._timer.read())

    def pause(self) -> None:
        """What follows, up to the next fetch, is neither data wait nor the model's time."""
        with self.guarded("a pause"):
            if self._unseen and self.frozen is None and self.tuner is not None:
                self._look()
            self._timer.pause()

    def exposed_wait_s(self) -> float | None:
        """Return the total seconds the GPU idled for want of data; None without a GPU."""
        return None if self._cuda is None else self._cuda.read()

    def compile_beside(self) -> None:
        """Have the tf.data operations compiled beside the training, if that is still to be done."""

    def publish(self, seen: Observation) -> None:
        """Show a decision where the framework, if there is one, shows its figures."""

    def check_reach(self, steps: int) -> None:
        """Once for each set of loaders, behind its first step: let go what delivered none of the batches that came."""
        if self.tuner is None or self._is_reached or self.frozen is not None or steps <= self._reach_since:
            return
        self._is_reached = True
        with self.guarded("letting a loader go"):
            left = self.let_go()
            if left is not None:
                self.tuner.rebind(left)

    def loaders_changed(self, steps: int) -> None:
        """The trainer has other loaders from now on."""
        self._is_reached, self._reach_since = False, steps

    def let_go(self) -> Pipeline | None:
        """Let each loader go whose pipeline delivered no batch, and return what is left; None if all delivered."""
        return None

    def give_up(self, where: str, error: BaseException) -> None:
        """Freeze the allocation where it is and say so once; training goes on."""
        if self.frozen is None:
            self.frozen = frozen_by(error, where)
        else:
            pass_on(error)

    def _before_fetch(self) -> None:
        if self._cuda is not None:
            self._cuda.fetch_begin()

    def _after_fetch(self) -> None:
        if self._cuda is not None:
            self._cuda.fetch_end()

    @contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """An error inside freezes the allocation where it is; training goes on."""
        try:
            yield
        except Exception as error:
            self.give_up(where, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the tuner's state for a checkpoint; empty before the first batch."""
        return {} if self.tuner is None else self.tuner.state_dict()

    def conclude(self, note: str | None, show_card: bool, hints: Sequence[Hint] = (), **more: Any) -> dict[str, Any]:
        """Make the report, print the end card, and return what `report.json` holds; empty when training never began.

        Args:
            note, hints, more: as for `finish`.
            show_card: the training came to its end; False keeps the card from being printed, whatever the user asked.
        """
        try:
            with self.guarded("the report"):
                report = self.finish(note, together=show_card, hints=hints, **more)
                if report is not None:
                    if show_card and self.show_card and self.rank == 0:
                        with suppress(OSError, ValueError):  # nobody reads it: stdout is closed, or its reader is gone
                            show(report, self._folder())
                    return report.to_json()
            return {}
        finally:
            self._cache.close()
            stay_interrupted()

    def _folder(self) -> Path | None:
        """Return the run's folder by the name it was given, if that still leads there."""
        with suppress(OSError):  # the working directory is gone
            if self._named is not None and self._named.absolute() == self.run_dir:
                return self._named
        return self.run_dir

    def finish(
        self, note: str | None, together: bool = False, hints: Sequence[Hint] = (), **more: Any
    ) -> Report | None:
        """Write the last decision and the report, and return the report; None when training never began.

        Args:
            note: why nothing can be tuned and what would change that, if so.
            together: whether all ranks come to this end, so that they can be compared.
            hints: oddities of the user's pipeline that can be seen without running it.
            more: further entries of the report, in plain JSON types.
        """
        if self.tuner is None:
            return None
        self.tuner.close()
        summary = self.tuner.summary()
        whole = replace(summary.whole or Span(), validation_s=six_digits(self.validation.total_s) or None)
        summary = replace(summary, whole=whole, frozen=self.frozen or summary.frozen, hints=(*hints, *summary.hints))
        settings = sourced(self.config, self.mode_source, self._sources)
        settings["warm_start"] = {"value": self.warm.source, "source": self._sources.get("warm_start", "default")}
        report = build_report(summary, mode_source=self.mode_source, note=note or None, settings=settings)
        if self.unseen and not summary.steps:
            report = not_measured(report, self.unseen)
        report = replace(report, warm_start=self.warm.entry, cache=self._cache.use(), more=more)
        report = self.in_words(report)
        self._write(report)  # before the exchange, after which rank 0 reads the files of all
        self._save(self.tuner)
        ranks = exchange(report, self.rank, self.world) if together else None
        if ranks is not None:
            report = replace(report, ranks=ranks)
            self._write(report)
        if self.run_dir is not None and self.rank == 0:
            at_the_end(self.run_dir if self.world == 1 else self.run_dir.parent)
        return report

    def in_words(self, report: Report) -> Report:
        """Return the report in the words of what the user writes, where that is no DataLoader."""
        return report

    def _write(self, report: Report) -> None:
        """Write the report; without room for it there is still the card."""
        if self.run_dir is not None:
            try:
                write_report(self.run_dir, report)
            except OSError as error:
                warn(f"InTune could not write its report to {self.run_dir}: {error}")
                self.run_dir = None

    def _save(self, tuner: Tuner) -> None:
        """Leave what a later run can start from, in the folder and with the agent service."""
        if self.frozen is not None or not self._batch_size:
            return
        setting: dict[str, Any] = {"batch_size": self._batch_size, "ranks": self.world, "versions": versions()}
        with self.guarded("writing found.yaml"):
            found = found_by(tuner, **setting, started_from=self.warm.used_source)
            if found is None:
                return
            if self.run_dir is not None:
                try:
                    write_found(self.run_dir, *found)
                except OSError as error:
                    warn(f"InTune could not write to {self.run_dir} what a later run can start from: {error}")
            if is_address(self.config.policy) and (why := send_found(self.config.policy, *found)) is not None:
                warn(f"InTune could not leave with {self.config.policy} what a later run can start from: {why}")
