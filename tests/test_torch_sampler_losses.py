"""A sampler by the losses of the training, kept in whatever holds many of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from restless import Restless  # noqa: E402
from training_samplers import EAGER, Losing, trained  # noqa: E402

from intune_callbacks import live  # noqa: E402

MANY = 100_000
KEPT_IN: dict[str, Callable[[], Any]] = {
    "an array": lambda: np.zeros(MANY),
    "a list": lambda: [0.0] * MANY,
    "a list of objects": lambda: [np.float64(0.0)] * MANY,
    "an array of the standard library": lambda: array("d", bytes(8 * MANY)),
    "memory of multiprocessing": lambda: RawArray("d", MANY),
    "memory of torch": lambda: torch.zeros(MANY).share_memory_(),
}


@pytest.mark.parametrize("where", KEPT_IN)
def test_one_loss_among_many_is_seen_wherever_it_is_kept(where: str, restless: type[Restless]) -> None:
    expected, _ = trained(Losing(KEPT_IN[where]()), epochs=1)
    seen, report = trained(Losing(KEPT_IN[where]()), lambda loader: live(loader, **EAGER), epochs=1)
    assert seen == expected
    assert restless.resizes > 1
    assert any(hint["what"].startswith("Losing gives what the training lets it") for hint in report["hints"])
