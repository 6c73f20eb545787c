"""Which stages of a tf.data graph may deliver as they finish, and all of its elements come out all the same."""

from __future__ import annotations

from intune_callbacks.pipelines.tf_graph import DatasetGraph

__all__ = ["free_of_order"]

_AGNOSTIC = {
    *("BatchDataset", "BatchDatasetV2", "ParallelBatchDataset", "PaddedBatchDataset", "PaddedBatchDatasetV2"),
    *("UnbatchDataset", "RebatchDataset", "RebatchDatasetV2", "ParseExampleDataset", "ParseExampleDatasetV2"),
    *("ParallelMapDataset", "ParallelMapDatasetV2", "MapAndBatchDataset"),
    *("ParallelInterleaveDatasetV2", "ParallelInterleaveDatasetV3", "ParallelInterleaveDatasetV4"),
    *("ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3", "RepeatDataset", "ConcatenateDataset"),
    *("PrefetchDataset", "OptionsDataset", "ModelDataset", "CacheDataset", "CacheDatasetV2"),
}
"""What may stand behind such a stage: it hands on each element it gets, whatever came before. Not in it is what counts
elements or pairs them: `take`, `skip`, `shard`, `enumerate`, `zip`, `window`, `scan`, `group_by_window`."""
_WITH_FUNCTION = {"MapDataset", "FilterDataset", "FlatMapDataset", "InterleaveDataset"}
"""The same, but one element after the other: a function with a state would see in which order they come."""
_BEGINS_ANEW = {"RepeatDataset", "ForeverRepeatDataset", "ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2"}


def free_of_order(graph: DatasetGraph) -> frozenset[str]:
    """Return the names of the nodes whose order nothing behind them depends on.

    A node behind a `repeat` is none of them: elements of one epoch would come in the next.

    Args:
        graph: as the user made it.
    """
    nodes = {node.name: node for node in graph.nodes()}
    readers = {name: [reader.name for reader in graph.consumers(name)] for name in nodes}
    repeated: set[str] = set()
    for name, node in nodes.items():  # sources come first
        if node.op in _BEGINS_ANEW or name in repeated:
            repeated |= {name, *readers[name]}
    passing: set[str] = set()
    free: set[str] = set()
    for name, node in reversed(nodes.items()):
        if name == graph.output or (readers[name] and passing.issuperset(readers[name])):
            free.add(name)
            if node.op in _AGNOSTIC or (node.op in _WITH_FUNCTION and not graph.is_stateful(node)):
                passing.add(name)
    return frozenset(free - repeated)
