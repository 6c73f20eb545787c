"""A tf.data pipeline as a graph: what its nodes are, what the user calls them, and a dataset from the edited graph.

The graph is TensorFlow's own serialisation of the dataset. Two things in it are copies that must not be: variables and
tables (a copy would not see what the training assigns to them) and large tensors. What a function captured is therefore
put back as the very tensors it captured; seeds and caches are found again by name and so go on being shared.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import options as options_lib
from tensorflow.python.framework import op_def_registry, ops

from intune_callbacks.pipelines.look import is_installed
from intune_callbacks.pipelines.tf.node import attr, functions_of, readers_of, said, source_of, spans_of
from intune_callbacks.pipelines.tf.objects import held, held_bytes, held_rows, same_as, why_not, wrapped, wrappers

__all__ = ["HARMLESS", "CannotRewrite", "DatasetGraph"]

LARGEST_HELD_BYTES = 32 * 2**20
"""Tensors of the sources are written down once before the first step: 32 MB took .2 s, 60 .7, 21 MB of strings .3."""
LARGEST_COPY_BYTES = 16 * 2**20
"""What stays in the graph is copied several times, and looked through, before that: 24 MB took .5 s, 256 MB 19 s."""
SHARED_FROM = 4096
"""Constants of fewer elements stay there: a choice, for they are many, and cost little."""
MOST_ROWS = 8000
"""Ragged rows, which are written down one by one: 25 000 took 3.9 s beside load. A choice: a third of that."""
ELSEWHERE = "read them from files, or from a generator, to make its stages live"
DATASET_OP = re.compile(r"Dataset(V\d+)?$")
# These hold state of their own, or hand it to functions: two of them in parallel could change the result.
RANDOM_DATASETS = ("RandomDataset", "ShuffleDataset", "ShuffleAndRepeatDataset", "SamplingDataset", "GeneratorDataset")
HARMLESS = {"Assert", "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile"}
# Nodes by which TensorFlow writes down a resource of the user: to run them would make a second one.
COPIES = re.compile(r"VarHandle|Variable|Table|Resource|Mutex|Queue|Stack|Barrier|Lookup")


class CannotRewrite(Exception):
    """The dataset cannot be taken apart and put together again; the message is one sentence for the user."""


class DatasetGraph:
    """The graph of one dataset, to look at and to edit.

    Args:
        dataset: any eager `tf.data.Dataset`; it is not changed, and has to live as long as what is built here, for it
            owns the seeds, the caches and the Python functions.

    Raises:
        CannotRewrite: TensorFlow cannot write the dataset down, or it would have to be copied.
    """

    def __init__(self, dataset: Any) -> None:
        if why := why_not(dataset):
            raise CannotRewrite(why)
        _check_size(held_bytes(dataset), LARGEST_HELD_BYTES)
        if (rows := held_rows(dataset)) > MOST_ROWS:
            raise CannotRewrite(f"{rows} ragged rows are part of the dataset (from_tensor_slices); {ELSEWHERE}")
        try:
            text = dataset._as_serialized_graph(external_state_policy=options_lib.ExternalStatePolicy.IGNORE).numpy()
        except (tf.errors.OpError, ValueError) as error:
            raise CannotRewrite(f"the pipeline is only timed: TensorFlow cannot serialise it: {said(error)}") from error
        _check_size(len(text), LARGEST_HELD_BYTES)  # datasets that functions capture say nothing before
        self.dataset = dataset
        self.graph = tf.compat.v1.GraphDef.FromString(text)
        self.output = self._take_output()
        self._wrappers = {wrapper.function.name: wrapper for wrapper in wrappers(dataset)}
        self._functions = {f.signature.name: f for f in self.graph.library.function}
        self._by_name = {node.name: node for node in self.graph.node}
        self._readers = readers_of(self.graph.node)
        self._captures: dict[str, Any] = {}
        for node in list(self.graph.node):
            self._share_captures(node)
        self._share_constants()
        _check_size(self.graph.ByteSize(), LARGEST_COPY_BYTES)

    def nodes(self) -> Iterator[Any]:
        """Yield the dataset nodes, sources before their consumers."""
        return (node for node in list(self.graph.node) if DATASET_OP.search(node.op))

    def node(self, name: str) -> Any:
        """Return the node of this name."""
        return self._by_name[name]

    def consumers(self, name: str) -> list[Any]:
        """Return the nodes that read from the node of this name."""
        return list(self._readers.get(name, ()))

    def number(self, node: Any, argument: str) -> int | None:
        """Return the constant a node gets for one of its arguments; None when it is not a constant number."""
        spans = spans_of(node)
        if argument not in spans:
            return None
        source = self._by_name.get(source_of(node.input[spans[argument].start]))
        if source is None or source.op != "Const":
            return None
        value = tf.make_ndarray(source.attr["value"].tensor)
        return int(value) if value.shape == () and value.dtype.kind in "iub" else None

    def shape_of(self, text: str) -> tuple[int, ...] | None:
        """Return the shape of a constant that is an input of a node; None when it is none."""
        source = self._by_name.get(source_of(text))
        if source is None or source.op != "Const":
            return tuple(self._captures[source_of(text)].shape) if source_of(text) in self._captures else None
        return tuple(side.size for side in source.attr["value"].tensor.tensor_shape.dim)

    def told(self, name: str) -> bytes:
        """Return what a node is told: the value of a constant, else what it does."""
        node = self._by_name[name]
        return bytes(node.attr["value"].SerializeToString()) if node.op == "Const" else node.op.encode()

    def set_number(self, node: Any, argument: str, value: int) -> None:
        """Give a node another constant for one of its arguments."""
        at = spans_of(node)[argument].start
        old = self._by_name[source_of(node.input[at])]
        node.input[at] = self.constant(value, tf.as_dtype(old.attr["dtype"].type))

    def constant(self, value: int, dtype: Any = tf.int64) -> str:
        """Add a constant; return its name."""
        node = self.add("Const", [])
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.array(value, dtype.as_numpy_dtype)))
        return str(node.name)

    def add(self, op: str, inputs: list[str]) -> Any:
        """Add a node without attributes; return it."""
        node = self.graph.node.add(name=f"Intune{op.removeprefix('Intune')}/_{len(self.graph.node)}", op=op)
        node.input.extend(inputs)
        self._by_name[node.name] = node
        return node

    def insert_after(self, name: str, op: str, types: Any = None, shapes: Any = None) -> Any:
        """Put a new one-input dataset node between a node and all that read from it; return it.

        Args:
            types, shapes: `AttrValue`s of its elements; by default those of the node before.
        """
        before = self._by_name[name]
        node = self.add(op, [name])
        self._readers |= {node.name: self._give_readers(name, node.name), name: [node]}
        # Datasets made of tensors have another name for the same attribute.
        given = "output_types" if "output_types" in before.attr else "Toutput_types"
        node.attr["output_types"].CopyFrom(types or attr(before, given))
        node.attr["output_shapes"].CopyFrom(shapes or attr(before, "output_shapes"))
        return node

    def leave_out(self, node: Any) -> None:
        """Have all that read from a one-input dataset node read from its input."""
        name, source = node.name, source_of(node.input[0])
        self._readers[source] = [r for r in self._readers[source] if r.name != name] + self._give_readers(name, source)
        self.graph.node.remove(self._by_name.pop(name))

    def function_name(self, node: Any, otherwise: str) -> str:
        """Return what the user calls a node's function; `otherwise` for lambdas and TensorFlow's own functions."""
        fn = self.function(node)
        if fn is None or self.is_internal(node):
            return otherwise
        name = getattr(fn, "__name__", None) or type(fn).__name__
        return otherwise if name == "<lambda>" else str(name)

    def is_internal(self, node: Any) -> bool:
        """Return whether a node's functions are tf.data's own."""
        fns = [wrapper._func for name in functions_of(node) if (wrapper := self._wrapper(name)) is not None]
        return bool(fns) and all(str(getattr(fn, "__module__", "")).startswith("tensorflow.python.data") for fn in fns)

    def library(self, node: Any) -> str:
        """Return the module of a node's function if it is an installed package's; empty for the user's own code."""
        if "_DataServiceDataset_" in attr(node, "f").func.name:  # unpacks what a worker of the service has sent
            return "tf.data.experimental.service"
        name = str(getattr(self.function(node), "__module__", ""))
        is_named = isinstance(self.function(node), type) or name.startswith("tensorflow.python.ops.")  # by the user
        return name if is_installed(getattr(sys.modules.get(name), "__file__", None)) and not is_named else ""

    def function(self, node: Any) -> Any:
        """Return the function of a node, as it was written; None where it has none."""
        wrapper = self._wrapper(attr(node, "f").func.name)
        fn = None if wrapper is None else wrapper._func
        while isinstance(fn, functools.partial):
            fn = fn.func
        return fn

    def _wrapper(self, name: str) -> Any:
        return self._wrappers.get(name.encode()) or self._wrappers.get(name)

    def is_stateful(self, node: Any, harmless: Set[str] = HARMLESS) -> bool:
        """Return whether the order, or the number, of calls of a node's function could be seen in its results."""
        return any(self._stateful(name, set(), harmless) for name in functions_of(node))

    def inner_ops(self, node: Any) -> set[str]:
        """Return the names of all dataset ops inside a node's functions."""
        found, seen, todo = set[str](), set[str](), functions_of(node)
        while todo:
            name = todo.pop()
            if name in seen or name not in self._functions:
                continue
            seen.add(name)
            for inner in self._functions[name].node_def:
                if DATASET_OP.search(inner.op):
                    found.add(inner.op)
                todo += functions_of(inner)
        return found

    def maker(self) -> Any:
        """Return the function that makes the variant tensor of the graph's dataset; the user's does not live by it."""
        graph, captures, output = self.graph, self._captures, f"{self.output}:0"

        def make() -> Any:
            scope = ops.get_default_graph()
            known = {f"{name}:0": scope.capture(tensor) for name, tensor in captures.items()}
            return tf.graph_util.import_graph_def(graph, known, return_elements=[output])[0]

        return wrapped(make)

    def _give_readers(self, name: str, to: str) -> list[Any]:
        readers = self._readers.pop(name, [])
        for reader in readers:
            reader.input[:] = [to if source_of(text) == name else text for text in reader.input]
        self.output = to if self.output == name else self.output
        return readers

    def _take_output(self) -> str:
        nodes = self.graph.node
        at = next(i for i, node in enumerate(nodes) if node.op == "_Retval")
        output = source_of(nodes[at].input[0])
        del nodes[at]
        return output

    def _share_captures(self, node: Any) -> None:
        for name, span in spans_of(node).items():
            if not name.endswith(("arguments", "_args")) or not len(span):
                continue
            wanted = name.removesuffix("_other_arguments").removesuffix("_other_args")
            alone = functions_of(node) if len(functions_of(node)) == 1 else [""]
            wrapper = self._wrapper(attr(node, wanted).func.name or alone[0])
            captured = wrapper.function.captured_inputs if wrapper is not None else ()
            if len(captured) == len(span):
                for at, tensor in zip(span, captured, strict=True):
                    node.input[at] = self._capture(tensor)
            elif any(COPIES.search(op) for at in span for op in self._ops_above(node.input[at])):
                raise CannotRewrite(f"{node.op} reads a variable or table in a function InTune cannot look into")

    def _share_constants(self) -> None:
        """Have large constants come from outside of the graph, as the user's tensors if they can; ragged rows stay."""
        read = {source_of(text) for node in self.graph.node for text in node.input}
        given = list(held(self.dataset))
        for node in (n for n in self.graph.node if n.op == "Const" and tf.as_dtype(n.attr["dtype"].type) != tf.variant):
            if math.prod(self.shape_of(node.name) or ()) < SHARED_FROM:
                continue
            if node.name in read:  # else a function read it, which reads what it captured by now
                self._captures[node.name] = same_as(node.attr["value"].tensor, given)
            node.op = "Placeholder"
            del node.attr["value"]

    def _capture(self, tensor: Any) -> str:
        for name, known in self._captures.items():
            if known is tensor:
                return name
        node = self.add("Placeholder", [])
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        self._captures[node.name] = tensor
        return str(node.name)

    def _ops_above(self, text: str) -> Iterator[str]:
        node = self._by_name[source_of(text)]
        yield node.op
        for source in node.input:
            yield from self._ops_above(source)

    def _stateful(self, name: str, seen: set[str], harmless: Set[str]) -> bool:
        if name in seen:
            return False
        seen.add(name)
        if name not in self._functions:
            return True
        for node in self._functions[name].node_def:
            definition = op_def_registry.get(node.op)
            if node.op.startswith(RANDOM_DATASETS) or (definition is None and node.op not in self._functions):
                return True
            dataset = DATASET_OP.search(node.op) is not None
            if definition is not None and definition.is_stateful and not dataset and node.op not in harmless:
                return True
            called = [node.op] if definition is None else []
            if any(self._stateful(text, seen, harmless) for text in [*functions_of(node), *called]):
                return True
        return False


def _check_size(size_bytes: int, most_bytes: int) -> None:
    if size_bytes > most_bytes:
        raise CannotRewrite(
            f"{size_bytes / 1e6:.3g} MB of tensors are part of the dataset (from_tensor_slices); {ELSEWHERE}"
        )
