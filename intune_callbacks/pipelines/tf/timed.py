"""A `tf.data.Dataset` that is only timed, at its end: nothing in it is looked at, and nothing it holds is copied."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.util import structure

from intune_callbacks.pipelines.tf.native import Native
from intune_callbacks.pipelines.tf.objects import is_wanted, why_not

__all__ = ["timed"]

# The Python classes behind the operations that compute beside their reader: tf.data adds a prefetch to all others.
_BESIDE = {
    *("_PrefetchDataset", "_ParallelMapDataset", "_ParallelBatchDataset", "_ParallelInterleaveDataset"),
    "_MapAndBatchDataset",
}


class _Timed(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """The same elements; it keeps its input, and has its options."""


def timed(native: Native, dataset: Any, pipeline: str) -> Any:
    """Return the dataset with our last operation at its end; itself where that would not be what is iterated.

    Args:
        pipeline: the key under which `native` knows it.
    """
    if why_not(dataset):
        return dataset
    wish = dataset.options()
    if wish.autotune.enabled is not False and is_wanted(wish, "inject_prefetch"):
        end = dataset
        while type(end).__name__ in ("_OptionsDataset", "_IgnoreErrorsDataset"):
            (end,) = end._inputs()
        if type(end).__name__ not in _BESIDE:  # outside of our operation it would be the one who asks
            dataset = dataset.prefetch(tf.data.AUTOTUNE)
    spec = dataset.element_spec
    types, shapes = structure.get_flat_tensor_types(spec), structure.get_flat_tensor_shapes(spec)
    given = {"pipeline": pipeline, "output_types": types, "output_shapes": shapes}
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return _Timed(dataset, native.ops.intune_sink(dataset._variant_tensor, **given)).with_options(options)
