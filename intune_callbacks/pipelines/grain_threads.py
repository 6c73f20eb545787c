"""A Grain pipeline: the threads that read and transform, and the elements they are ahead, are live.

Grain makes them for `to_iter_dataset(ReadOptions)`, and has a setter for each number on the running iterator. Those of
`mp_prefetch` have none: they are worker processes. Elements and their order are Grain's own throughout.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import grain

from intune_callbacks.pipelines.base import MAX_THREADS, MAX_WINDOW, LiveLoader, clamp, windowed
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.types import Allocation, Clock, PipelineStats, Stage

__all__ = ["GrainPipeline", "why_not"]

THREADS, BUFFER = "read", "read.window"
LOCK_S = 1.0
"""For so long the lock of a running iterator is waited for, else the next fetch tries again. A choice: an element
somebody waits for is mostly there sooner."""
_ITERATOR = ("_set_num_threads", "_set_prefetch_buffer_size", "_map_parent", "_buffer", "_lock", "_next_buffered_index")


def why_not(dataset: Any) -> str:
    """Return why nothing of a Grain pipeline is live; empty where something is.

    Args:
        dataset: a `grain.MapDataset`, `grain.IterDataset` or `grain.DataLoader`.
    """
    if issubclass(type(dataset), grain.DataLoader):
        return "a grain.DataLoader keeps its numbers to itself; build the pipeline from grain.MapDataset"
    if issubclass(type(dataset), grain.MapDataset):
        return ""
    kinds = [type(part).__name__ for part in _parts(dataset)]
    if "PrefetchIterDataset" not in kinds:
        return (
            "no threads of Grain's read for it in this process; the workers of mp_prefetch and interleave are fixed "
            "once they run, those of to_iter_dataset are live"
        )
    if (many := kinds.count("PrefetchIterDataset")) > 1:
        return f"{many} stages of this Grain pipeline read in threads; one can be live"
    options = _options(dataset)
    if options.num_threads < 1 or options.prefetch_buffer_size < 1:
        return (
            "ReadOptions asks for no threads or no buffer: Grain reads in the training loop, and it stays so; "
            "grain.ReadOptions(num_threads=1, prefetch_buffer_size=2) makes both live"
        )
    return ""


def _options(dataset: Any) -> Any:
    return next(part for part in _parts(dataset) if type(part).__name__ == "PrefetchIterDataset")._read_options


def _parts(node: Any) -> Iterator[Any]:
    yield node
    for parent in getattr(node, "_parents", ()):
        yield from _parts(parent)


class GrainPipeline(LiveLoader):
    """The one stage of a Grain pipeline that has threads.

    Args:
        dataset: the user's, of which `why_not` says nothing; it is not changed.
        max_workers: upper limit of the threads, unless the user's own number is higher.

    Attributes:
        own: the user's threads and buffer.
        threads, buffer: of the tuner, which the report tells of when the user's are in force again.
        dataset: what to iterate in place of the user's.
        counters: of the threads.
        delivered: batches handed out.
        why_not: why what was wanted is not in force, empty if it is.
        is_released: nothing is live, or no longer.
    """

    def __init__(self, dataset: Any, *, clock: Clock, max_workers: int | None = None) -> None:
        if issubclass(type(dataset), grain.MapDataset):
            dataset = dataset.to_iter_dataset()  # which is what it makes of itself
        options = _options(dataset)
        self.dataset = _Live(dataset, self)
        self.why_not = ""
        self.delivered, self.clock, self.counters = 0, clock, Counters()
        self.own = options.num_threads, options.prefetch_buffer_size
        self.threads, self.buffer = self.own
        self._high = max(self.threads, max_workers or MAX_THREADS)
        self._running: weakref.ref[_LiveIterator] | None = None
        self._told_s, self._busy_s = clock.wall(), 0.0
        self.is_released = False

    def began(self, iterator: _LiveIterator) -> None:
        """Take note of an iterator that begins: the numbers are its from now on."""
        self._running = weakref.ref(iterator)

    @property
    def wanted(self) -> tuple[int, int]:
        """Threads and buffer that a running iterator takes at its next fetch."""
        return self.own if self.is_released else (self.threads, self.buffer)

    def stages(self) -> tuple[Stage, ...]:
        high = max(MAX_WINDOW, self.own[1])
        threads = Stage(THREADS, "cpu", "workers", 1, self._high, self.threads, knob="ReadOptions(num_threads={})")
        return windowed(threads, self.buffer, high=high, knob="prefetch_buffer_size={total}")

    def stats(self) -> PipelineStats:
        counters, now_s = self.counters, self.clock.wall()
        # Grain's threads read the source themselves: what they do not work, they wait for room.
        idle_s = self.threads * (now_s - self._told_s) - (counters.busy_s - self._busy_s)
        counters.blocked_s += max(0.0, idle_s)
        self._told_s, self._busy_s = now_s, counters.busy_s
        running = self._running() if self._running is not None else None
        queued = running.queued if running is not None else 0
        return PipelineStats(now_s, self.delivered, {THREADS: counters.reading(queued, self.buffer)})

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages())
        self.stats()  # what was idle until now was so with the threads of until now
        self.threads, self.buffer = wanted.get(THREADS, self.threads), wanted.get(BUFFER, self.buffer)
        return {stage.name: stage.current for stage in self.stages()}

    def release(self) -> None:
        """Let running iterators go on with the user's numbers, and unwatched."""
        self.is_released = True


class _Live(grain.IterDataset):  # type: ignore[misc]
    """The user's dataset, whose iterators take new numbers."""

    def __init__(self, dataset: Any, pipeline: GrainPipeline) -> None:
        super().__init__(dataset)
        self._pipeline = pipeline

    def __iter__(self) -> _LiveIterator:
        return _LiveIterator(self._parent.__iter__(), self._pipeline)

    def __str__(self) -> str:
        return str(self._parent)

    @property
    def _element_spec(self) -> Any:
        return self._parent._element_spec


class _LiveIterator(grain.DatasetIterator):  # type: ignore[misc]
    """Hands on each element, and before it sets the numbers that are wanted: in the thread that fetches."""

    def __init__(self, parent: Any, pipeline: GrainPipeline) -> None:
        super().__init__(parent)
        self._pipeline, self._set = pipeline, pipeline.own
        found = [part for part in _parts(parent) if all(hasattr(part, name) for name in _ITERATOR)]
        self._reader: Any = found[0] if len(found) == 1 else None
        self._timed: _Timed | None = None
        if self._reader is not None and not pipeline.is_released:
            self._reader._stats  # noqa: B018  # made by one thread, as Grain asks for
            self._timed = self._reader._map_parent = _Timed(self._reader._map_parent, pipeline)
            pipeline.began(self)

    @property
    def queued(self) -> int:
        """Elements that are ready."""
        return sum(future.done() for future in tuple(self._reader._buffer))

    def __next__(self) -> Any:
        pipeline = self._pipeline
        if self._reader is not None and self._set != (wanted := pipeline.wanted):
            try:
                self._apply(*wanted)
            except Exception as error:  # no thread is to be had, or another version of Grain: what runs goes on
                pipeline.why_not = f"{type(error).__name__}: {error}"
                pipeline.threads, pipeline.buffer = self._set
                if pipeline.is_released:
                    pipeline.own = self._set
        if pipeline.is_released and self._timed is not None:
            self._reader._map_parent, self._timed = self._timed.stock, None
        element = next(self._parent)
        pipeline.delivered += 1
        return element

    def _apply(self, threads: int, buffer: int) -> None:
        reader = self._reader
        if not reader._lock.acquire(timeout=LOCK_S):
            return
        try:
            if threads > self._set[0]:
                _start(threads)  # Grain starts them one by one, as it reads, and would fail then
            reader._set_prefetch_buffer_size(buffer)
            if threads != self._set[0]:
                reader._set_num_threads(threads)
                self._hand_over()
            self._set = threads, buffer
        finally:
            reader._lock.release()

    def _hand_over(self) -> None:
        """Give what the old threads have not begun to the new ones: the old ones would still do all of it."""
        reader, waiting = self._reader, self._reader._buffer
        getitem = importlib.import_module(type(reader).__module__)._getitem
        first = reader._next_buffered_index - len(waiting)
        for place, future in enumerate(tuple(waiting)):
            if not (future.running() or future.done()):
                work = functools.partial(getitem, reader._stats, reader._map_parent)
                again = reader._executor.submit(work, first + place)
                if future.cancel():
                    waiting[place] = again
                else:
                    again.cancel()

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)

    def _get_next_index(self) -> Any:
        return self._parent._get_next_index()

    def _set_next_index(self, index: int) -> None:
        self._parent._set_next_index(index)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = self._parent.__class__
        return kind

    def __getattr__(self, name: str) -> Any:
        # What an iterator of the user's own can do besides.
        if name.startswith("__") or "_parents" not in vars(self):
            raise AttributeError(name)
        return getattr(self._parent, name)

    def __str__(self) -> str:
        return str(self._parent)


def _start(threads: int) -> None:
    """Start so many threads and end them again; raises RuntimeError where the machine has fewer."""
    leave = threading.Event()
    try:
        for _ in range(threads):
            threading.Thread(target=leave.wait, daemon=True).start()
    finally:
        leave.set()


class _Timed:
    """The dataset Grain's threads read, with a stopwatch."""

    def __init__(self, stock: Any, pipeline: GrainPipeline) -> None:
        self.stock, self._pipeline, self._lock = stock, pipeline, threading.Lock()

    def __getitem__(self, index: Any) -> Any:
        clock = self._pipeline.clock
        begin_s, begin_cpu_s = clock.wall(), clock.cpu()
        element = self.stock[index]
        busy_s, cpu_s = clock.wall() - begin_s, clock.cpu() - begin_cpu_s
        with self._lock:
            self._pipeline.counters.computed(busy_s, cpu_s, element)
        return element

    def __len__(self) -> int:
        return len(self.stock)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy that is not filled yet asks for them
            raise AttributeError(name)
        return getattr(self.stock, name)
