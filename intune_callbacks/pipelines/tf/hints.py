"""Oddities of a tf.data pipeline that its graph tells without running it, as sentences."""

from __future__ import annotations

from collections import Counter
from typing import Any

from intune_callbacks.pipelines.tf.graph import DatasetGraph
from intune_callbacks.pipelines.tf.node import functions_of, source_of
from intune_callbacks.pipelines.tf.objects import is_wanted
from intune_callbacks.pipelines.tf.stage import KNOBS
from intune_callbacks.types import Hint

__all__ = ["hints_of"]

LARGE_SHUFFLE = 50_000
"""Elements from which on the wait for the first batch, while the buffer is filled, is worth a sentence."""
SAME_NUMBER = 3
"""Stages with the same number of calls, and prefetches, that are worth a sentence. A choice: two may well be meant."""
UNKNOWN_OPTIONS = ("OptionsDataset", "IntuneStage")
INTERLEAVES, LEGACY = "ParallelInterleaveDataset", "LegacyParallelInterleaveDataset"
FEEDS = "serial"
"""The kind of a hint about what feeds all stages and makes one element at a time, whatever is set."""
FILES = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")


def hints_of(graph: DatasetGraph) -> tuple[Hint, ...]:
    """Return what is odd about a pipeline; `graph` as the user's dataset is, before anything was edited."""
    nodes = _written(graph)
    found = [hint for node in nodes for hint in (*_files(graph, node), *_shuffle(graph, node))]
    found += [*_same_number(graph, nodes), *_prefetches(graph, nodes), *_end(graph), *_sequential(graph, nodes)]
    return (*found, *_inside(graph, nodes), *_generator(graph, nodes))


def _written(graph: DatasetGraph) -> list[Any]:
    """Return the nodes as the user wrote them: of a dataset that several read, as of folds, each has a copy."""
    numbers: dict[str, int] = {}
    known: dict[tuple[Any, ...], int] = {}
    first = []
    for node in graph.nodes():
        functions = functions_of(node)  # of each call of the user's another one
        told = [numbers.get(name, graph.told(name)) for name in map(source_of, node.input)] if not functions else []
        kind = (node.op, *functions, *told)
        if kind not in known:
            first.append(node)
        numbers[node.name] = known.setdefault(kind, len(known))
    return first


def _files(graph: DatasetGraph, node: Any) -> list[Hint]:
    if not node.op.startswith(INTERLEAVES):
        return []
    files = _count(graph, _input(graph, node))
    cycle, calls = graph.number(node, "cycle_length"), graph.number(node, "num_parallel_calls")
    if files is None or max(cycle or 0, calls or 0) <= files:
        return []
    name = graph.function_name(node, "interleave")
    most, what = (calls, "workers") if calls is not None and calls > files else (cycle, "as cycle_length")
    return [
        Hint(
            f"{name} has {most} {what} for {files} file{'s' * (files != 1)}: no more than {files} can be read at once",
            f"write the data to {most} files or more, or cycle_length={files}",
            "files",
            name,
        )
    ]


def _shuffle(graph: DatasetGraph, node: Any) -> list[Hint]:
    size = graph.number(node, "buffer_size") if node.op.startswith("Shuffle") else None
    if size is None or size < 2:
        return []
    rows = _count(graph, _input(graph, node))
    if rows is not None and size >= rows > 1000:
        what = f"shuffle({size}) holds the whole epoch of {rows} elements, and is filled before the first batch"
    elif (rows is None or rows > size) and size >= LARGE_SHUFFLE:
        what = f"shuffle({size}) is filled with {size} elements before the first batch"
    else:
        return []
    if _is_only_slices(graph, node):
        return []
    fewer = f".shuffle({max(1000, min(min(size, rows or size) // 10, 10_000))})"
    if rows is None:
        return [Hint(what, f"{fewer}  # and the order of the files: list_files(shuffle=True)", "shuffle", "shuffle")]
    # Behind a cache the order would be the same in each epoch.
    remark = "" if _is_cached(graph, node) else "  # or all of them in front of the map, where nothing is computed yet"
    return [Hint(what, fewer + remark, "shuffle", "shuffle")]


def _same_number(graph: DatasetGraph, nodes: list[Any]) -> list[Hint]:
    numbers = [graph.number(node, "num_parallel_calls") for node in nodes if node.op != "MapDataset"]
    fixed = Counter(number for number in numbers if number is not None and number > 1)
    return [
        Hint(
            f"{count} stages have the same num_parallel_calls={number}, whatever each of them costs",
            "num_parallel_calls=tf.data.AUTOTUNE",
            "workers",
        )
        for number, count in fixed.items()
        if count >= SAME_NUMBER
    ]


def _prefetches(graph: DatasetGraph, nodes: list[Any]) -> list[Hint]:
    prefetches = [node for node in nodes if node.op == "PrefetchDataset"]
    for node in prefetches:
        if _behind_options(graph, _input(graph, node)).op == "PrefetchDataset":
            what = "two prefetches follow each other: the second one only moves elements from one buffer to another"
            return [Hint(what, "a single .prefetch(tf.data.AUTOTUNE) at the end", "prefetch", "prefetch")]
    if len(prefetches) >= SAME_NUMBER:
        what = f"the pipeline has {len(prefetches)} prefetches: each holds elements in memory and costs a thread"
        return [Hint(what, "a single .prefetch(tf.data.AUTOTUNE) at the end", "prefetch", "prefetch")]
    return []


def _end(graph: DatasetGraph) -> list[Hint]:
    options = graph.dataset.options()
    end = _behind_options(graph, graph.node(graph.output))
    injected = options.autotune.enabled is not False and is_wanted(options, "inject_prefetch")
    if injected or end.op in ("PrefetchDataset", "MapAndBatchDataset") or end.op.startswith("Parallel"):
        return []
    what = "there is no prefetch at the end, and tf.data adds none as its tuner is switched off"
    return [Hint(f"{what}: batches are made while the training waits", ".prefetch(2)", "prefetch")]


def _sequential(graph: DatasetGraph, nodes: list[Any]) -> list[Hint]:
    found = []
    for node in nodes:
        name, written = graph.function_name(node, "lambda"), graph.function_name(node, "...")
        cycle = graph.number(node, "cycle_length") or 0
        if node.op == "MapDataset" and not graph.is_internal(node) and graph.is_stateful(node):
            what = f"map({name}) computes one element at a time, as {name} keeps a state or runs Python and tf.data "
            line = f".map({written}, num_parallel_calls=tf.data.AUTOTUNE)  # if its results do not depend on the order"
            found.append(Hint(f"{what}leaves it in order", line, "order", name))
        if node.op == "InterleaveDataset" and not graph.is_internal(node) and cycle > 1:
            many = min(cycle, _count(graph, _input(graph, node)) or cycle)
            what = f"interleave({name}) reads its {many} datasets in turn, one at a time"
            more = "" if written == "..." else ", ..."
            line = f".interleave({written}{more}, num_parallel_calls=tf.data.AUTOTUNE)  # where reads are slow"
            found.append(Hint(what, line, "workers", name))
        if _reads_one_file(graph, node):
            # Without a cycle_length there may be one for each CPU.
            line = f".interleave({written}, cycle_length=8, num_parallel_calls=8)"
            fn = graph.function(node)
            if graph.is_internal(node) and not isinstance(fn, type):  # `TFRecordDataset` and its like, of several files
                is_batched = "make_batched_features" in getattr(fn, "__qualname__", "")
                line = "reader_num_threads=8" if is_batched else "num_parallel_reads=8"
            line += "  # where reads are slow: gives another order"
            found.append(Hint("one file is read at a time", line, "workers", name))
    return found


def _inside(graph: DatasetGraph, nodes: list[Any]) -> list[Hint]:
    """What computes inside of a `flat_map` and its like, where no number is in reach."""
    found = []
    for node in nodes:
        kinds = sorted({KNOBS[op][0] for op in graph.inner_ops(node) if op in KNOBS} - {"prefetch"})
        if kinds and not graph.is_internal(node):
            what = "interleave" if "Interleave" in node.op else node.op.removesuffix("Dataset")
            inside = f"what is inside the function of {what} ({', '.join(kinds)})"
            why = "begins anew with each of its datasets and is left to tf.data"
            told = f"{inside} {why}: move it behind the {what} to make it live"
            found.append(Hint(told, "", FEEDS, graph.function_name(node, what)))
    return found


def _generator(graph: DatasetGraph, nodes: list[Any]) -> list[Hint]:
    """A source in Python; behind a cache it runs in the first epoch only."""
    is_one = any(node.op == "FlatMapDataset" and "GeneratorDataset" in graph.inner_ops(node) for node in nodes)
    if not is_one or any(node.op.startswith("CacheDataset") for node in nodes):
        return []
    what = "from_generator runs a Python generator, which makes one element at a time"
    more = "several of them in one .interleave(..., num_parallel_calls=...) overlap their waits, in another order"
    return [Hint(f"{what}; {more}", "", FEEDS, "from_generator")]


def _reads_one_file(graph: DatasetGraph, node: Any) -> bool:
    is_one = node.op == "FlatMapDataset" or (node.op.startswith(LEGACY) and graph.number(node, "cycle_length") == 1)
    if not is_one or _count(graph, _input(graph, node)) == 1:
        return False
    return any(op.startswith(FILES) for op in graph.inner_ops(node))


def _input(graph: DatasetGraph, node: Any) -> Any:
    return graph.node(node.input[0].split(":")[0])


def _behind_options(graph: DatasetGraph, node: Any) -> Any:
    while node.op in UNKNOWN_OPTIONS:
        node = _input(graph, node)
    return node


def _is_only_slices(graph: DatasetGraph, node: Any) -> bool:
    """Whether a shuffle holds names or rows that are in memory already."""
    return _behind_options(graph, _input(graph, node)).op in ("TensorSliceDataset", "RangeDataset")


def _is_cached(graph: DatasetGraph, node: Any) -> bool:
    """Whether there is a cache before a node all of whose elements come from one source."""
    while node.op not in ("TensorSliceDataset", "RangeDataset"):
        node = _input(graph, node)
        if node.op.startswith("CacheDataset"):
            return True
    return False


def _count(graph: DatasetGraph, node: Any) -> int | None:
    """Return how many elements a dataset has where its graph says so at once; None where it does not."""
    if node.op in ("OptionsDataset", "PrefetchDataset", "CacheDatasetV2", "MapDataset", "ParallelMapDatasetV2") or (
        node.op.startswith("Shuffle") and "Repeat" not in node.op
    ):
        return _count(graph, _input(graph, node))
    if node.op == "TensorSliceDataset":
        shape = graph.shape_of(node.input[0])
        return shape[0] if shape else None
    if node.op == "RangeDataset":
        start, stop, step = (graph.number(node, name) for name in ("start", "stop", "step"))
        return None if start is None or stop is None or not step else max(0, -(-(stop - start) // step))
    return None
