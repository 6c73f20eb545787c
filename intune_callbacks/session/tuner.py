"""The one loop: observe, decide, guard, resize, record; never an error into the training, never a long wait."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from intune_callbacks.config import TunerConfig
from intune_callbacks.errors import frozen_by, warn
from intune_callbacks.guard.arbiter import capped, changes, movable, resolve
from intune_callbacks.guard.guard import Guard
from intune_callbacks.guard.net import Net
from intune_callbacks.measure.freed import Freed
from intune_callbacks.measure.pace import Pace
from intune_callbacks.measure.resources import Beyond, MachineProbe
from intune_callbacks.measure.steady import NO_ROUND, round_of
from intune_callbacks.measure.wait import StepTotals
from intune_callbacks.measure.window import Window
from intune_callbacks.record.before_after import BeforeAfter
from intune_callbacks.record.history import Decision, History
from intune_callbacks.record.report import Memory, Report, StageRow
from intune_callbacks.service import policy_of
from intune_callbacks.session.cache import Cache
from intune_callbacks.types import Allocation, Clock, Observation, Pipeline, Policy, Probe, Resources, Stage

__all__ = ["Tuner"]


class Tuner:
    """Tunes one running pipeline from the thread that trains.

    Args:
        pipeline: what to tune; whoever made it closes it.
        config: how; its mode is ``observe``, ``advise`` or ``tune``.
        policy: who chooses; by default `config.policy`.
        probe: what the machine has; by default this machine.
        clock: times the resizes.
        history: where decisions are kept; by default in memory only.
        cache: what is kept of pure functions' results, in the memory that the pipeline does not need.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        config: TunerConfig,
        *,
        policy: Policy | None = None,
        probe: Probe | None = None,
        clock: Clock | None = None,
        history: History | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.frozen: str | None = None
        self.history = history if history is not None else History()
        self._pipeline, self.config, self._clock = pipeline, config, clock or Clock()
        self.policy = policy or policy_of(config)
        probe = probe or MachineProbe(trainer_cpus=config.trainer_cpus, cpus=config.cpus)
        me = weakref.ref(self)  # in a cycle, the user's loader would live until a collection
        self._probe = Beyond(probe, lambda: getattr(me(), "_pipeline", None))
        self._guard, self._window, self._before_after = Guard(config), Window(), BeforeAfter()
        self._freed = Freed(self._clock.wall)
        self._cache = cache or Cache(replace(config, mode="off"))
        self._net = Net(config.decide_every_s if config.mode == "tune" else 0.0)
        self._stages: tuple[Stage, ...] = ()
        self._carried, self._pace, self._round = Allocation(), Pace(config, self._probe), NO_ROUND

    @property
    def is_warm(self) -> bool:
        """True once the warm-up is over."""
        return self._pace.is_warm

    def batch(self, totals: StepTotals, samples: int, exposed_wait_s: float | None = None) -> Decision | None:
        """Take note of one batch; observe and decide if it is time. Never raises: an internal error freezes the tuner.

        Args:
            totals: the step timer's totals, at the end of a step.
            samples: samples of this batch.
            exposed_wait_s: total seconds the GPU idled for want of data; None without a GPU.

        Returns:
            The decision of this batch; None when none was due. Its effect is known at the next one.
        """
        self._before_after.passed(totals, samples)
        if self.frozen is not None:
            return None
        try:
            if not self._pace.is_due(totals, getattr(self._pipeline, "is_growing", False)):
                return None
            if self._pace.is_measuring:
                return self._turn(totals, exposed_wait_s)
            self._before_after.begin()
            self._window.restart(totals, self._before_after.now.samples, self._pipeline.stats(), exposed_wait_s)
            self._pace.measure(totals, self._net.is_trying, self._round)
        except Exception as error:
            self._freeze(error)
        return None

    def expect(self, epoch_batches: int | None, batches: int | None, epochs_left: int | None = None) -> None:
        """Learn how long the run is going to be; changes that it is too short to earn back are not made.

        Args:
            epoch_batches: batches of one epoch, None if unknown.
            batches: of the whole run, None if unknown.
            epochs_left: the one that begins included, None if unknown.
        """
        self._window.expect(epoch_batches, batches, epochs_left)
        self._cache.expect(epoch_batches, batches, epochs_left, is_first=not self._before_after.now.totals.epochs)

    def end(self, totals: StepTotals, samples: int = 0) -> None:
        """The training is over: the figures of the whole run go up to here.

        Args:
            totals: the step timer's totals.
            samples: trained on since the last turn.
        """
        self._before_after.passed(totals, samples)

    def rebind(self, pipeline: Pipeline) -> None:
        """Go on with new loader objects (a new epoch): what was tuned is carried over by stage name."""
        self._pipeline = pipeline
        if self.frozen is not None:
            return
        before = self._allocation
        try:
            self._carry_over()
            if self._allocation == before:
                # The same as before, so what is being measured goes on: else short epochs would never be judged.
                self._window.rebase(pipeline.stats())
            else:
                self._settle()
        except Exception as error:
            self._freeze(error)

    def close(self) -> None:
        """Write the last decision; the pipeline is left as it is."""
        self._freed.close()
        try:
            self.history.close()
        except Exception as error:
            if self.frozen is None:
                self._freeze(error)

    @property
    def best(self) -> Allocation:
        """The best allocation that was measured; empty before there is one."""
        return self._net.best

    def summary(self) -> Report:
        """Return what was measured and done, without what follows from it: that is `build_report`'s to say."""
        seen, now = self._before_after, self._before_after.now
        first = seen.before[0].allocation if seen.before else {}
        return Report(
            mode=self.config.mode,
            policy=self.policy.name,
            frozen=self.frozen,
            changes=seen.changes,
            settled_after_s=seen.settled_after_s,
            wall_s=now.totals.wall_s,
            steps=now.totals.steps,
            samples=now.samples,
            stages=tuple(StageRow(**asdict(s), first=first.get(s.name, s.current)) for s in self._stages),
            memory=Memory(soft_limit_frac=self.config.memory_soft_limit, worker_bytes=self._guard.worker_bytes),
            before=seen.describe_before(),
            after=seen.describe_after(),
            whole=seen.whole(),
            hints=(*getattr(self._pipeline, "late_hints", ()), *getattr(self.policy, "hints", ())),
            decisions=tuple(decision.to_json() for decision in self.history.events),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return allocation, policy, guard and the tail of the history, in plain JSON types."""
        return {
            "mode": self.config.mode,
            "allocation": self._carried | self._allocation if self._before_after.changes or self._carried else {},
            "policy": {"name": self.policy.name, "state": self.policy.state_dict()},
            "guard": self._guard.state_dict(),
            "history": self.history.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave and go to its allocation, as far as the guard lets this machine.

        A state that does not fit is reported as a warning and left alone.
        """
        try:
            self.restore(state)
        except Exception as error:
            warn(f"InTune could not restore its state and starts anew: {type(error).__name__}: {error}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do what `load_state_dict` does, all of it or nothing.

        Raises:
            Exception: of any kind, when this is no such state.
        """
        before = self._guard, self.history.past, self._carried
        known, self._guard = self.policy.state_dict(), Guard(self.config)
        try:
            self._guard.load_state_dict(state["guard"])
            # What was only advised never came true: a policy must not hold what it was never given.
            if (state["policy"]["name"], state["mode"]) == (self.policy.name, self.config.mode):
                self.policy.load_state_dict(state["policy"]["state"])
            self.history.past = tuple(state["history"])
            self._carried = {str(name): int(value) for name, value in state["allocation"].items()}
            if self.frozen is None:
                self._carry_over()
        except Exception:
            self._guard, self.history.past, self._carried = before
            self.policy.load_state_dict(known)
            raise

    def setting(self) -> tuple[tuple[Stage, ...], Resources]:
        """Return the stages and the machine as they are now."""
        return self._read_stages(), self._probe.read()

    def _turn(self, totals: StepTotals, exposed_wait_s: float | None) -> Decision:
        stats = self._pipeline.stats()
        samples, stages = self._before_after.now.samples, self._read_stages()
        observation = self._window.observe(totals, samples, stats, stages, self._resources(), exposed_wait_s)
        self._before_after.observed(observation)
        self._net.begin(observation.stages)
        self._net.watch(observation, totals)
        decision = self._decide(observation)
        self.history.decided(decision)
        self._round = round_of(replace(observation, stages=self._stages), stats)
        if decision.applied:
            self._settle()
        else:
            self._pace.measure(totals, self._net.is_trying, self._round)
        return decision

    def _resources(self) -> Resources:
        known = self.config.memory_soft_limit, self._guard.largest_item_bytes, self._cache.used_bytes
        return self._freed.read(self._probe, *known) if self.config.mode == "tune" else self._probe.read()

    def _decide(self, observation: Observation) -> Decision:
        before, mode = observation.allocation, self.config.mode
        if mode == "observe":
            return Decision(observation, before, before, reason="observing")
        free = self._cache.left_out(observation)
        found = resolve(free, self.policy, self._guard, self._net, tune=mode == "tune")
        self._cache.fit(observation, self._guard.needed_bytes(before | found.granted, free))
        wish = (found.proposed, found.granted, found.reason, found.vetoes)
        decision = Decision(observation, before, before, *wish, settled=found.settled)
        if mode == "advise" or not found.granted:
            if found.back is not None:
                self._net.forget()  # there is no memory for it any more
            if found.holds:
                self._before_after.settled()
            return decision
        after, resize_s = self._resize(found.granted, before)
        if why_not := getattr(self._pipeline, "why_not", ""):
            decision = replace(decision, vetoes=(*found.vetoes, f"not all of it is in force: {why_not}"))
        if found.alarm or found.restored or (found.back is not None and after != found.back.allocation):
            self._net.forget()  # the best of before is not to be had any more
        if found.alarm and hasattr(self._pipeline, "trim"):
            self._pipeline.trim()
        return replace(decision, after=after, applied=after != before, resize_s=resize_s)

    def _resize(self, granted: Allocation, before: Allocation) -> tuple[Allocation, float]:
        begin_s = self._clock.wall()
        applied = self._pipeline.resize(granted)
        resize_s = self._clock.wall() - begin_s
        after = before | {name: value for name, value in applied.items() if name in before}
        if after != before:
            self._before_after.changed()
            self._net.changed(after)
            self._read_stages()
        return after, resize_s

    def _carry_over(self) -> None:
        """Bring the pipeline to the allocation that was tuned before, within what the guard permits now."""
        wanted = self._carried | (self._allocation if self._before_after.changes else {})
        stages = movable(self._read_stages())
        self._net.begin(stages)
        if not wanted or self.config.mode != "tune":
            return
        now = Observation(0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, stages, {}, self._probe.read())
        if missing := changes(self._guard.check(wanted, now).allocation, now.allocation):
            self._net.changed(now.allocation | self._pipeline.resize(missing))
            self._read_stages()

    @property
    def _allocation(self) -> Allocation:
        return {stage.name: stage.current for stage in self._stages}

    def _read_stages(self) -> tuple[Stage, ...]:
        self._stages = capped(self._pipeline.stages(), self.config.max_workers)
        return self._stages

    def _settle(self) -> None:
        """Leave out what was finished, or begun, under the old allocation."""
        windows = [stage.current for stage in self._stages if stage.unit == "items"]
        self._pace.settle(self._before_after.now.totals, windows[-1] if windows else 1, self._round)

    def _freeze(self, error: Exception) -> None:
        self.frozen = frozen_by(error)
        self._cache.freeze()
