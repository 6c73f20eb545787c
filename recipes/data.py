"""The Criteo files of a run, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dlrm_examples.convert import sources
from dlrm_examples.criteo.reading import Reading
from dlrm_examples.generate import generate

from .schema import Config

__all__ = ["SAMPLE_ROWS", "files", "reading"]

SHARDS = 8
SAMPLE_ROWS = 65_536
"""Rows whose quantiles stand for those of all: 2,048 in each of 32 buckets."""


def files(config: Config) -> list[Path]:
    """Return the Criteo files to read; without `data`, generate them beside the run directory.

    Raises:
        ConfigError: the directory holds no file.
    """
    if config.data is None:
        folder = config.run_dir.parent / "data" / f"{config.rows}-rows-seed-{config.seed}"
        return generate(folder, rows=config.rows, shards=SHARDS, seed=config.seed)
    return sources(config.data)


def reading(config: Config, split: str, stages: Iterable[str]) -> Reading:
    """Return how the rows of a split are read.

    Args:
        config: what is trained.
        split: ``train`` or ``test``.
        stages: the stages of the pipeline that have workers.
    """
    pipeline = config.pipeline
    return Reading(
        files(config),
        config.batch_size,
        table_rows=config.model.table_rows,
        split=split,
        test_fraction=config.test_frac,
        seed=config.seed,
        workers={stage: getattr(pipeline, f"{stage}_workers") for stage in stages},
        prefetch=pipeline.prefetch,
        read_latency_ms=config.read_latency_ms if split == "train" else 0.0,
        block_bytes=pipeline.block_bytes,
        on_bad_row=pipeline.on_bad_row,
        cache_dir=pipeline.cache_dir,
    )
