"""Edit the graph of a tf.data pipeline so that its numbers can be changed while it runs, and its output stays the same.

What is inserted: an `IntuneStage` behind each stage, an `IntuneSink` at the end. What is changed, and only when the
pipeline is to be tuned: maps that TensorFlow's own optimiser would make parallel become so here, and what keeps a
number from being set is switched off. Every number is left as it is: the pipeline begins as the stock one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure

from intune_callbacks.pipelines.tf.graph import DatasetGraph
from intune_callbacks.pipelines.tf.hints import hints_of
from intune_callbacks.pipelines.tf.native import BEFORE, BEHIND, INSIDE, SINK_OP, STAGE_OP
from intune_callbacks.pipelines.tf.node import attr, functions_of
from intune_callbacks.pipelines.tf.noops import leave_out_noops
from intune_callbacks.pipelines.tf.objects import is_wanted
from intune_callbacks.pipelines.tf.order import free_of_order, open_more
from intune_callbacks.pipelines.tf.stage import CALLS, KNOBS, GraphStage, Kind, buffered_each, capacity_of, in_turn
from intune_callbacks.types import Hint

__all__ = ["Rewritten", "rewrite"]

AUTOTUNE = -1
AUTO_WORKERS = 16
"""tf.data begins with so many at most where it chooses."""
BATCHES = ("BatchDataset", "BatchDatasetV2")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of a dataset.

    Args:
        graph: the edited graph.
        stages: what can be set, sources first.
        notes: one sentence for each thing that cannot, with the smallest change that would help.
        hints: what is odd about the user's own graph.
    """

    graph: DatasetGraph
    stages: tuple[GraphStage, ...]
    notes: tuple[str, ...]
    hints: tuple[Hint, ...] = ()

    def options(self, live: bool) -> Any:
        """Return the options of the dataset that is made from the graph; `live` as for `rewrite`."""
        options = tf.data.Options()
        # All other options of the user are inside the graph; this one is read in Python, when an iterator is saved.
        policy = self.graph.dataset.options().experimental_external_state_policy
        if policy is not None:
            options.experimental_external_state_policy = policy
        # Where it was wanted the graph has one of its own, inside of our last operation.
        options.experimental_optimization.inject_prefetch = False
        if live:
            # tf.data keeps the numbers in a model that it makes only for its own tuner, which has nothing left to tune.
            options.autotune.enabled = True
            # A map that returns what it gets would go, and its operation set the next map's number inside its lock;
            # what would go is left out already.
            options.experimental_optimization.noop_elimination = False
        return options


def rewrite(dataset: Any, pipeline: str, *, live: bool, cpus: int = 2, in_order: bool = True) -> Rewritten:
    """Return the graph of a dataset with its stages in reach.

    Args:
        dataset: the user's; it is not changed.
        pipeline: the key under which `Native` knows it.
        live: False leaves every stage as the user, or TensorFlow's optimiser, sets it.
        cpus: what AUTOTUNE becomes where it becomes a number: so many workers for all stages together, 2 each at least.
        in_order: False lets stages deliver as they finish, where the same elements come out.

    Raises:
        CannotRewrite: see `DatasetGraph`.
    """
    return _Edit(DatasetGraph(dataset), pipeline, live, cpus, in_order).run()


class _Edit:
    def __init__(self, graph: DatasetGraph, pipeline: str, live: bool, cpus: int, in_order: bool) -> None:
        self.graph, self.pipeline, self.live, self.cpus = graph, pipeline, live, cpus
        self.options = graph.dataset.options()
        is_free = live and not in_order and self.options.deterministic is not True
        self.free = free_of_order(graph) if is_free else frozenset()
        self.unbounded: set[str] = set()
        self.notes: list[str] = []
        self.taken: dict[str, int] = {}
        self.counts = True

    def run(self) -> Rewritten:
        hints = hints_of(self.graph)
        leave_out_noops(self.graph)
        for node in self.graph.nodes():
            self.make_parallel(node)
            if node.name in self.free and attr(node, "deterministic").s == b"default":
                node.attr["deterministic"].s = b"false"
                open_more(self.graph, node)
        # Without a stage that computes there is nothing to count, and a look at each small element would only cost.
        kinds = {KNOBS[node.op][0] for node in self.graph.nodes() if node.op in KNOBS}
        self.counts = bool(kinds - {"prefetch"})
        self.auto_workers = max(2, self.cpus // max(1, self.left_to_autotune()))
        stages: list[GraphStage] = []
        for node in self.graph.nodes():
            stage = self.stage(node)
            if stage is not None:
                stages.append(stage)
                self.reach(node, stage)
            elif self.counts and "output_types" in node.attr and functions_of(node):
                # Else its function would compute on, and be counted for, the workers of the next stage.
                self.insert_stage(self.graph.consumers(node.name)[0].name if self.fuses(node) else node.name, "")
        prefetch = self.missing_prefetch()
        if prefetch is not None:
            stages.append(prefetch)
        self.end("IntuneSink", SINK_OP)
        return Rewritten(self.graph, tuple(stages), tuple(dict.fromkeys(self.notes)), hints)

    def stage(self, node: Any) -> GraphStage | None:
        kind, argument = KNOBS.get(node.op, (None, ""))
        value = self.graph.number(node, argument) if kind else None
        if kind is None or value is None or (kind == "prefetch" and value == 0):  # with a depth that had a thread
            return None
        if why := in_turn(self.graph, node, kind, value):
            self.notes.append(why)
            return None
        name = self.unique(self.graph.function_name(node, kind) if kind in ("map", "interleave") else kind)
        high = self.graph.number(node, "cycle_length")
        automatic, unbounded = value == AUTOTUNE, attr(node, "use_unbounded_threadpool").b
        if self.live and (begin := self.begin(kind, value, high)) != value:
            value = begin
            self.graph.set_number(node, argument, value)
        if self.live and kind == "prefetch":
            node.attr["legacy_autotune"].b = False
        if unbounded:
            self.unbounded.add(node.name)
            node.attr["use_unbounded_threadpool"].b = not self.live
        workers = 0 if kind == "prefetch" else self.auto_workers if automatic else value
        each = buffered_each(self.graph, node) if kind == "interleave" else 0
        capacity = capacity_of(self.graph, node, high)
        library = self.graph.library(node) if kind in ("map", "interleave") else ""
        calls = kind == "interleave" and any(op.startswith(CALLS) for op in self.graph.inner_ops(node))
        numbers = name, kind, node.name, value, high, capacity, workers
        return GraphStage(*numbers, automatic, unbounded, each, self.fuses(node), library, calls)

    def left_to_autotune(self) -> int:
        known = [(node, KNOBS[node.op]) for node in self.graph.nodes() if node.op in KNOBS]
        return sum(kind != "prefetch" and self.graph.number(node, knob) == AUTOTUNE for node, (kind, knob) in known)

    def begin(self, kind: Kind, value: int, high: int | None) -> int:
        """Return with which number a stage begins: the user's, or -1 while tf.data may choose it."""
        if value != AUTOTUNE:
            return min(value, high) if high is not None and high > 0 else value
        if kind == "prefetch":
            return 1
        if self.options.autotune.enabled is not False or (high is not None and high < 0):
            return AUTOTUNE
        # What tf.data begins with, and stays with where its tuner is switched off.
        workers = AUTO_WORKERS if kind == "interleave" else min(AUTO_WORKERS, self.cpus)
        return max(1, min(workers, high) if high is not None else workers)

    def unique(self, name: str) -> str:
        self.taken[name] = self.taken.get(name, 0) + 1
        return name if self.taken[name] == 1 else f"{name}#{self.taken[name]}"

    def reach(self, node: Any, stage: GraphStage) -> None:
        # tf.data makes one node of a map and the batch behind it: anything in between would prevent that.
        self.insert_stage(self.graph.consumers(node.name)[0].name if stage.fused else node.name, stage.name)
        if stage.kind == "interleave":
            self.time_inside(node, stage.name)
            self.insert_stage(node.input[0].split(":")[0], stage.name, BEFORE)

    def insert_stage(self, behind: str, name: str, role: int = BEHIND) -> None:
        node = self.graph.insert_after(behind, STAGE_OP)
        self.describe(node, name, role)

    def describe(self, node: Any, name: str, role: int = BEHIND) -> None:
        node.attr["pipeline"].s = self.pipeline.encode()
        node.attr["stage"].s = name.encode()
        node.attr["role"].i = role

    def time_inside(self, node: Any, name: str) -> None:
        """Put the stopwatch where an interleave's own threads read: at the end of the function that makes datasets."""
        library = self.graph.graph.library
        function = next((f for f in library.function if f.signature.name == node.attr["f"].func.name), None)
        if function is None or len(function.ret) != 1:
            return
        copy = library.function.add()
        copy.CopyFrom(function)
        # Of each run another one: with the same name in several graphs TensorFlow refuses all but the first.
        copy.signature.name = f"{function.signature.name}_intune{len(library.function)}_{self.pipeline.split('/')[-1]}"
        node.attr["f"].func.name = copy.signature.name
        (output,) = copy.ret
        clock = copy.node_def.add(name="IntuneStageInside", op=STAGE_OP, input=[copy.ret[output]])
        self.describe(clock, name, INSIDE)
        clock.attr["output_types"].CopyFrom(node.attr["output_types"])
        clock.attr["output_shapes"].CopyFrom(node.attr["output_shapes"])
        copy.ret[output] = f"{clock.name}:handle:0"

    def make_parallel(self, node: Any) -> None:
        if node.op == "MapDataset" and not attr(node, "force_synchronous").b:
            self.parallel_map(node)
        elif self.live and node.op in ("InterleaveDataset", "LegacyParallelInterleaveDatasetV2"):
            self.parallel_interleave(node)

    def parallel_map(self, node: Any) -> None:
        if not is_wanted(self.options, "map_parallelization"):
            return
        if self.options.autotune.enabled is False or self.graph.is_internal(node):
            return
        if self.graph.is_stateful(node):
            name = self.graph.function_name(node, "lambda")
            self.notes.append(
                f"map({name}) makes one call after the other, and as {name} keeps a state or runs Python, parallel "
                "calls might change its results: num_parallel_calls=tf.data.AUTOTUNE makes it live if they do not"
            )
            return
        node.op = "ParallelMapDatasetV2"
        node.input.append(self.graph.constant(AUTOTUNE))
        if "force_synchronous" in node.attr:
            del node.attr["force_synchronous"]
        node.attr["deterministic"].s = b"default" if node.name in self.free else b"true"

    def parallel_interleave(self, node: Any) -> None:
        """Give the reads of `num_parallel_reads` a number to set; one that reads in turn stays, for it costs less."""
        legacy = node.op.startswith("Legacy")
        cycle, block = self.graph.number(node, "cycle_length"), self.graph.number(node, "block_length")
        if legacy and cycle == 1:  # `make_csv_dataset`, a row at a time: there is no number to raise, and a look costs
            return
        order = attr(node, "deterministic").s
        ordered = order == b"true" or (order == b"default" and self.options.deterministic is not False)
        # Where a file ends in the middle of a block the two operations go on differently.
        if not legacy or cycle is None or cycle < 1 or block != 1 or not ordered or self.graph.is_stateful(node):
            self.notes.append(
                f"interleave({self.graph.function_name(node, 'lambda')}) has no number that can be set while it "
                "runs: interleave(..., num_parallel_calls=tf.data.AUTOTUNE) has"
            )
            return
        del node.input[-2:]
        node.input.extend([self.graph.constant(AUTOTUNE), self.graph.constant(AUTOTUNE), self.graph.constant(cycle)])
        node.op = "ParallelInterleaveDatasetV4"
        node.attr["deterministic"].s = b"default" if node.name in self.free else b"true"

    def missing_prefetch(self) -> GraphStage | None:
        """Put the prefetch tf.data would add outside of the sink inside it; return its stage."""
        end = self.graph.node(self.graph.output)
        while end.op in ("OptionsDataset", "IgnoreErrorsDataset", STAGE_OP):
            end = self.graph.node(end.input[0])
        wanted = self.options.autotune.enabled is not False and is_wanted(self.options, "inject_prefetch")
        if end.op in KNOBS or not wanted or self.feeds_from_map(end):
            return None
        node = self.end("prefetch", "PrefetchDataset")
        value = self.begin("prefetch", AUTOTUNE, None) if self.live else AUTOTUNE
        node.input.append(self.graph.constant(value))
        node.attr["legacy_autotune"].b = False
        node.attr["slack_period"].i = 0
        stage = GraphStage(self.unique("prefetch"), "prefetch", node.name, value, automatic=True)
        self.insert_stage(node.name, stage.name)
        return stage

    def feeds_from_map(self, end: Any) -> bool:
        if end.op not in BATCHES:
            return False
        while (end := self.graph.node(end.input[0])).op == STAGE_OP:
            pass
        return self.fuses(end)

    def fuses(self, node: Any) -> bool:
        """Return whether tf.data makes one node of a map and the batch behind it."""
        if node.name in self.unbounded or not is_wanted(self.options, "map_and_batch_fusion"):
            return False
        readers = self.graph.consumers(node.name) if node.op in ("MapDataset", "ParallelMapDatasetV2") else []
        return len(readers) == 1 and readers[0].op in BATCHES

    def end(self, name: str, op: str) -> Any:
        spec = self.graph.dataset.element_spec
        types, shapes = tf.compat.v1.AttrValue(), tf.compat.v1.AttrValue()
        types.list.type.extend(t.as_datatype_enum for t in structure.get_flat_tensor_types(spec))
        shapes.list.shape.extend(tf.TensorShape(s).as_proto() for s in structure.get_flat_tensor_shapes(spec))
        node = self.graph.insert_after(self.graph.output, op, types, shapes)
        if op == SINK_OP:
            node.attr["pipeline"].s = self.pipeline.encode()
        return node
