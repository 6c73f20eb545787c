"""What is built of a tf.data pipeline with our operations inside, and kept for the next fit on the same dataset.

TensorFlow writes the user's dataset down, the graph is edited, and TensorFlow reads it again. A training that calls
`fit` for each epoch, or for a few steps, would pay for that each time. What cannot be edited is only timed, at its end:
nothing in it is looked at, and nothing it holds is copied.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.util import structure

from intune_callbacks.pipelines.tf.native import Native
from intune_callbacks.pipelines.tf.objects import is_wanted, made, why_not
from intune_callbacks.pipelines.tf.rewrite import rewrite
from intune_callbacks.pipelines.tf.stage import GraphStage
from intune_callbacks.types import Hint

__all__ = ["Built", "build", "keep", "timed"]

KEPT_BYTES = 2**20
"""Of a larger graph a second copy would lie beside the user's dataset between the fits; most have some 10 kB."""
# The Python classes behind the operations that compute beside their reader: tf.data adds a prefetch to all others.
_BESIDE = {
    *("_PrefetchDataset", "_ParallelMapDataset", "_ParallelBatchDataset", "_ParallelInterleaveDataset"),
    "_MapAndBatchDataset",
}


@dataclass(frozen=True, slots=True)
class Built:
    """A dataset with our operations, which can be iterated any number of times, by one `DatasetPipeline` after another.

    Nothing in it refers to the user's dataset, which ends with its last name as it would without us.

    Args:
        key: under which `Native` knows it.
        way: the arguments it was built with.
        maker: makes the dataset's variant tensor; an iterator looks for its key when it is made.
        options: of the dataset.
        stages, notes, hints: as `Rewritten` has them.
        graph_bytes: of the edited graph.
    """

    key: str
    way: tuple[Any, ...]
    maker: Any
    options: Any
    stages: tuple[GraphStage, ...]
    notes: tuple[str, ...]
    hints: tuple[Hint, ...]
    graph_bytes: int

    def dataset(self, stock: Any) -> Any:
        """Return what is to be iterated in place of the user's dataset, which it was built from."""
        return made(self.maker, stock).with_options(self.options)


_kept: dict[int, tuple[weakref.ref[Any], Built]] = {}  # by identity: a user's class may say that two are equal


def build(dataset: Any, key: str, *, live: bool, cpus: int, in_order: bool) -> Built:
    """Return what was kept of the dataset, which nobody else gets meanwhile; a new one where there is none.

    Args:
        key: of a new one.
        live, cpus, in_order: as for `rewrite`.

    Raises:
        CannotRewrite: see `DatasetGraph`.
    """
    way = (live, cpus, in_order)
    held, built = _kept.pop(id(dataset), (None, None))
    if held is not None and held() is dataset and built is not None and built.way == way:
        return built
    new = rewrite(dataset, key, live=live, cpus=cpus, in_order=in_order)
    size = new.graph.graph.ByteSize()
    return Built(key, way, new.graph.maker(), new.options(live), new.stages, new.notes, new.hints, size)


def keep(dataset: Any, built: Built) -> None:
    """Give it back for the next fit on the same dataset; no iterator of it is used any more."""
    place = id(dataset)
    if built.graph_bytes <= KEPT_BYTES:
        _kept[place] = weakref.ref(dataset, lambda _: _kept.pop(place, None)), built


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
