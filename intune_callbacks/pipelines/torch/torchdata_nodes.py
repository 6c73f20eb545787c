"""One node of a torchdata graph with live numbers: its engine, its state, its place among the others."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any, Literal

import torch
from torchdata.nodes import BaseNode
from torchdata.nodes.map import MapOverBatch, _ParallelMapperImpl

from intune_callbacks.pipelines.base import MAX_WINDOW, give_back, windowed
from intune_callbacks.pipelines.counters import Counters
from intune_callbacks.pipelines.given import check_same
from intune_callbacks.pipelines.look import plain_values
from intune_callbacks.pipelines.torch import told
from intune_callbacks.pipelines.torch.carry import Carry
from intune_callbacks.pipelines.torch.workers import SeededMap, Start, context_of, random_states
from intune_callbacks.pipelines.workers.elastic import ElasticMap
from intune_callbacks.pipelines.workers.processes import ProcessPool
from intune_callbacks.types import Clock, Stage, StageStats

__all__ = ["NodeStage", "end_engines", "end_ours", "function_name", "walk"]

# A choice: an item that takes longer is not waited for.
JOIN_S = 10.0


def walk(node: BaseNode[Any], _seen: set[int] | None = None) -> Iterator[BaseNode[Any]]:
    """Yield every node reachable from `node` through attributes, lists and dicts, sources before their consumers."""
    seen = set() if _seen is None else _seen
    if id(node) in seen:
        return
    seen.add(id(node))
    for value in vars(node).values():
        # One level of containers: deeper ones hold data, not nodes.
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for candidate in inside:
            if isinstance(candidate, BaseNode):
                yield from walk(candidate, seen)
    yield node


def function_name(fn: Any) -> str:
    """Return the name a user would recognise: the function's, or the class's for a callable object."""
    if isinstance(fn, MapOverBatch):
        fn = fn.map_fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return "map" if name == "<lambda>" else str(name)


class _NodeIterator:
    """Takes the place of a node's own iterator; same state format: {"snapshot", "steps_since_snapshot"}."""

    def __init__(self, engine: ElasticMap[Any], state: dict[str, Any]) -> None:
        self.engine, self._snapshot, self._steps = engine, state["snapshot"], 0
        for done in range(steps := state["steps_since_snapshot"]):
            try:
                next(self)
            except StopIteration:
                raise ValueError(told.ENDED.format(steps, done)) from None

    def __iter__(self) -> _NodeIterator:
        return self

    def __next__(self) -> Any:
        value = told.mapped(self.engine)
        self._steps += 1
        if self.engine.state is not None:
            self._snapshot, self._steps = self.engine.state, 0
        return value

    def get_state(self) -> dict[str, Any]:
        return {"snapshot": self._snapshot, "steps_since_snapshot": self._steps}

    def _shutdown(self) -> None:
        self.engine.close()
        if self.engine.pool is not None:
            self.engine.pool.close()

    def __del__(self) -> None:
        try:
            self._shutdown()
        except Exception:
            # An interpreter on its way out has no threading left to complain with.
            return


def _snapshots(source: BaseNode[Any], frequency: int) -> Callable[[], Any]:
    # Free of the iterator: the engine's threads hold this function and must not keep the iterator alive.
    pulled = 0

    def snapshot() -> Any:
        nonlocal pulled
        pulled += 1
        return source.state_dict() if frequency and pulled % frequency == 0 else None

    return snapshot


class _Timed:
    """A map function with a stopwatch."""

    def __init__(self, fn: Callable[[Any], Any], counters: Counters, clock: Clock) -> None:
        self.fn, self._counters, self._clock = fn, counters, clock
        self._lock = threading.Lock()

    def __call__(self, item: Any) -> Any:
        begin_s, begin_cpu_s = self._clock.wall(), self._clock.cpu()
        value = self.fn(item)
        busy_s, cpu_s = self._clock.wall() - begin_s, self._clock.cpu() - begin_cpu_s
        with self._lock:
            self._counters.computed(busy_s, cpu_s, value)
        return value


class NodeStage:
    """One ParallelMapper or Prefetcher: its numbers, its counters and its running engine."""

    def __init__(self, node: Any, name: str, clock: Clock, high: int) -> None:
        self.node, self.name, self.clock, self.high = node, name, clock, high
        self.mapper = isinstance(node, _ParallelMapperImpl)
        self.workers = min(node.num_workers, high) if self.mapper else 1
        self.window = (node.max_concurrent or 2 * node.num_workers) if self.mapper else node.prefetch_factor
        self._own = (self.workers, self.window)
        self.why_not = ""
        self.counters = Counters()
        self._epochs = 0
        self._given: Any = None
        self._knob = f"ParallelMapper(map_fn={name.split('#')[0]}, num_workers={{}})"
        self._running: weakref.ref[_NodeIterator] | None = None

    @property
    def window_name(self) -> str:
        return f"{self.name}.window" if self.mapper else self.name

    def running(self) -> ElasticMap[Any] | None:
        iterator = self._running() if self._running is not None else None
        return iterator.engine if iterator is not None else None

    def install(self) -> None:
        """Make the node's next `reset()` start our engine."""
        self.node.reset = self._reset

    def watch(self) -> None:
        """Time the map function where it runs; the stock implementation stays."""
        if self.mapper and self.node.method == "thread" and not isinstance(self.node.map_fn, _Timed):
            self.node.map_fn = _Timed(self.node.map_fn, self.counters, self.clock)

    def uninstall(self) -> None:
        """Undo `install` or `watch`, from the next `reset()` on."""
        self.node.__dict__.pop("reset", None)
        if self.mapper and isinstance(self.node.map_fn, _Timed):
            self.node.map_fn = self.node.map_fn.fn

    def _reset(self, initial_state: dict[str, Any] | None = None) -> None:
        BaseNode.reset(self.node, initial_state)
        end_engines(self.node)
        self.node._it = None
        self.node._it = self._start(initial_state)

    def _start(self, initial_state: dict[str, Any] | None) -> Any:
        source = self.node.source
        state = {"snapshot": None, "steps_since_snapshot": 0} if initial_state is None else initial_state
        source.reset(state["snapshot"])
        # Asked for anew, as stock does: a source may go on to change the state that it was given.
        initial_state = {**state, "snapshot": source.state_dict()}
        try:
            engine = self.engine(_snapshots(source, int(self.node.snapshot_frequency)))
        except Exception as error:
            # What ours has pulled meanwhile is not lost: the stock one puts the source back to where it was.
            self.why_not = f"{type(error).__name__}: {error}"
            self.workers, self.window = self._own
            type(self.node).reset(self.node, initial_state)
            return self.node._it
        iterator = _NodeIterator(engine, initial_state)
        self._running = weakref.ref(iterator)
        return iterator

    def engine(self, snapshot: Callable[[], Any]) -> ElasticMap[Any]:
        process = self.mapper and self.node.method == "process"
        pool = None
        source: Iterator[Any] = map(told.as_node(next, told.READ), repeat(iter(self.node.source)))
        if process:
            # A stock child inherits the random state; drawing a seed from it would change what the model draws.
            self._epochs += 1
            self._given = plain_values(self.node.map_fn)
            fn = SeededMap(self.node.map_fn, random_states(self._epochs))
            pool = ProcessPool(fn, context_of(self.node.multiprocessing_context), Start(), Carry)
            source = enumerate(source)
        try:
            return self._engine(source, pool, snapshot)
        except BaseException:
            if pool is not None:
                pool.close()
            raise

    def _engine(self, source: Iterator[Any], pool: ProcessPool | None, snapshot: Callable[[], Any]) -> ElasticMap[Any]:
        return ElasticMap(
            source,
            _on_one_thread(told.as_node(self.node.map_fn, told.APPLIED)) if self.mapper else _same,
            workers=self.workers,
            window=self.window,
            ordered=self.node.in_order if self.mapper else True,
            pool=pool,
            snapshot=told.as_node(snapshot, told.READ),
            may_stop=True,
            counters=self.counters,
            clock=self.clock,
            name=self.name,
        )

    def resize(self, workers: int, window: int) -> None:
        self.workers, self.window = workers, window
        engine = self.running()
        if engine is None:
            return
        try:
            engine.resize(window=window)
            if engine.pool is not None and workers > engine.workers + engine.pool.idle:
                check_same(self._given, plain_values(self.node.map_fn))
            engine.resize(workers)
        except Exception as error:  # no process or thread is to be had: what runs goes on
            self.why_not = f"{type(error).__name__}: {error}"
            self.workers = give_back(engine, error, self._own[0])

    def stages(self) -> tuple[Stage, ...]:
        live: Literal["now", "epoch"] = "now" if self.running() is not None else "epoch"
        if not self.mapper:
            knob = "Prefetcher(prefetch_factor={})"
            return (Stage(self.name, "memory", "items", 1, MAX_WINDOW, self.window, when=live, knob=knob),)
        # No knob for the window: a stock mapper holds twice its workers.
        return windowed(
            Stage(self.name, "cpu", "workers", 1, self.high, self.workers, when=live, knob=self._knob), self.window
        )

    def stats(self) -> StageStats:
        engine = self.running()
        stats = engine.stats() if engine is not None else self.counters.reading(0, self.window)
        return replace(stats, held_s=0.0)  # no `order` changes that


def end_engines(root: BaseNode[Any]) -> None:
    """End the engines at and below a node, ours and stock ones, before its source is reset.

    Two that pull from one source would lose items, and a stock node does not wait for a slow one: half a second only.
    """
    end_ours(root)
    until_s = time.monotonic() + JOIN_S
    for node in walk(root):
        iterator = vars(node).get("_it")
        if _engine_of(node) is None and hasattr(iterator, "_shutdown"):
            iterator._shutdown()
            reader = getattr(iterator, "_read_thread", None) or getattr(iterator, "_thread", None)
            if reader is not None and reader is not threading.current_thread():
                reader.join(max(0.0, until_s - time.monotonic()))


def end_ours(root: BaseNode[Any]) -> None:
    """End our engines at and below a node, and their processes; those of stock nodes go on."""
    engines = [e for e in (_engine_of(node) for node in walk(root)) if e is not None]
    # All are told first, so that none waits for one that already stopped.
    for engine in engines:
        engine.abort()
    for engine in reversed(engines):
        engine.close()
        # Now: an error that somebody keeps may hold the iterator, and its finalizer would find the pipes closed.
        if engine.pool is not None:
            engine.pool.close()


def _engine_of(node: Any) -> ElasticMap[Any] | None:
    """Return the engine that runs inside a node, None where the stock one does."""
    iterator = getattr(node, "_it", None)
    return iterator.engine if isinstance(iterator, _NodeIterator) else None


def _on_one_thread(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `fn` as a stock worker calls it: each begins with `set_num_threads(1)`, which the model's losses show."""
    told = threading.local()

    def call(item: Any) -> Any:
        if not hasattr(told, "once"):
            torch.set_num_threads(1)
            told.once = True
        return fn(item)

    return call


def _same(item: Any) -> Any:
    return item
