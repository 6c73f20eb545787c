"""What a worker of a `PyDataset` does: make the batch of a number, here or in a child process."""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from typing import Any

import numpy as np

__all__ = ["Here", "There", "reducer"]


class Here:
    """Makes one batch in this process."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, task: tuple[int, int]) -> Any:
        try:
            return self._dataset[task[1]]
        except StopIteration as error:
            # Raised as it is, it would end the epoch without a word.
            raise RuntimeError("PyDataset.__getitem__ raised StopIteration") from error


class There:
    """Makes one batch in a child, whose random state belongs to the batch and not to the child.

    Args:
        run: other random numbers for each.
    """

    def __init__(self, dataset: Any, run: int) -> None:
        self._dataset = dataset
        # None of the training's own states moves: a stock child inherits them, too.
        states = random.getstate(), np.random.get_state(legacy=False)
        self._seeds = [zlib.crc32(pickle.dumps((state, run))) for state in states]

    def __call__(self, task: tuple[int, int]) -> Any:
        before, number = task
        random.seed(self._seeds[0] + before)
        np.random.seed((self._seeds[1] + before) % 2**32)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed((sum(self._seeds) + before) % 2**64)
        return self._dataset[number]


def reducer() -> Any:
    """Return how tensors of torch cross a pipe without a copy too many, None without torch."""
    if "torch" not in sys.modules:
        return None
    from intune_callbacks.pipelines.torch.carry import Carry

    return Carry
