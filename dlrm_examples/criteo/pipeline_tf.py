"""Criteo files as a tf.data pipeline, as most people write it and as it should be written.

    blocks: order -> read -> parse -> shuffle -> rebatch -> prefetch       a thousand lines at a time
    plain:  files -> read -> parse -> shuffle -> batch -> collate -> prefetch          line by line

``blocks`` gives the very batches of `pipeline.build`, in the same order and to the last bit. ``plain`` gives the same
rows, with TensorFlow's logarithm (its last bit may differ) and in the order of tf.data's own shuffle buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from dlrm_examples.criteo.arguments import checked
from dlrm_examples.criteo.blocks import Split
from dlrm_examples.criteo.compressed import compression
from dlrm_examples.criteo.formats import count_rows, is_parquet, scan
from dlrm_examples.criteo.stages_tf import Plan, Skipped, blocks, plain
from intune_callbacks.config import choice_problem
from intune_callbacks.errors import ConfigError

__all__ = ["STAGES", "STYLES", "Skipped", "build"]

STYLES = ("blocks", "plain")
STAGES = {"blocks": ("read", "parse", "shuffle"), "plain": ("read", "parse", "collate")}
"""Style -> its stages that have workers; each is named after its function."""

BLOCK_BYTES = 1 << 21


def build(
    paths: Iterable[str | os.PathLike[str]],
    batch_size: int,
    *,
    style: str = "blocks",
    table_rows: int | Sequence[int] = 100_000,
    split: str = "train",
    test_fraction: float = 0.1,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    workers: Mapping[str, int] | None = None,
    prefetch: int = 2,
    read_latency_ms: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
    on_bad_row: str = "error",
    kernel: str | None = None,
    skipped: Skipped | None = None,
    sized: bool = False,
) -> tf.data.Dataset:
    """Return a dataset over Criteo files for `dlrm_keras.DLRM`; each iteration that is begun is one epoch.

    Args:
        paths: the files, each with Criteo rows only: TSV, and for ``blocks`` also ``.gz``, ``.zst`` and ``.parquet``.
        batch_size: rows per batch.
        style: ``blocks`` or ``plain``, see the module.
        table_rows: rows of the embedding tables, one number for all or 26; the categories' moduli.
        split: ``train`` or ``test``.
        test_fraction: share of the rows held out for ``test``, 0..1.
        seed: decides the order of blocks and rows, and the split.
        shuffle: by default the training split is shuffled and the test split is not.
        drop_last: leave out a smaller last batch; by default in training only.
        workers: parallel calls of each of the style's `STAGES`; 1 where not given, 0 runs a stage in line, -1 is
            AUTOTUNE. In ``plain`` no more files are read at once than there are, and no more than 16.
        prefetch: batches kept ready; 0 for none, -1 is AUTOTUNE.
        read_latency_ms: sleep this long for each `block_bytes` read, to stand for a network file system.
        block_bytes: bytes of a file read at once, in ``blocks`` also parsed and shuffled at once; of Parquet always a
            row group.
        on_bad_row: ``error`` or ``skip``. In ``plain`` the error is tf.data's own and names no file.
        kernel: in ``blocks`` what parses text, ``numba`` or ``numpy``; by default numba where it is installed.
        skipped: in ``blocks`` counts the malformed rows that are left out.
        sized: count the rows now (one pass over the files, about 1 GB/s), so that the dataset knows its length.

    Returns:
        A dataset of ({``dense`` [B, 13] float32, ``categories`` [B, 26] int32}, labels [B] float32).

    Raises:
        ConfigError: with all problems at once.
        MissingPackage: what a format or the kernel needs is not installed.
    """
    names = [os.fspath(path) for path in paths]
    problems = list(choice_problem("style", style, STYLES))
    if style == "plain":
        others = [path for path in names if compression(path) or is_parquet(path)]
        problems += [f"paths: {path}: style='plain' reads plain TSV only; use style='blocks'" for path in others]
        problems += ["skipped: style='plain' does not count; use style='blocks'"] if skipped is not None else []
    try:
        files, moduli, threads = checked(
            names, batch_size, table_rows, split, test_fraction, seed, workers, prefetch, read_latency_ms,
            block_bytes, on_bad_row, kernel, stages=STAGES.get(style, STAGES["blocks"]), autotune=True,
        )  # fmt: skip
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    plan = Plan(
        files=files,
        moduli=moduli,
        workers=threads,
        batch_size=batch_size,
        split=Split(split, test_fraction, seed),
        seed=seed,
        shuffle=split == "train" if shuffle is None else shuffle,
        drop_last=split == "train" if drop_last is None else drop_last,
        latency_s=read_latency_ms / 1e3,
        block_bytes=block_bytes,
        on_bad_row=on_bad_row,
        kernel=kernel,
        skipped=skipped,
        refs=scan(files, block_bytes),
    )
    dataset = blocks(plan) if style == "blocks" else plain(plan)
    if sized and on_bad_row == "error":
        rows = count_rows(plan.refs, plan.split)
        batches = rows // batch_size if plan.drop_last else -(-rows // batch_size)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(batches))
    return dataset.prefetch(prefetch) if prefetch else dataset
