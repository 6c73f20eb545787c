"""The wish to start from what an earlier run found."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from intune_callbacks.config import is_address
from intune_callbacks.errors import warn
from intune_callbacks.record.fingerprint import differences, fingerprint
from intune_callbacks.session.found import Unfit, ask_found, file_of, read_found
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation

__all__ = ["WarmStart"]

log = logging.getLogger(__name__)


class WarmStart:
    """The wish to start from another run, until the first batch shows whether that fits.

    Args:
        source: a run folder, the path of its `found.yaml`, or the address of an agent service; None is no such wish.
        rank: this process among those that train together; it reads what this rank wrote.
        world: how many train together.
    """

    def __init__(self, source: str | None, rank: int = 0, world: int = 1) -> None:
        self.source, self._rank, self._world = source, rank, world
        self._used, self._why = False, "training ended before its first batches were seen"
        self._is_open = source is not None

    @property
    def entry(self) -> dict[str, Any] | None:
        """What the report says: ``from``, ``used`` and ``why``; None where nothing was asked for."""
        return None if self.source is None else {"from": self.source, "used": self._used, "why": self._why}

    @property
    def used_source(self) -> str | None:
        """The run this one was started from, None if it was started anew."""
        return self.source if self._used else None

    def leave(self, why: str) -> None:
        """Do not start from the other run."""
        self._why, self._is_open = why, False

    def begin(self, tuner: Tuner, batch_size: int, versions: Mapping[str, str]) -> None:
        """Start from the other run if it fits, once; else say why not. Never raises.

        Args:
            tuner: it has decided nothing yet; in the modes ``observe`` and ``advise`` nothing is changed.
        """
        if not self._is_open:
            return
        self._is_open = False
        mode = tuner.config.mode
        try:
            self._why = self._begin(tuner, batch_size, versions)
            log.info("InTune: warm start from %s: %s", self.source, self._why)
        except Exception as error:
            self._why = (
                str(error)
                if isinstance(error, Unfit)
                else f"it could not be taken over: {type(error).__name__}: {error}"
            )
            if mode == "tune":
                warn(f"InTune starts anew, not from {self.source}: {self._why}")

    def _begin(self, tuner: Tuner, batch_size: int, versions: Mapping[str, str]) -> str:
        mode = tuner.config.mode
        if mode == "observe":
            return "mode='observe' changes nothing"
        assert self.source is not None
        stages, machine = tuner.setting()
        now = fingerprint(
            [asdict(stage) for stage in stages],
            batch_size=batch_size,
            machine=machine,
            policy=tuner.policy.name,
            ranks=self._world,
            versions=versions,
        )
        if not is_address(self.source):
            found, state = read_found(file_of(self.source, self._rank, self._world))
        elif (kept := ask_found(self.source, now)) is not None:
            found, state = kept
        else:
            return "the service knows no run with this fingerprint yet"
        if different := differences(found["fingerprint"], now):
            raise Unfit("; ".join(different))
        wanted = _allocation(found["allocation"], [stage.name for stage in stages])
        if mode != "tune":
            return f"mode={mode!r} changes nothing; it would start with {_listed(wanted)}"
        tuner.restore({**state, "allocation": wanted})
        self._used = True
        given = {stage.name: stage.current for stage in tuner.setting()[0]}
        cut = {name: given[name] for name, value in wanted.items() if given[name] != value}
        return f"the fingerprint is the same{f', the machine allows {_listed(cut)}' if cut else ''}"


def _allocation(given: Mapping[str, Any], stages: Sequence[str]) -> Allocation:
    """Return the values, which somebody may have edited.

    Raises:
        Unfit: naming what is no value of a stage.
    """
    values = {name: entry["value"] if isinstance(entry, Mapping) else entry for name, entry in given.items()}
    for name, value in values.items():
        if name not in stages:
            raise Unfit(f"allocation: there is no stage {name!r}")
        if type(value) is not int or value < 0:
            raise Unfit(f"allocation: {name!r} is {value!r}, expected a whole number")
    return values


def _listed(allocation: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in allocation.items()) or "nothing"
