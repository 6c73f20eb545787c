"""Samplers that depend on the training, and a training on what they give."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

ROWS, BATCHES = 96, 40
EAGER: dict[str, Any] = {"decide_every_s": 0.0, "decide_every_batches": 1, "warmup_batches": 1, "show_card": False}


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Waiting(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003)
        return super().__getitem__(index)


class Batches(Sampler):
    """Batches of four, each made when it is asked for."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES):
            yield [int(index) for index in self.four()]

    def four(self) -> Any:
        raise NotImplementedError

    def step(self, rows: list[int]) -> None:
        """What the training does with a batch."""


class Drawing(Batches):
    """Draws from numpy's global state, as the training does for mixup."""

    def four(self) -> Any:
        return np.random.choice(ROWS, 4, replace=False)

    def step(self, rows: list[int]) -> None:
        np.random.beta(0.2, 0.2)


class Prioritized(Batches):
    """Draws from a state of its own, by what the training has left."""

    def __init__(self) -> None:
        self.weights, self.state = np.ones(ROWS), np.random.RandomState(3)

    def four(self) -> Any:
        return self.state.choice(ROWS, 4, p=self.weights / self.weights.sum())

    def step(self, rows: list[int]) -> None:
        self.weights[rows] *= 0.3


class Hard(Batches):
    """The rows with the largest losses; a loss is known once the row was trained on."""

    def __init__(self) -> None:
        self.losses = dict.fromkeys(range(ROWS), 1.0)

    def four(self) -> Any:
        hardest = sorted(self.losses, key=lambda row: (-self.losses[row], row))[:4]
        self.losses |= {row: self.losses[row] * 0.9 for row in hardest}
        return hardest

    def step(self, rows: list[int]) -> None:
        for row in rows:
            self.losses[row] *= row * 37 % 11 / 11


class Losing(Batches):
    """The rows with the smallest losses, which are few among many.

    Args:
        losses: where they are kept, also those of other rows, before and behind these.
    """

    def __init__(self, losses: Any) -> None:
        self.cache = losses

    def four(self) -> Any:
        return np.argsort(np.asarray(self.cache[1:25]), kind="stable")[:4]

    def step(self, rows: list[int]) -> None:
        for row in rows:
            self.cache[row + 1] += 1.0 + row % 7


class Fed(Batches):
    """Waits for what the training asks for, which asks for five: four are read ahead, and one with the first batch."""

    def __init__(self) -> None:
        self.wanted: queue.Queue[list[int]] = queue.Queue()
        for first in range(5):
            self.wanted.put([first])

    def four(self) -> Any:
        return self.wanted.get(timeout=10.0)

    def step(self, rows: list[int]) -> None:
        self.wanted.put([(rows[0] + 7) % ROWS])


class Shared(Batches):
    """Draws from a generator that the training draws from, too."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.rows = RandomSampler(range(ROWS), True, 4 * BATCHES, generator=self.generator)

    def step(self, rows: list[int]) -> None:
        torch.rand(1, generator=self.generator)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.rows, 4, False))


class Resumable(Batches):
    """Goes on where it was when a checkpoint was written."""

    def __init__(self) -> None:
        self.read, self.saved = 0, list[int]()

    def four(self) -> Any:
        self.read += 1
        return range(4 * self.read % ROWS, 4 * self.read % ROWS + 4)

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def step(self, rows: list[int]) -> None:
        self.saved.append(self.state_dict()["read"])


class Quiet(Batches):
    """Draws from a state of its own; nobody changes it."""

    def __init__(self) -> None:
        self.state = random.Random(1)

    def four(self) -> Any:
        return self.state.sample(range(ROWS), 4)


class ByHand(Sampler):
    """Shuffles by the global state at the start of an epoch."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(ROWS), ROWS))


DEPENDING: list[Callable[[], Batches]] = [Drawing, Prioritized, Hard, Fed, Shared]


def trained(
    sampler: Batches,
    wrap: Callable[[Any], Any] = lambda loader: loader,
    epochs: int = 2,
    kind: type[DataLoader] = DataLoader,
    **options: Any,
) -> Any:
    np.random.seed(0)
    torch.manual_seed(0)
    loader = wrap(kind(Rows(), batch_sampler=sampler, num_workers=2, **options))
    seen = []
    for _ in range(epochs):
        for batch in loader:
            rows = [int(row) for row in batch[:, 0]]
            seen.append(rows)
            sampler.step(rows)
    return (*seen, np.random.get_state()[1].tolist()), getattr(loader, "close", dict)()
