"""The one protocol of every adapter, and the pipelines made of others."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from intune_callbacks.types import Allocation, Hint, Pipeline, PipelineStats, Stage

__all__ = [
    "LIVE", "LIVE_ALREADY", "MAX_PROCESSES", "MAX_THREADS", "MAX_WINDOW", "Combined", "LiveLoader", "Pipeline", "begin",
    "busy_limit", "clamp", "cpus_allowed", "give_back", "in_main_thread", "join", "spared", "windowed",
]  # fmt: skip

# What the system says where it has no more processes, memory or descriptors for this user or container.
SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
NO_THREAD = "can't start new thread"
# A choice: longer than a thread takes to begin on a busy machine; where memory is gone each one in vain costs as much.
BEGIN_S = 2.0
# Why: see `busy_limit`.
BURST = 1.15
# A choice: more than most machines need; a process has memory of its own. CPUs and memory are watched by the guard.
MAX_PROCESSES, MAX_THREADS, MAX_WINDOW = 64, 256, 4096
# The module of what `live()` returns, and what is said where that is given to a callback.
LIVE = "intune_callbacks.session.live"
LIVE_ALREADY = "live() tunes this loader already; give the callback the loader, or leave the callback out"


def clamp(allocation: Mapping[str, int], stages: Sequence[Stage]) -> Allocation:
    """Return the part of `allocation` that names one of `stages`, each value within its low..high.

    Args:
        allocation: stage name -> wanted value, in that stage's unit.
        stages: those there are.
    """
    return {
        stage.name: min(max(int(allocation[stage.name]), stage.low), stage.high)
        for stage in stages
        if stage.name in allocation
    }


def windowed(
    workers: Stage, current: int, *, low: int = 1, high: int = MAX_WINDOW, knob: str = ""
) -> tuple[Stage, Stage]:
    """Return a stage of workers and the window that holds its results.

    Args:
        workers: that stage.
        current: results it may hold now.
        low: fewest.
        high: most.
        knob: how the user writes the window.
    """
    window = f"{workers.name}.window"
    held = Stage(window, "memory", "items", low, high, current, window_of=workers.name, when=workers.when, knob=knob)
    return workers, held


def cpus_allowed() -> int:
    """Return how many CPUs this process may run on; limits of the container are not among them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spared(error: BaseException, running: int, own: int) -> int:
    """Return how many workers stay where one more was refused.

    Where it is processes, threads or descriptors that are short, the training needs some itself, as for the workers
    of a validation: half of what was added to the user's number is given back.

    Args:
        error: why it was refused.
        running: workers there are.
        own: the user's number.
    """
    is_short = str(error) == NO_THREAD or (isinstance(error, OSError) and error.errno in SHORT)
    return (own + running + 1) // 2 if is_short and running > own else running


def give_back(engine: Any, error: BaseException, own: int) -> int:
    """Have an engine keep what is `spared`, and return how many workers these are.

    Args:
        engine: an `ElasticMap` that could not be given one more.
        error: why.
        own: the user's number.
    """
    kept = spared(error, engine.workers, own)
    if kept < engine.workers:
        if engine.pool is not None:
            engine.pool.is_short = True
        engine.resize(kept)
    return kept


def busy_limit(cpus: float, worker_stages: int) -> float:
    """Return how many CPUs all workers may occupy in the moment when every one of them is busy.

    One per stage is for rounding up, for workers are whole numbers. 15 % are for irregular work, whose stages are
    rarely all busy at once: without it a tenth of an emulated machine of 32 CPUs stood idle.

    Args:
        cpus: CPUs the pipeline may use on average.
        worker_stages: stages that hold workers.
    """
    return BURST * cpus + worker_stages


class LiveLoader(Pipeline):
    """A pipeline bound to one loader of the user; by itself it takes nothing over."""

    def prepare(self) -> None:
        """Called before the loader's first `iter()`, when there is such a moment."""

    def adopt(self, iterator: Any) -> Any:
        """Take over a running iterator; put the returned one in its place."""
        return iterator

    def release(self) -> None:
        """Undo every patch on the user's loader."""

    def close(self) -> None:
        self.release()


class Combined:
    """Several pipelines that feed one training loop, seen as one; stage names get their loader's name in front.

    Args:
        parts: name -> pipeline. With a single part the stage names stay as they are.
    """

    def __init__(self, parts: Mapping[str, Pipeline]) -> None:
        self._parts = {f"{name}/" if len(parts) > 1 else "": part for name, part in parts.items()}

    @property
    def why_not(self) -> str:
        """Why what was last wanted is not in force, empty where it is."""
        return "; ".join(filter(None, (getattr(part, "why_not", "") for part in self._parts.values())))

    @property
    def is_growing(self) -> bool:
        """True while workers that were asked for cannot compute yet."""
        return any(getattr(part, "is_growing", False) for part in self._parts.values())

    def beyond(self, cpus: float) -> float:
        """Return how many CPUs of other machines they can have workers on.

        Args:
            cpus: there are here.
        """
        return float(sum(part.beyond(cpus) for part in self._parts.values() if hasattr(part, "beyond")))

    @property
    def late_hints(self) -> tuple[Hint, ...]:
        """What is odd about them and has shown while they ran."""
        return tuple(
            replace(hint, stage=prefix + hint.stage)
            for prefix, part in self._parts.items()
            for hint in getattr(part, "late_hints", ())
        )

    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, name=prefix + stage.name, window_of=stage.window_of and prefix + stage.window_of)
            for prefix, part in self._parts.items()
            for stage in part.stages()
        )

    def stats(self) -> PipelineStats:
        readings = {prefix: part.stats() for prefix, part in self._parts.items()}
        return PipelineStats(
            at_s=max((r.at_s for r in readings.values()), default=0.0),
            delivered=max((r.delivered for r in readings.values()), default=0),
            stages={prefix + name: s for prefix, r in readings.items() for name, s in r.stages.items()},
        )

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        applied: Allocation = {}
        for prefix, part in self._parts.items():
            wanted = {k[len(prefix) :]: v for k, v in allocation.items() if k.startswith(prefix)}
            applied.update({prefix + k: v for k, v in part.resize(wanted).items()})
        return applied

    def trim(self) -> None:
        """Give back what is only kept for later: memory is short."""
        for part in self._parts.values():
            trim = getattr(part, "trim", None)
            if trim is not None:
                trim()

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


def in_main_thread() -> bool:
    """Say whether this is the main thread; `threading.current_thread` keeps a dummy of one that is not Python's."""
    return threading.get_ident() == threading.main_thread().ident


class _Begun(threading.Event):
    """In place of the event that `Thread.start` waits for without end."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(BEGIN_S if timeout is None else timeout)


def begin(thread: threading.Thread) -> None:
    """Start a thread; `Thread.start` waits without end for one that died, for want of memory, before it ran.

    Args:
        thread: that was not started; it keeps nothing of this once it has run.

    Raises:
        RuntimeError: it could not be started, and it does nothing if it comes to run after all.
    """
    if not hasattr(thread, "_started"):  # a Python that waits in another way
        thread.start()
        return
    run, gate, is_late = thread.run, threading.Lock(), False

    def once() -> None:
        vars(thread).pop("run", None)  # else it would hold on to itself
        with gate:
            if is_late:
                return
        run()

    thread.run = once  # type: ignore[method-assign]
    begun = thread._started = _Begun()
    thread.start()
    with gate:
        is_late = not begun.is_set()
    if is_late:
        getattr(threading, "_limbo", {}).pop(thread, None)
        raise RuntimeError(NO_THREAD)


def join(thread: threading.Thread, timeout_s: float) -> None:
    """Wait for the end of a thread; `Thread.join`, too, asks for the current one, of which a dummy might be kept.

    Args:
        thread: that was started.
        timeout_s: seconds to wait at most.
    """
    here, until_s = threading.get_ident(), time.monotonic() + timeout_s
    if any(known.ident == here for known in threading.enumerate()):
        thread.join(timeout_s)
    while thread.is_alive() and time.monotonic() < until_s:
        time.sleep(0.002)
