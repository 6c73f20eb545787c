"""Gradient boosted trees on the rows of a run."""

from __future__ import annotations

from dlrm_examples.models.gbdt import fit_and_test

from .data import reading
from .schema import Config

__all__ = ["fitted"]

MOST_ROWS = 1_000_000
"""Of each split: 260 bytes a row in memory, and half a minute on two CPUs."""


def fitted(config: Config) -> dict[str, float]:
    """Fit them to the training rows and return what `metrics.evaluate` says of the held-out ones.

    Args:
        config: of the run; the rows are those its epochs begin with, where there are more than `MOST_ROWS`.
    """
    train, test = (reading(config, split, ()).sample(MOST_ROWS) for split in ("train", "test"))
    return fit_and_test(train, test, config.seed)
