"""One node of a TensorFlow graph: its attributes, its functions, and who reads what of whom."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

__all__ = ["attr", "functions_of", "readers_of", "said", "source_of", "spans_of"]


def attr(node: Any, name: str) -> Any:
    """Return an attribute of a node, an empty one where it has none (to ask a protobuf map for it would add it)."""
    return node.attr[name] if name in node.attr else tf.compat.v1.AttrValue()


def functions_of(node: Any) -> list[str]:
    """Return the names of the functions a node calls."""
    return [value.func.name for value in node.attr.values() if value.HasField("func")]


def source_of(text: str) -> str:
    """Return the name of the node that an input is an output of."""
    return text.removeprefix("^").split(":")[0]


def readers_of(nodes: Iterable[Any]) -> dict[str, list[Any]]:
    """Return by the name of each node those that read from it."""
    found: dict[str, list[Any]] = {}
    for node in nodes:
        for name in dict.fromkeys(source_of(text) for text in node.input):
            found.setdefault(name, []).append(node)
    return found


def spans_of(node: Any) -> Mapping[str, range]:
    """Return which inputs of a node belong to which argument of its op."""
    definition = op_def_registry.get(node.op)
    spans: dict[str, range] = {}
    start = 0
    for arg in definition.input_arg if definition is not None else ():
        many = attr(node, arg.number_attr).i or len(attr(node, arg.type_list_attr).list.type)
        size = many if arg.number_attr or arg.type_list_attr else 1
        spans[arg.name] = range(start, start + size)
        start += size
    return spans


def said(error: Exception) -> str:
    """Return the first line of what TensorFlow says, without the nodes and operations of its own that it names."""
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", (str(error).splitlines() or [""])[0])
    return " ".join(text.split()) or type(error).__name__
