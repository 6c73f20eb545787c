"""Which stages of a tf.data graph may deliver as they finish, and all of its elements come out all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intune_callbacks.pipelines.tf.graph import DatasetGraph
from intune_callbacks.pipelines.tf.node import attr

__all__ = ["free_of_order", "open_more"]

OPEN = 16
"""Files that an interleave may have open: as many as tf.data has at most where it chooses."""

_AGNOSTIC = {
    *("UnbatchDataset", "ParseExampleDataset", "ParseExampleDatasetV2", "AssertCardinalityDataset"),
    *("ParallelMapDataset", "ParallelMapDatasetV2"),
    *("ParallelInterleaveDatasetV2", "ParallelInterleaveDatasetV3", "ParallelInterleaveDatasetV4"),
    *("ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3", "RepeatDataset", "ConcatenateDataset"),
    *("PrefetchDataset", "OptionsDataset", "ModelDataset"),
}
"""What may stand behind such a stage: it hands on each element it gets, whatever came before. Not in it is what counts
elements or pairs them: `take`, `skip`, `shard`, `enumerate`, `zip`, `window`, `scan`; and `cache`, for
it delivers in the order of its first epoch to whoever reads it later, from a file in other processes, too."""
_WITH_FUNCTION = {"MapDataset", "FilterDataset", "FlatMapDataset", "InterleaveDataset"}
"""The same, but one element after the other: a function with a state would see in which order they come."""
_BATCHES = {"BatchDataset", "BatchDatasetV2", "ParallelBatchDataset"}
_PADDED = {"PaddedBatchDataset", "PaddedBatchDatasetV2"}
_BEGINS_ANEW = {"RepeatDataset", "ForeverRepeatDataset", "ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2"}


def free_of_order(graph: DatasetGraph) -> frozenset[str]:
    """Return the names of the nodes whose order nothing behind them depends on.

    A node behind a `repeat` is none of them: elements of one epoch would come in the next.
    """
    nodes = {node.name: node for node in graph.nodes()}
    readers = {name: [reader.name for reader in graph.consumers(name)] for name in nodes}
    repeated: set[str] = set()
    endless: set[str] = set()
    for name, node in nodes.items():  # sources come first
        if node.op in _BEGINS_ANEW or name in repeated:
            repeated |= {name, *readers[name]}
        if (node.op in _BEGINS_ANEW and (graph.number(node, "count") or 0) < 0) or name in endless:
            endless |= {name, *readers[name]}
    passing: set[str] = set()
    free: set[str] = set()
    for name, node in reversed(nodes.items()):
        if name == graph.output or (readers[name] and passing.issuperset(readers[name])):
            free.add(name)
            if _hands_on(graph, node, nodes, name in endless):
                passing.add(name)
    return frozenset(free - repeated)


def open_more(graph: DatasetGraph, node: Any) -> None:
    """Let an interleave have more files open than its user wrote, where it may.

    Args:
        node: one of those whose order nothing depends on.
    """
    cycle = graph.number(node, "cycle_length")
    calls = graph.number(node, "num_parallel_calls")
    if cycle is not None and 0 < cycle < OPEN and calls is not None and calls >= 1:
        graph.set_number(node, "cycle_length", OPEN)


def _hands_on(graph: DatasetGraph, node: Any, nodes: Mapping[str, Any], is_endless: bool) -> bool:
    if node.op in _WITH_FUNCTION:
        return not graph.is_stateful(node)
    if node.op in _BATCHES | _PADDED:
        # A remainder that is dropped would be what is slowest; elements of several shapes might not fit together.
        source = nodes.get(node.input[0].split(":")[0])
        fits = node.op in _PADDED or (source is not None and _is_one_shape(source))
        return fits and (is_endless or graph.number(node, "drop_remainder") != 1)
    return node.op in _AGNOSTIC


def _is_one_shape(node: Any) -> bool:
    shapes = attr(node, "output_shapes").list.shape
    return not any(shape.unknown_rank or any(side.size < 0 for side in shape.dim) for shape in shapes)
