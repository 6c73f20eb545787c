"""A dataset that the training may change in every way that a worker would see."""

from __future__ import annotations

import argparse
import collections
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

LEVEL = 0


def plus(value: int) -> Callable[[int], int]:
    return lambda index: index + value


def negative(index: int) -> int:
    return -index


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0


class Epochal(Dataset[Any]):
    """Each sample holds what the dataset, or a part of it, was told, in whatever form."""

    of_class = 0

    def __init__(self, part: Epochal | None = None) -> None:
        self.epoch, self.part = 0, part
        self.config: dict[str, Any] = {"deep": [{"level": 0}]}
        self.options = argparse.Namespace(level=0)
        self.array, self.tensor = np.zeros(9000), torch.zeros(9000)
        self.rows: list[Any] = [(index, 0) for index in range(80)]
        self.shown: set[int] = set()
        self.recent = collections.deque([0], maxlen=1)
        self.transform: Callable[[int], int] = plus(0)
        self.slots = Slotted()

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        told = [index, self.epoch, self.part.epoch if self.part else 0, self.config["deep"][0]["level"]]
        told += [self.options.level, int(self.array[0]), int(self.tensor[0]), self.rows[index][1], len(self.shown)]
        told += [self.recent[0], self.transform(index), self.slots.level, LEVEL, self.of_class]
        return torch.tensor(told)


def change_global(_: Epochal, value: int) -> None:
    global LEVEL
    LEVEL = value


def change_rows(dataset: Epochal, value: int) -> None:
    dataset.rows[70:] = [(index, value) for index in range(70, 80)]


CHANGES: dict[str, Callable[[Epochal, int], Any]] = {
    "a number": lambda dataset, value: setattr(dataset, "epoch", value),
    "a number of a part": lambda dataset, value: setattr(dataset.part, "epoch", value),
    "deep in a dict": lambda dataset, value: dataset.config["deep"][0].update(level=value),
    "options": lambda dataset, value: setattr(dataset.options, "level", value),
    "an array in its place": lambda dataset, value: dataset.array.fill(value),
    "another array": lambda dataset, value: setattr(dataset, "array", np.full(9000, value)),
    "a tensor in its place": lambda dataset, value: dataset.tensor.fill_(value),
    "another tensor": lambda dataset, value: setattr(dataset, "tensor", torch.full((9000,), value)),
    "the end of a list": change_rows,
    "a set": lambda dataset, value: dataset.shown.update(range(value)),
    "a deque": lambda dataset, value: dataset.recent.append(value),
    "a closure": lambda dataset, value: setattr(dataset, "transform", plus(value)),
    "another function": lambda dataset, value: setattr(dataset, "transform", negative if value == 10 else abs),
    "a partial": lambda dataset, value: setattr(dataset, "transform", functools.partial(max, value)),
    "a slot": lambda dataset, value: setattr(dataset.slots, "level", value),
    "a global": change_global,
    "the class": lambda dataset, value: setattr(Epochal, "of_class", value),
}


def reset() -> None:
    """Take back what stands outside of any one dataset."""
    change_global(Epochal(), 0)
    Epochal.of_class = 0
