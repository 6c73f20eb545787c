"""One stage of a tf.data graph: what it is, where its number stands, and how the user writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from intune_callbacks.pipelines.tf.graph import HARMLESS, DatasetGraph

__all__ = ["CALLS", "KNOBS", "GraphStage", "Kind", "buffered_each", "capacity_of", "in_turn", "live_numbers"]

Kind = Literal["map", "interleave", "batch", "prefetch"]
KNOBS: dict[str, tuple[Kind, str]] = {
    "ParallelMapDataset": ("map", "num_parallel_calls"),
    "ParallelMapDatasetV2": ("map", "num_parallel_calls"),
    "MapAndBatchDataset": ("map", "num_parallel_calls"),
    "ParallelInterleaveDatasetV2": ("interleave", "num_parallel_calls"),
    "ParallelInterleaveDatasetV3": ("interleave", "num_parallel_calls"),
    "ParallelInterleaveDatasetV4": ("interleave", "num_parallel_calls"),
    "ParallelBatchDataset": ("batch", "num_parallel_calls"),
    "PrefetchDataset": ("prefetch", "buffer_size"),
}
CALLS = ("MapDataset", "ParallelMapDataset", "MapAndBatchDataset")
# In several calls at once they give what they give in turn; those of Python are the user's word, as `num_workers=1` is.
ALIKE = HARMLESS | {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp"),
    *("LookupTableFindV2", "LookupTableSizeV2", "PyFunc", "EagerPyFunc"),
}


@dataclass(frozen=True, slots=True)
class GraphStage:
    """One stage with a number that tf.data reads again while it runs.

    Args:
        name: the user's function, or what the stage does; unique in the pipeline.
        kind: what it does.
        node: the graph node that does it.
        value: its parallelism or buffer size in the graph as it is now, -1 for AUTOTUNE.
        high: the largest value it takes, None for any, -1 where tf.data chooses.
        capacity: results it can hold back, None when that is its parallelism or buffer size.
        workers: what can compute at once to begin with; 0 for a prefetch.
        automatic: the user left the number to AUTOTUNE.
        unbounded: the user asked for threads of its own, as many as there are calls.
        each: elements an interleave keeps of each of its datasets.
        fused: tf.data makes one stage of this map and the batch behind it, whose only number is its workers.
        library: the installed package's module whose code made it; empty where the user's did.
        calls: an interleave of datasets that call functions.
    """

    name: str
    kind: Kind
    node: str
    value: int
    high: int | None = None
    capacity: int | None = None
    workers: int = 0
    automatic: bool = False
    unbounded: bool = False
    each: int = 0
    fused: bool = False
    library: str = ""
    calls: bool = False

    def knob(self) -> str:
        """Return how the user writes the number, or where it is out of reach; see `intune_callbacks.Stage`."""
        if self.library:
            return f"# inside {self.library}"
        name = self.name.split("#")[0]
        given = ["..." if name == self.kind else name]  # its own arguments, or a function without a name
        if self.kind == "interleave" and self.high is not None and self.high > 0:
            # Where the user gave none, tf.data chooses it by the number of calls, and so the order.
            given = [*given, *(["..."] if given != ["..."] else []), f"cycle_length={self.high}"]
        code = f".{self.kind}({', '.join(given)}, num_parallel_calls={{}})"
        code = ".prefetch({})" if self.kind == "prefetch" else code
        if not self.automatic and not self.is_on_pool:
            return code
        return f"{code}  # was {'tf.data.AUTOTUNE' if self.automatic else self.value}"  # more calls than threads, maybe

    @property
    def is_on_pool(self) -> bool:
        """Whether its calls are made on threads of TensorFlow that all stages share."""
        return not self.library and not self.unbounded and (self.kind == "map" or self.calls)


def in_turn(graph: DatasetGraph, node: Any, kind: Kind, value: int) -> str:
    """Return why a map's one call at a time stays one, empty where it need not: its results would be others."""
    if kind != "map" or value != 1 or not graph.is_stateful(node, ALIKE):
        return ""
    name = graph.function_name(node, "lambda")
    return (
        f"map({name}) has num_parallel_calls=1 and stays so, as {name} draws random numbers or changes a state, and "
        "more calls at once would change its results: num_parallel_calls=tf.data.AUTOTUNE makes it live if they may"
    )


def buffered_each(graph: DatasetGraph, node: Any) -> int:
    """Return how many elements an interleave keeps of each of its datasets; what the kernel makes of AUTOTUNE."""
    each = graph.number(node, "buffer_output_elements") or -1
    return each if each > 0 else 2 * (graph.number(node, "block_length") or 1) + 1


def capacity_of(graph: DatasetGraph, node: Any, cycle_length: int | None) -> int | None:
    """Return how many elements an interleave keeps in all, None for what is none."""
    if cycle_length is None or cycle_length < 1:
        return None
    ahead = graph.number(node, "prefetch_input_elements")
    # What the kernel makes of AUTOTUNE.
    ahead = ahead if ahead is not None and ahead >= 0 else 2 * cycle_length
    return (cycle_length + ahead) * buffered_each(graph, node)


def live_numbers(stages: Sequence[GraphStage]) -> str:
    """Return in words which numbers of the stages are live."""
    named = {kind: [s.name for s in stages if s.kind == kind] for kind in ("map", "batch", "interleave")}
    both = [*named["map"], *named["batch"]]
    parts = [f"workers and window of {', '.join(both)}"] if both else []
    parts += [f"workers of {', '.join(named['interleave'])}"] if named["interleave"] else []
    parts += ["the prefetch depth"] if any(s.kind == "prefetch" for s in stages) else []
    if not parts:
        return "no stage has a number to change"
    return f"{' and '.join(parts)} {'is' if parts == ['the prefetch depth'] else 'are'} live"
