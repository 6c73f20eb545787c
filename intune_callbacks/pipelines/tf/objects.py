"""What the Python objects of a tf.data pipeline hold: options, functions, and the tensors behind its graph's nodes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, debug_mode, structured_function
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from intune_callbacks.pipelines.base import LIVE, LIVE_ALREADY, cpus_allowed

__all__ = [
    "held",
    "held_bytes",
    "held_rows",
    "is_inside",
    "is_wanted",
    "made",
    "same_as",
    "threads_of",
    "why_not",
    "wrapped",
    "wrappers",
]


def is_inside(dataset: Any) -> bool:
    """Return whether a dataset was made inside a compiled function."""
    return not isinstance(dataset._variant_tensor, ops.EagerTensor)


def why_not(dataset: Any) -> str:
    """Return why another dataset cannot be iterated in the place of this one; empty where it can."""
    if is_inside(dataset):
        return "the dataset was made inside a tf.function; make it outside"
    if debug_mode.DEBUG_MODE:  # our options would be the opposite of its own, of which it would warn
        return "tf.data.experimental.enable_debug_mode() has each function called in turn"
    if type(dataset).__module__ == LIVE:
        return LIVE_ALREADY
    if type(dataset).__iter__ is not tf.data.Dataset.__iter__:  # what comes out need not be the dataset's elements
        return f"{type(dataset).__name__} makes its iterators in a way of its own"
    return ""


def threads_of(dataset: Any) -> int:
    """Return how many threads of TensorFlow's compute the dataset's functions."""
    # While a function is traced TensorFlow warns whoever asks for options: what is left alone is not asked.
    own = None if why_not(dataset) else dataset.options().threading.private_threadpool_size
    return int(own or tf.config.threading.get_inter_op_parallelism_threads() or cpus_allowed())


def is_wanted(options: Any, optimization: str) -> bool:
    """Return whether TensorFlow's optimiser may do one of the things that it does by default."""
    wish = options.experimental_optimization
    wanted = getattr(wish, optimization)
    return wish.apply_default_optimizations is not False if wanted is None else bool(wanted)


def wrappers(dataset: Any) -> Iterator[Any]:
    """Yield TensorFlow's wrapper of each function of the user, all along the pipeline."""
    for part in _datasets(dataset, set()):
        for value in vars(part).values():
            if isinstance(value, structured_function.StructuredFunctionWrapper):
                yield value


def held(dataset: Any) -> Iterator[Any]:
    """Yield the tensors that are part of the dataset's sources."""
    for part in _datasets(dataset, set()):
        yield from getattr(part, "_tensors", ())


def same_as(written: Any, given: Sequence[Any]) -> Any:
    """Return the tensor that was written down, if there is one, and one like it if not.

    Args:
        written: its protocol buffer.
        given: tensors of the user's.
    """
    dtype, shape = tf.as_dtype(written.dtype), tf.TensorShape(written.tensor_shape)
    likely = [tensor for tensor in given if tensor.dtype == dtype and tensor.shape == shape]
    content = np.frombuffer(written.tensor_content, np.uint8)  # empty for strings
    for tensor in likely if content.size else ():
        if np.array_equal(np.frombuffer(tensor.numpy(), np.uint8), content):
            return tensor
    with tf.device("CPU:0"):
        read = tf.io.parse_tensor(written.SerializeToString(), dtype)
        for tensor in likely if dtype == tf.string else ():
            if tf.reduce_all(tf.equal(tensor, read)):
                return tensor
    return read


def held_bytes(dataset: Any) -> int:
    """Return the bytes of the tensors that are part of the dataset: in its sources, or captured by its functions."""
    captured = [tensor for wrapper in wrappers(dataset) for tensor in wrapper.function.captured_inputs]
    return sum(_tensor_bytes(tensor) for tensor in (*held(dataset), *captured))


def held_rows(dataset: Any) -> int:
    """Return how many ragged or sparse rows, each an object of its own, are part of a source of the dataset."""
    return sum(int(tensor.shape.num_elements() or 0) for tensor in held(dataset) if tensor.dtype == tf.variant)


def wrapped(make: Any) -> Any:
    """Return a function of TensorFlow's that calls `make`; what the graph it makes calls is forgotten with it."""
    function = tf.compat.v1.wrap_function(make, [])
    # TensorFlow adds these to its context, which counts how often, and takes none of them back.
    names = [known.signature.name for known in function.graph.as_graph_def().library.function]
    weakref.finalize(function, _forget, names).atexit = False
    return function


def _forget(names: Sequence[str]) -> None:
    for name in names:
        with suppress(tf.errors.OpError):  # the context is another one meanwhile
            context.context().remove_function(name)


def made(maker: Any, dataset: Any) -> Any:
    """Return a dataset of the variant tensor that `maker` makes; the user's, which it stands for, lives as long."""
    built = dataset_ops._VariantDataset(maker(), dataset.element_spec)
    built._intune_keeps = (dataset, maker)
    return built


def _datasets(dataset: Any, seen: set[int]) -> Iterator[Any]:
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    yield dataset
    for value in [*vars(dataset).values(), *dataset._inputs()]:
        for part in tf.nest.flatten(value) if isinstance(value, (list, tuple, dict)) else (value,):
            if isinstance(part, tf.data.Dataset):
                yield from _datasets(part, seen)


def _tensor_bytes(tensor: Any) -> int:
    if tensor.dtype == tf.string:  # each of which says "one object"
        return int(tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64)))
    size = getattr(tensor.dtype, "size", 0) or 0
    count = tensor.shape.num_elements() or 0
    return 0 if tensor.dtype in (tf.resource, tf.variant) else int(count) * int(size)
