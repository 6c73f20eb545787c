"""How the epochs of a loader begin and end: with the same dataset, and when more was read ahead than was given."""

from __future__ import annotations

from typing import Any

from intune_callbacks.pipelines.places import generator_in, what_changed
from intune_callbacks.types import Hint

__all__ = ["DRAWN", "Epochs"]

LEFT = (
    "epochs are left before their end, as by next(iter(loader)): what workers read ahead is lost; one iterator that is "
    "kept for all steps, it = iter(loader), loses nothing"
)
DRAWN = (
    "the dataset holds a generator of its own ({}): what a sample gets of it depends on which worker makes it, as in "
    "stock, and there are other workers than yours now"
)
CHANGES = "the training changes the dataset{} between epochs, and workers that live on would not see it"


class Epochs:
    """The epochs of one loader, counted by how they ended."""

    def __init__(self) -> None:
        self._left = self._whole = self._delivered = self._in_flight = 0
        self._given: Any = None
        self._changes: tuple[Hint, ...] = ()

    def begins_with(self, given: Any) -> None:
        """Take what the workers of the next one get, as `plain_values` returned it; None where that is not known."""
        if self._given is not None and given is not None and given != self._given and not self._changes:
            name = what_changed(self._given, given)
            self._changes = (Hint(CHANGES.format(f" ({name})" if name else ""), kind="changing"),)
        self._given = given

    @property
    def generator(self) -> str:
        """Where the dataset holds a generator of random numbers; empty where it holds none, or nobody looked."""
        return generator_in(self._given)

    def begins(self) -> None:
        """One begins; the one before, if its end was not seen, has ended where it was."""
        if self._delivered:
            self.ended(self._delivered <= self._in_flight)

    def delivered(self, in_flight: int) -> None:
        """Count a batch of the one that runs, with those asked for and not delivered now."""
        self._delivered, self._in_flight = self._delivered + 1, in_flight

    def ended(self, is_left: bool) -> None:
        """Count one; it was left with as much read ahead as was delivered, or was not."""
        self._delivered = 0
        self._left += is_left
        self._whole += not is_left

    @property
    def hints(self) -> tuple[Hint, ...]:
        """What is to be said where most are left, and not the last one alone, and where the dataset is not the same."""
        left = (Hint(LEFT, kind="left"),) if self._left > max(1, self._whole) else ()
        return (*left, *self._changes)
