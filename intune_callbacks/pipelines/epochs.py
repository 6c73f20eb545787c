"""How a loop leaves the epochs of a loader: at their end, or when more was read ahead than it was given."""

from __future__ import annotations

from intune_callbacks.types import Hint

__all__ = ["Epochs"]

LEFT = (
    "epochs are left before their end, as by next(iter(loader)): what workers read ahead is lost; one iterator that is "
    "kept for all steps, it = iter(loader), loses nothing"
)


class Epochs:
    """The epochs of one loader, counted by how they ended."""

    def __init__(self) -> None:
        self._left = self._whole = self._delivered = self._in_flight = 0

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
        """What is to be said where most are left, and not the last one alone."""
        return (Hint(LEFT, kind="left"),) if self._left > max(1, self._whole) else ()
