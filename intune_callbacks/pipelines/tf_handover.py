"""Without a compiler: an iterator with other numbers takes over the state of the running one, within an epoch.

TensorFlow saves the running iterator, the graph gets other numbers, a new iterator is made from it and restored, and
its resource takes the old one's place inside the iterator object the training holds. The order stays and nothing is
lost, but the training waits for it (130-185 ms for a small pipeline), so it is done rarely. Where an iterator cannot be
saved the numbers change with the next epoch.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.ops import gen_dataset_ops

from intune_callbacks.pipelines.base import clamp
from intune_callbacks.pipelines.tf_graph import attr
from intune_callbacks.pipelines.tf_model import ModelCount, read_model, stage_nodes
from intune_callbacks.pipelines.tf_native import SinkReading
from intune_callbacks.pipelines.tf_rewrite import KNOBS, GraphStage, Rewritten
from intune_callbacks.pipelines.tf_stats import knob_of
from intune_callbacks.types import Allocation, Clock, PipelineStats, Stage

__all__ = ["HandOver"]

IGNORE_EXTERNAL_STATE = 1
LARGEST_SHUFFLE = 10_000
"""Elements a saved shuffle may hold: 100,000 small rows took 14 s to save and restore."""
LARGEST_BYTES = 256 << 20
"""Bytes the buffers of an iterator may hold to be saved: its state is a copy of them, and the restored one another."""
LONGEST_S = 2.0
"""A hand-over that took longer was the last one: from then on the numbers change with the epoch."""
LEAST_PERIOD_S, PERIODS_OF_COST = 10.0, 100.0
MAX_WINDOW = 4096
VERSION = re.compile(r"V\d+$")
# Restored in the middle of an epoch they were seen to go on where they were; one that chooses among datasets hung.
HANDED = {
    f"{name}Dataset"
    for name in (
        *("Range", "Tensor", "TensorSlice", "TFRecord", "TextLine", "FixedLengthRecord", "Options"),
        *("Map", "ParallelMap", "Filter", "FlatMap", "Interleave", "ParallelInterleave", "Zip", "Concatenate"),
        *("Batch", "ParallelBatch", "PaddedBatch", "Window", "Shuffle", "Repeat", "Take", "Skip", "Cache", "Prefetch"),
    )
}
# Behind a shuffle these make at most one element of one.
NARROW = {f"{name}Dataset" for name in ("Map", "ParallelMap", "Batch", "ParallelBatch", "Prefetch", "Options")}


class HandOver:
    """The stages of one pipeline, changed by handing the state to a new iterator; window and workers are one number.

    Args:
        rewritten: the pipeline's graph with nothing inserted.
        clock: wall clock.
        high: upper limit of workers per stage.

    Attributes:
        dataset: what to iterate in place of the user's.
        why: what can be changed, and when.
    """

    def __init__(self, rewritten: Rewritten, clock: Clock, high: int) -> None:
        self._graph, self._stages, self._clock, self._high = rewritten.graph, rewritten.stages, clock, high
        self._values = {stage.name: max(1, stage.value) for stage in self._stages}
        with tf.device("CPU:0"):
            self._totals = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False)  # delivered, seconds waited
        self._iterators, self._opened_at, self._next_s = 0, 0, 0.0
        self._iterator: weakref.ref[Any] | None = None
        self._counts = {stage.name: ModelCount() for stage in self._stages}
        self._shuffles = [node for node in self._graph.nodes() if node.op.startswith("Shuffle")]
        self._plain, self._built_with = self._build(), dict(self._values)
        self._blocked = self._cannot_save()
        self.dataset = _Followed(self)
        when = f"with the next epoch ({self._blocked})" if self._blocked else "now and then, which takes a moment"
        self.why = "; ".join([f"workers and prefetch depth change {when}", *rewritten.notes])

    def open(self) -> Any:
        """Return a new iterator with the numbers wanted now."""
        self._note(self._running())
        if self._built_with != self._values:
            self._plain, self._built_with = self._build(), dict(self._values)
        iterator = iter(self._plain)
        self._restart()
        self._iterators, self._opened_at = self._iterators + 1, self.waits().delivered
        self._iterator = weakref.ref(iterator)
        return iterator

    def waits(self) -> SinkReading:
        """Return what was delivered and how long the consumer was blocked, in s."""
        delivered, wait_s = self._totals.numpy()
        return SinkReading(delivered=int(delivered), wait_s=float(wait_s), iterators=self._iterators)

    def stages(self) -> tuple[Stage, ...]:
        now = not self._blocked and self._running() is not None and self._clock.wall() >= self._next_s
        return tuple(self._stage(stage, "now" if now else "epoch") for stage in self._stages)

    def stats(self) -> PipelineStats:
        self._note(self._running())
        readings = {s.name: self._counts[s.name].stats(self._values[s.name]) for s in self._stages if s.workers}
        return PipelineStats(self._clock.wall(), self.waits().delivered, readings)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = self._values | clamp(allocation, self.stages())
        now_s = self._clock.wall()
        if wanted != self._values and (self._blocked or self._running() is None):
            self._values = wanted
        elif wanted != self._values and now_s >= self._next_s:
            # A change that came too early is not kept for later: what is wanted by then is another one.
            self._switch(wanted)
            cost_s = self._clock.wall() - now_s
            self._next_s = now_s + cost_s + max(LEAST_PERIOD_S, PERIODS_OF_COST * cost_s)
            if cost_s > LONGEST_S:
                self._blocked = f"handing over took {cost_s:.1f} s"
        return dict(self._values)

    def release(self) -> None:
        """Forget the running iterator; it goes on as it is."""
        self._iterator = None

    def _stage(self, stage: GraphStage, when: Literal["now", "epoch"]) -> Stage:
        value = self._values[stage.name]
        if stage.kind == "prefetch":
            return Stage(
                stage.name, "memory", "items", 1, max(MAX_WINDOW, value), value, when=when, knob=knob_of(stage)
            )
        high = max(value, min(self._high, stage.high or self._high))
        kind: Literal["cpu", "io"] = "io" if stage.kind == "interleave" else "cpu"
        return Stage(stage.name, kind, "workers", 1, high, value, when=when, knob=knob_of(stage))

    def _running(self) -> Any:
        return None if self._iterator is None else self._iterator()

    def _build(self) -> Any:
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(self._graph.graph)
        nodes = {node.name: node for node in graph.node}
        for stage in self._stages:
            node = nodes[stage.node]
            at = self._graph.position(node, KNOBS[node.op][1])
            constant = graph.node.add()
            constant.CopyFrom(nodes[node.input[at].split(":")[0]])
            constant.name = f"IntuneValue/_{stage.node.replace('/', '_')}"
            tensor = tf.make_tensor_proto(self._values[stage.name], attr(constant, "dtype").type)
            constant.attr["value"].tensor.CopyFrom(tensor)
            node.input[at] = constant.name
        options = tf.data.Options()
        options.autotune.enabled = True  # only for the model that counts
        options.experimental_optimization.inject_prefetch = False
        return _timed(self._graph.build(graph), self._totals).with_options(options)

    def _switch(self, wanted: Mapping[str, int]) -> None:
        iterator, before = self._running(), self._values
        self._note(iterator)
        try:
            model = read_model(iterator)
            held_bytes = sum(node.buffered_bytes for node in model.nodes.values()) if model is not None else 0
            if held_bytes > LARGEST_BYTES:
                self._blocked = f"the iterator holds {held_bytes / 1e6:.0f} MB, too much to save"
                return
            holding = self._still_shuffling(iterator)
            state = gen_dataset_ops.serialize_iterator(iterator._iterator_resource, IGNORE_EXTERNAL_STATE)
            # A shuffle that is used up is not in the state: its successor would take the next epoch's seed.
            if holding is None or holding != self._still_shuffling(iterator):
                return
            self._values = dict(wanted)
            plain = self._build()
            successor = iter(plain)
            gen_dataset_ops.deserialize_iterator(successor._iterator_resource, state)
        except (tf.errors.OpError, ValueError) as error:
            self._values = before
            self._blocked = str(error).splitlines()[0]
            return
        replaced = [iterator._iterator_resource, getattr(iterator, "_intune_keeps", None)]
        # The old object hands out what the new one delivers, and keeps it, and what it was made from, alive.
        iterator._intune_keeps = (successor, plain)
        iterator._iterator_resource = successor._iterator_resource
        # tf.data's own tuner may sleep through the end of its iterator, up to a minute: nobody waits for it.
        threading.Thread(target=replaced.clear, name="intune-let-go", daemon=True).start()
        self._plain, self._built_with = plain, dict(wanted)
        self._restart()

    def _cannot_save(self) -> str:
        for node in self._graph.nodes():
            inner = self._graph.inner_ops(node)
            if "GeneratorDataset" in {node.op, *inner}:
                return "the iterator of from_generator cannot be saved"
            foreign = {op for op in {node.op, *inner} if VERSION.sub("", op) not in HANDED}
            foreign |= {op for op in inner if op.startswith("Shuffle")}
            if foreign:
                return f"{min(foreign)} may not go on where it was"
            size = self._graph.number(node, "buffer_size") if node in self._shuffles else None
            if size is not None and not 0 <= size <= LARGEST_SHUFFLE:
                return f"shuffle({size}) takes too long to save"
        if self._graph.dataset.options().experimental_symbolic_checkpoint:
            return "a restored iterator with symbolic_checkpoint may hang"
        return ""

    def _still_shuffling(self, iterator: Any) -> frozenset[int] | None:
        """Return which shuffles hold elements, None unless all do; empty where it is clear without a look."""
        if not self._shuffles:
            return frozenset()
        left = int(self._plain.cardinality()) - (self.waits().delivered - self._opened_at)
        # What is on its way behind the shuffle makes at most one batch each.
        if self._narrow_behind_shuffles() and left > sum(self._values.values()) + 2 * len(self._values) + 2:
            return frozenset()
        model = read_model(iterator)
        found = {at: n for at, n in model.nodes.items() if n.name.startswith("Shuffle")} if model is not None else {}
        alive = frozenset(at for at, node in found.items() if node.buffered_elements > 0)
        return alive if len(alive) == len(found) == len(self._shuffles) else None

    def _narrow_behind_shuffles(self) -> bool:
        behind = [node.name for node in self._shuffles]
        while behind:
            readers = self._graph.consumers(behind.pop())
            if any(VERSION.sub("", node.op) not in NARROW for node in readers):
                return False
            behind += [node.name for node in readers]
        return True

    def _restart(self) -> None:
        for count in self._counts.values():
            count.restart(self.waits().delivered)

    def _note(self, iterator: Any) -> None:
        """Read tf.data's own model of the running iterator; an iterator that took over has none and is estimated."""
        if iterator is None:
            return
        model, delivered = read_model(iterator), self.waits().delivered
        known = stage_nodes(model)
        for at, stage in enumerate(self._stages):
            count = self._counts[stage.name]
            if len(known) == len(self._stages):
                node = known[at]
                count.read(node.num_elements, 1e-9 * node.processing_time, node.buffered_elements)
            else:
                count.estimate(delivered)


class _Followed(dataset_ops._VariantDataset):  # type: ignore[misc]
    """The rewritten dataset, whose newest iterator is remembered."""

    def __init__(self, owner: HandOver) -> None:
        plain = owner._plain
        super().__init__(plain._variant_tensor, plain.element_spec)
        self._options_attr = plain.options()
        self._owner = owner

    def __iter__(self) -> Any:
        return self._owner.open()


def _timed(dataset: Any, totals: Any) -> Any:
    """Return the dataset with each delivery, and the seconds from the question to it, added to `totals`."""

    def add(asked_s: Any, element: Any) -> Any:
        with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
            wait_s = tf.timestamp() - asked_s
        with tf.control_dependencies([totals.assign_add(tf.stack([tf.constant(1.0, tf.float64), wait_s]))]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    asked = tf.data.Dataset.counter().map(lambda _: tf.timestamp())
    return tf.data.Dataset.zip((asked, dataset)).map(add)
