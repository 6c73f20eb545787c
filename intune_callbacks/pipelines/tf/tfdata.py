"""tf.data pipelines: each parallel stage gets live workers and a live window, each prefetch a live depth.

The user's dataset is taken apart once and put together again with our operations inside (`rewrite.py`); the result
delivers the same elements in the same order, shares the shuffle seeds and caches of the user's, and is iterated in its
place. It begins as the stock one would: a stage computes on TensorFlow's own threads, and what was left to AUTOTUNE is
moved by tf.data's own tuner, until the first `resize` of that stage. An interleave left to AUTOTUNE begins with all the
threads it can have. Without our operations, because they cannot be compiled or are not yet, the user's dataset is left
as it is.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import tensorflow as tf

from intune_callbacks.errors import InTuneError
from intune_callbacks.pipelines.base import MAX_THREADS, MAX_WINDOW, LiveLoader, clamp, cpus_allowed, windowed
from intune_callbacks.pipelines.tf import build as tf_build
from intune_callbacks.pipelines.tf.built import Built, build, keep, timed
from intune_callbacks.pipelines.tf.graph import CannotRewrite, DatasetGraph
from intune_callbacks.pipelines.tf.hints import hints_of
from intune_callbacks.pipelines.tf.native import Native, load
from intune_callbacks.pipelines.tf.node import said
from intune_callbacks.pipelines.tf.objects import is_inside, threads_of
from intune_callbacks.pipelines.tf.stage import GraphStage, live_numbers
from intune_callbacks.pipelines.tf.stats import SinkReading, StageCourse, StageReading
from intune_callbacks.types import Allocation, Clock, Hint, PipelineStats, Stage

__all__ = ["DatasetPipeline", "is_compiled"]

UNBOUNDED = 4096
"""Workers where the user wants as many threads as there are calls."""
LOOK_AGAIN_S = 0.5
"""Seconds between two looks for stages that are not running yet. A choice: half of the shortest window by default."""
LOOK_EVERY_S, SHORT_S = 0.1, 5.0
"""Seconds after which the stages are looked at together with the sink, and for how long in an epoch. A choice: several
times in one that is short, at whose end, where windows end too, no stage has anything left to do."""
LATER = (
    "the tf.data operations are compiled beside this training, which goes on with the pipeline as it is and is tuned "
    "from a later epoch, or the next fit, on; `intune build-tf` compiles ahead"
)


class DatasetPipeline(LiveLoader):
    """All live stages of one `tf.data.Dataset`.

    Args:
        dataset: the user's; it is not changed, but shuffles and caches inside are shared with it, so only one of the
            two should be iterated at a time.
        max_workers: upper limit of each stage.
        live: False only counts and times; every number stays as the user, or tf.data's own tuner, sets it.
        wait: compile our operations now where that has not been done; False leaves it to `compile` and `late`.
        in_order: False lets stages deliver as they finish, where the same elements come out; see `order.py`.
        own: False for one that the user has not made: it is only timed, and of no stage anything is known.

    Attributes:
        dataset: what to iterate in place of the user's; the user's own when nothing could be done.
        why: one sentence: what is live, what is not, and the smallest change that would make it so.
        hints: oddities of the user's pipeline that can be seen without running it.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        clock: Clock,
        max_workers: int | None = None,
        live: bool = True,
        wait: bool = True,
        in_order: bool = True,
        own: bool = True,
    ) -> None:
        self.dataset = self._stock = dataset
        self._live, self._own, self._in_order = live, own, in_order
        self._clock, self._high = clock, max_workers or MAX_THREADS
        self._key = f"{os.getpid()}/{uuid.uuid4().hex}"
        self._native: Native | None = None
        self._built: Built | None = None
        self._awaited = self._must_begin = False
        self._stages: tuple[GraphStage, ...] = ()
        self._workers: dict[str, int] = {}
        self._window: dict[str, int] = {}
        self._courses: dict[str, StageCourse] = {}
        self._pinned: set[str] = set()
        self._threads = threads_of(dataset)
        self._asked: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._late: set[str] = set()
        self._looked_s, self._begun_s, self._last_waits = 0.0, 0.0, SinkReading()
        self.hints: tuple[Hint, ...] = ()
        self.why = self._begin_with(wait)

    def compile(self) -> None:
        """Begin to compile our operations beside the training, if that is still to be done."""
        if self._must_begin:
            self._must_begin = False
            try:
                tf_build.begin()
            except (InTuneError, OSError) as error:
                self.why = f"the pipeline is left as it is: {said(error)}"

    def late(self) -> bool:
        """Make the stages live where our operations were compiled meanwhile; return whether `dataset` is another one.

        An iterator of the user's dataset goes on as it is, so this is for the moment before an epoch begins.
        """
        if not self._awaited or not is_compiled():
            return False
        self.why, self._awaited = self._begin_with(wait=True), False
        return self._native is not None

    @property
    def is_inside(self) -> bool:
        """True for a dataset made inside a compiled function: no iterator of it comes out of there."""
        return is_inside(self._stock)

    def waits(self) -> SinkReading:
        """Return what was delivered and how long the consumer was blocked, in s."""
        if self._stages and self._looked_s + LOOK_EVERY_S < self._clock.wall() < self._begun_s + SHORT_S:
            self._look()
        elif self._native is not None:
            self._delivered(self._native.read_sink(self._key))
        return self._last_waits

    def stages(self) -> tuple[Stage, ...]:
        if len(self._pinned) < len(self._stages) and self._clock.wall() > self._looked_s + LOOK_AGAIN_S:
            self._look()
        return tuple(part for stage in self._stages for part in self._parts(stage))

    def stats(self) -> PipelineStats:
        self._look()
        readings = {stage.name: self._courses[stage.name].stats() for stage in self._stages if stage.kind != "prefetch"}
        return PipelineStats(self._clock.wall(), self._last_waits.delivered, readings)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        self._look()  # what was idle until now was so with the workers and windows of until now
        wanted = clamp(allocation, self.stages()) if self._live and self._native is not None else {}
        for stage in self._stages:
            self._set(stage, wanted)
        return {part.name: part.current for stage in self._stages for part in self._parts(stage)}

    def release(self) -> None:
        """Give the user's dataset back for the next iterator; one that runs goes on as it is to its end."""
        self.dataset, self._built = self._stock, None
        if self._native is not None:
            self._look()
            self._native.release(self._key)
            self._native = None

    def close(self) -> None:
        """Release everything; nothing waits for a thread, for those of a stage end with its iterator."""
        built = self._built
        self.release()
        if built is not None:
            keep(self._stock, built)

    def _begin_with(self, wait: bool) -> str:
        """Put our operations in place if they are there, or may be waited for; return what came of it."""
        try:
            if wait or is_compiled():
                return self._install(load())
            self.hints = hints_of(DatasetGraph(self._stock))
            tf_build.check()
            self._awaited = self._must_begin = True
            return LATER
        except CannotRewrite as error:
            return str(error)
        except InTuneError as error:
            with suppress(CannotRewrite):
                self.hints = hints_of(DatasetGraph(self._stock))
            return f"the pipeline is left as it is: {said(error)}"
        except Exception as error:  # a dataset that cannot be tuned must still train
            return f"the pipeline is left as it is: {type(error).__name__}: {said(error)}"

    def _install(self, native: Native) -> str:
        built, why, cpus = None, "the pipeline is only timed", min(16, cpus_allowed())
        try:
            if self._own:
                built = build(self._stock, self._key, live=self._live, cpus=cpus, in_order=self._in_order)
        except CannotRewrite as error:
            why = str(error)
        if built is None:
            self.dataset, self._native = timed(native, self._stock, self._key), native
            return why
        self.dataset, self._built, self._key = built.dataset(self._stock), built, built.key
        self._native, self._stages, self.hints = native, built.stages, built.hints
        for stage in self._stages:
            self._courses[stage.name] = StageCourse()
            self._found(stage, max(1, stage.value, stage.workers))
            if self._live:
                self._begin(stage, native)
        what = live_numbers(self._stages) if self._live else "the pipeline is only watched"
        return "; ".join([what, *built.notes])

    def _begin(self, stage: GraphStage, native: Native) -> None:
        if stage.unbounded:
            native.set_workers(self._key, stage.name, UNBOUNDED)
        if stage.kind == "prefetch" and stage.automatic:
            native.follow_depth(self._key, stage.name)
        if stage.kind == "interleave":
            native.set_readers(self._key, stage.name, max(0, stage.value), stage.each)

    def _parts(self, stage: GraphStage) -> tuple[Stage, ...]:
        workers, window = self._workers[stage.name], self._window[stage.name]
        name, knob, threads = stage.name, stage.knob(), self._threads if stage.is_on_pool else None
        if stage.kind == "prefetch":
            return (Stage(name, "memory", "items", 1, max(MAX_WINDOW, window), window, knob=knob),)
        if stage.kind == "interleave":
            most = stage.high if stage.high is not None and stage.high > 0 else self._most.get(name, workers)
            when: Literal["now", "epoch"] = "epoch" if name in self._late else "now"
            high = max(workers, min(self._high, most))
            return (Stage(name, "io", "workers", 1, high, workers, when=when, knob=knob, threads=threads),)
        high = max(self._high, workers, stage.value)
        computes = Stage(name, "cpu", "workers", 1, high, workers, knob=knob, threads=threads)
        return (computes,) if stage.fused else windowed(computes, window, high=max(MAX_WINDOW, window))

    def _set(self, stage: GraphStage, wanted: Mapping[str, int]) -> None:
        native, name = self._native, stage.name
        is_map = stage.kind in ("map", "batch")
        before = (self._asked.get(name, self._workers[name]), self._window[name])
        workers = wanted.get(name, before[0])
        if stage.kind == "interleave":
            if native is not None and workers != before[0]:
                self._asked[name] = workers
                self._workers[name] = native.set_readers(self._key, name, workers, stage.each)
                if self._workers[name] < workers:  # its input has ended since the last look
                    self._late.add(name)
            return
        window = wanted.get(f"{name}.window", before[1]) if is_map and not stage.fused else workers
        if native is None or (workers, window) == before:
            return
        if name not in self._pinned and f"{name}.window" not in wanted:
            window = max(window, workers)  # what tf.data's tuner left was for its own number of them
        self._pinned.add(name)
        if is_map:
            native.set_workers(self._key, name, self._own_threads(stage, workers, window))
        self._workers[name], self._window[name] = workers, native.set_window(self._key, name, window)

    def _own_threads(self, stage: GraphStage, workers: int, window: int) -> int:
        """Return how many threads of our own compute; 0 where TensorFlow's, or the window, allow no more than wanted.

        TensorFlow hands a short call to a thread at half the cost: 33 us for each element of a small map, not 50.
        """
        enough = workers == self._threads or window <= workers <= self._threads
        return 0 if enough and not stage.unbounded else workers

    def _look(self) -> None:
        """Read the counters and take note of them."""
        if self._native is None:
            return
        sink, readings = self._native.read(self._key)
        self._looked_s = self._clock.wall()
        self._delivered(sink)
        for stage in self._stages:
            reading = readings.get(stage.name)
            if reading is None:
                continue
            capacity = stage.capacity or self._window[stage.name]
            self._courses[stage.name].read(reading, self._workers[stage.name], capacity, self._looked_s)
            if stage.name not in self._pinned:
                self._follow(stage, reading)

    def _delivered(self, sink: SinkReading) -> None:
        if sink.iterators != self._last_waits.iterators:
            self._begun_s = self._clock.wall()
        self._last_waits = sink

    def _follow(self, stage: GraphStage, reading: StageReading) -> None:
        """Take over what is in force: what tf.data's own tuner has set meanwhile, or TensorFlow made of the number."""
        if self._live and stage.kind == "interleave":
            self._workers[stage.name] = self._window[stage.name] = reading.readers or self._workers[stage.name]
            self._most[stage.name] = reading.most
            # TensorFlow starts no more threads for it, and we hold none back: more come with the next iterator.
            is_late = reading.ended and (reading.window or 0) < reading.most
            (self._late.add if is_late else self._late.discard)(stage.name)
        elif reading.window:
            self._found(stage, reading.window)

    def _found(self, stage: GraphStage, number: int) -> None:
        """Take note of a number that is TensorFlow's: of its own threads there are only so many."""
        on_pool = stage.kind in ("map", "batch") and not stage.unbounded
        self._window[stage.name] = number
        self._workers[stage.name] = min(number, self._threads) if on_pool else number


def is_compiled() -> bool:
    """Return whether our operations are there, so that nobody has to wait for a compiler."""
    return tf_build.library_path().exists()
