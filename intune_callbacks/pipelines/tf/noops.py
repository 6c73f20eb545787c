"""What TensorFlow's own optimiser leaves out of a tf.data graph, left out of ours before operations are put in."""

from __future__ import annotations

from typing import Any

from intune_callbacks.pipelines.tf.graph import DatasetGraph
from intune_callbacks.pipelines.tf.node import attr, source_of
from intune_callbacks.pipelines.tf.objects import is_wanted

__all__ = ["leave_out_noops"]

_NOOPS = {
    "RepeatDataset": ("count", 1),
    "TakeDataset": ("count", -1),
    "SkipDataset": ("count", 0),
    "ShardDataset": ("num_shards", 1),
}
_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2")


def leave_out_noops(graph: DatasetGraph) -> None:
    """Leave out what hands on all it gets, where the user's options let TensorFlow do so.

    With an operation of ours behind it TensorFlow does not find it any more, or is not asked. A `repeat(1)` that stays
    makes an iterator for the turn it does not take: a shuffle before it would draw seeds for that, and its later epochs
    be others than stock. Names in checkpoints tell of all of them.
    """
    if not is_wanted(graph.dataset.options(), "noop_elimination"):
        return
    for node in graph.nodes():
        argument, value = _NOOPS.get(node.op, ("", 0))
        if (argument and graph.number(node, argument) == value) or (node.op in _MAPS and _is_identity(graph, node)):
            graph.leave_out(node)


def _is_identity(graph: DatasetGraph, node: Any) -> bool:
    """Return whether a map's function gives what it gets, in the same order, and does nothing else."""
    called = attr(node, "f").func.name
    function = next((f for f in graph.graph.library.function if f.signature.name == called), None)
    if attr(node, "Targuments").list.type:  # what the function hands on may be what it captured
        return False
    if function is None or any(inner.op != "Identity" for inner in function.node_def):
        return False
    copies = {inner.name: inner.input[0] for inner in function.node_def}
    given, back = [arg.name for arg in function.signature.input_arg], []
    for arg in function.signature.output_arg:
        source = source_of(function.ret[arg.name])
        while source in copies:
            source = source_of(copies[source])
        back.append(source)
    return given == back
