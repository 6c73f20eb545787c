"""Criteo files as a tf.data pipeline, as most people write it and as it should be written.

    blocks: order -> read -> parse -> shuffle -> rebatch -> prefetch       a thousand lines at a time
    plain:  files -> read -> parse -> shuffle -> batch -> collate -> prefetch          line by line

``blocks`` gives the very batches of `pipeline.build`, in the same order and to the last bit. ``plain`` gives the same
rows, with TensorFlow's logarithm (its last bit may differ) and in the order of tf.data's own shuffle buffer.
"""

from __future__ import annotations

import tensorflow as tf

from dlrm_examples.criteo.arrays import is_arrays
from dlrm_examples.criteo.compressed import compression
from dlrm_examples.criteo.formats import is_parquet
from dlrm_examples.criteo.reading import Reading
from dlrm_examples.criteo.stages_tf import Skipped, blocks, plain
from intune_callbacks.config import choice_problem

__all__ = ["STAGES", "STYLES", "Skipped", "build"]

STYLES = ("blocks", "plain")
STAGES = {"blocks": ("read", "parse", "shuffle"), "plain": ("read", "parse", "collate")}
"""Style -> its stages that have workers; each is named after its function."""


def build(
    reading: Reading, *, style: str = "blocks", skipped: Skipped | None = None, sized: bool = False
) -> tf.data.Dataset:
    """Return a dataset over Criteo files for `dlrm_keras.DLRM`; each iteration that is begun is one epoch.

    Args:
        reading: what to read. Its workers are parallel calls, -1 is AUTOTUNE; so it is of `prefetch`, where 0 is none.
            ``plain`` reads plain TSV only, no more files at once than there are, and no more than 16; its error for a
            malformed row is tf.data's own and names no file.
        style: ``blocks`` or ``plain``, see the module.
        skipped: in ``blocks`` counts the malformed rows that are left out.
        sized: count the rows now (one pass over the files, about 1 GB/s), so that the dataset knows its length.

    Returns:
        A dataset of ({``dense`` [B, 13] float32, ``categories`` [B, 26] int32}, labels [B] float32).

    Raises:
        ConfigError: with all problems at once.
        MissingPackage: what a format or the kernel needs is not installed.
    """
    problems = list(choice_problem("style", style, STYLES))
    if style == "plain":
        others = [path for path in reading.files if compression(path) or is_parquet(path) or is_arrays(path)]
        problems += [f"paths: {path}: style='plain' reads plain TSV only; use style='blocks'" for path in others]
        problems += ["skipped: style='plain' does not count; use style='blocks'"] if skipped is not None else []
    reading.check(STAGES.get(style, STAGES["blocks"]), autotune=True, problems=problems)
    refs = reading.refs()
    dataset = blocks(reading, refs, skipped) if style == "blocks" else plain(reading)
    if sized and reading.on_bad_row == "error":
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(reading.batches(refs)))
    return dataset.prefetch(reading.prefetch) if reading.prefetch else dataset
