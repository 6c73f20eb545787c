"""How many items each stage makes for one batch, counted so that a queue that fills or drains does not matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from intune_callbacks.types import Observation

__all__ = ["ItemsPerBatch"]

WINDOWS = 120
FILLING, REPLACED_BY = 2, 4
"""The first windows fill buffers that nobody counts: they stand in until there are so many others."""


class ItemsPerBatch:
    """Counts items per batch over the last windows.

    Items made and batches delivered in a short window say little: behind one slow item a stage makes hundreds; later
    they are delivered while it makes none. So what *left* the queue of a stage is set against what the next stage made
    of it, stage by stage down to the batches: then only the few items being computed are missing.
    """

    def __init__(self) -> None:
        self._windows: deque[tuple[int, dict[str, tuple[int, int]]]] = deque()
        self._filling = FILLING
        self._batches = 0
        # Stage -> items made, and items that left its queue, in the order of the stages.
        self._made: dict[str, tuple[int, int]] = {}

    def learn(self, observation: Observation) -> None:
        """Take one window."""
        made = {name: (rates.items, rates.items - rates.stored) for name, rates in observation.rates.items()}
        self._add(observation.batches, made)
        if self._filling and len(self._windows) == FILLING + REPLACED_BY:
            for _ in range(self._filling):
                self._forget()
            self._filling = 0
        elif len(self._windows) > WINDOWS:
            self._forget()

    def of_stages(self) -> dict[str, float]:
        """Return stage -> items per batch, 0.0 where none was made."""
        found, each, taken = {}, 1.0, self._batches
        for name, (items, left) in reversed(self._made.items()):
            if items <= 0 or taken <= 0:
                found[name] = 0.0
                continue
            found[name] = each = each * (left if left > 0 else items) / taken
            taken = items
        return found

    def state_dict(self) -> list[Any]:
        """Return the windows as plain numbers."""
        return [[batches, {name: list(counts) for name, counts in made.items()}] for batches, made in self._windows]

    def load_state_dict(self, state: Iterable[tuple[int, Mapping[str, tuple[int, int]]]]) -> None:
        """Take back what `state_dict` gave."""
        self._windows.clear()
        self._made.clear()
        self._batches = 0
        for batches, made in state:
            self._add(int(batches), {str(name): (int(items), int(left)) for name, (items, left) in made.items()})
        self._filling = FILLING if len(self._windows) < FILLING + REPLACED_BY else 0

    def _add(self, batches: int, made: dict[str, tuple[int, int]]) -> None:
        self._windows.append((batches, made))
        self._count(1, batches, made)

    def _forget(self) -> None:
        self._count(-1, *self._windows.popleft())

    def _count(self, sign: int, batches: int, made: Mapping[str, tuple[int, int]]) -> None:
        self._batches += sign * batches
        for name, (items, left) in made.items():
            before = self._made.get(name, (0, 0))
            self._made[name] = before[0] + sign * items, before[1] + sign * left
