"""Whether a look at an object sees what a worker would see of it, and no more, and says where two looks differ."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from changed_rows import CHANGES, Epochal, reset
from torch.utils.data import ConcatDataset, Dataset, Subset

from intune_callbacks.pipelines.look import plain_values
from intune_callbacks.pipelines.places import generator_in, what_changed


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    yield
    reset()


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_seen(what: str) -> None:
    dataset = Epochal(Epochal())
    whole: Dataset[Any] = Subset(Subset(ConcatDataset([dataset, dataset]), list(range(160))), list(range(80)))
    before = plain_values(whole)
    assert plain_values(whole) == before
    CHANGES[what](dataset, 10)
    assert plain_values(whole) != before


class Model(torch.nn.Module):
    """A model in training, whose method collates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.steps = self.level = 0

    def scaled(self, items: list[int]) -> Any:
        return torch.tensor(items) * self.level

    def collate(self, items: list[int]) -> Any:
        return self.scaled(items)


def test_what_a_training_always_changes_is_none_of_it() -> None:
    model, shared = Model(), torch.zeros(9).share_memory_()
    given = (Epochal(), model.collate, shared)
    before = plain_values(given)
    model.steps += 1
    with torch.no_grad():
        model.layer.weight.add_(1.0)
    shared.fill_(1.0)
    assert plain_values(given) == before
    model.level = 2
    assert plain_values(given) != before


def test_an_object_that_cannot_be_looked_at_is_passed_over() -> None:
    class Raises:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    circle: list[Any] = [1, Raises()]
    circle.append(circle)
    assert plain_values(circle) == plain_values(circle)


class Collator:
    """As transformers' DataCollatorForSeq2Seq(model=model), which asks the model for a method of its class."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.label = model, -100

    def __call__(self, items: list[int]) -> Any:
        return torch.tensor(items)


def test_a_model_whose_weights_are_on_an_accelerator_is_none_of_a_workers() -> None:
    """Of these no worker could compute anything; `meta` stands for it, where there is none."""
    here, there = (
        Collator(torch.nn.Sequential(torch.nn.Linear(2, 1, device=device)).eval()) for device in ("cpu", "meta")
    )
    before = plain_values(here), plain_values(there)
    here.model.train()
    there.model.train()
    assert plain_values(there) == before[1]
    assert what_changed(before[0], plain_values(here)) == "Collator.model.training"
    there.label = 0
    assert what_changed(before[1], plain_values(there)) == "Collator.label"


class Augmented:
    """As albumentations' Compose, which draws from generators of its own."""

    def __init__(self, rng: Any) -> None:
        self.steps = [{"flip": rng}]


@pytest.mark.parametrize("kind", [random.Random, np.random.default_rng, np.random.RandomState, torch.Generator])
def test_a_generator_that_is_held_is_found(kind: Any) -> None:
    dataset = Epochal()
    assert generator_in(plain_values((dataset, None))) == ""
    dataset.transform = Augmented(kind())  # type: ignore[assignment]
    looked = plain_values((dataset, None))
    assert generator_in(looked) == "Epochal.transform.steps"
    assert plain_values((dataset, None)) == looked
