"""A training on any loader, with or without us, from which all that has to be the same is returned."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import lightning_runs as runs
import torch
from reach_classes import EPOCH

from intune_callbacks.pipelines.find import find

EPOCHS = 3
# When the loader is met: before its first `iter()`, in the middle of an epoch, and which one.
MOMENTS = {"before": (0, 0), "late": (0, 5), "second epoch": (1, 0), "late in the second epoch": (1, 5)}


class Training:
    """Trains on a loader, with a random number of its own at each step, as dropout draws one.

    Args:
        loader: any.
        kind: of the workers; None trains without us.
        met: epoch and batch where the loader is met.
        left: epoch and batch where it is given back; None at the end.
        whole: whether the epochs are trained to their ends.
    """

    def __init__(
        self, loader: Any, kind: str | None, met: tuple[int, int], left: Any = None, whole: bool = True
    ) -> None:
        self.loader, self.met, self.left = loader, met, left
        self.pipeline = find(loader, workers_kind=kind).pipeline if kind else None
        self.is_met = self.is_left = False
        self.resizes = random.Random(0)
        self.seen: list[Any] = []
        self.delivered = self.taken = 0
        for epoch in range(EPOCHS):
            self._train(epoch, None if whole else EPOCH - 3)
        self.give_back()

    def _train(self, epoch: int, batches: int | None) -> None:
        if self.met == (epoch, 0):
            self._meet()
        iterator = self._adopted(iter(self.loader))
        number = 0
        while number != batches:
            if self.met == (epoch, number) and number:
                self.is_met = True
                iterator = self._adopted(iterator)
            batch = next(iterator, None)
            if batch is None:
                break
            self.seen.append((runs.plain(batch), torch.rand(1).item()))
            number += 1
            self._change(number)
            if self.left == (epoch, number):
                self.give_back()

    def _meet(self) -> None:
        self.is_met = True
        if self.pipeline is not None:
            self.pipeline.prepare()

    def _adopted(self, iterator: Any) -> Any:
        ours = self.pipeline is not None and self.is_met and not self.is_left
        return self.pipeline.adopt(iterator) if ours else iterator

    def _change(self, number: int) -> None:
        if self.pipeline is None or not self.is_met or self.is_left:
            return
        self.taken += 1
        if number % 3 == 0:
            self.pipeline.resize({"load": self.resizes.randint(1, 4), "load.window": self.resizes.randint(1, 12)})

    def give_back(self) -> None:
        if self.pipeline is not None and not self.is_left:
            self.is_left = True
            self.delivered = self.pipeline.stats().delivered
            self.pipeline.release()
            if self.left is None:
                self.pipeline.close()


def trained(make: Any, kind: str | None, met: tuple[int, int], left: Any = None, whole: bool = True, **options: Any):
    torch.manual_seed(0)
    loader = make(**options)
    training = Training(loader, kind, met, left, whole)
    after = held(loader)
    if training.pipeline is not None:
        training.pipeline.close()
    return training, (torch.get_rng_state().tolist(), after)


def held(loader: Any) -> dict[str, Any]:
    """Return the types of all that a loader and the one inside it hold; a kept or ended iterator is made anew."""
    found = {}
    inside = [getattr(loader, name, None) for name in ("base_dataloader", "loader")]
    for one in (loader, *inside, (getattr(loader, "pipeline", None) or [None])[0]):
        if one is not None:
            found |= {name: type(value) for name, value in vars(one).items() if name not in ("_iterator", "kept")}
            assert type(one._iterator).__name__ != "LoaderIterator" if "_iterator" in vars(one) else True
    return found


def compared(make: Callable[..., Any], kind: str, met: tuple[int, int], **how: Any) -> Training:
    stock, left_behind = trained(make, None, met, **how)
    before = runs.running()
    ours, ours_behind = trained(make, kind, met, **how)
    assert ours.seen == stock.seen
    assert ours_behind == left_behind
    assert len(stock.seen) >= EPOCHS * (EPOCH - 3)
    del stock
    # One batch may have been on its way to somebody who is one ahead; validation and training are not told apart.
    assert 0 < ours.taken <= ours.delivered + 1
    ours.loader = ours.pipeline = None
    gc.collect()
    assert runs.only(before)
    return ours
