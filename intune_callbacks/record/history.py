"""Every decision: what was seen, done and why, and what it brought; one JSON line each, written and read here."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from intune_callbacks.errors import warn
from intune_callbacks.record.process import this_process
from intune_callbacks.types import Allocation, Observation, StageRates
from intune_callbacks.words import number, six_digits

__all__ = ["HISTORY", "Decision", "History", "Tail"]

HISTORY = "history.jsonl"
OF_WINDOW = ("elapsed_s", "batches_per_s", "samples_per_s", "wait_frac", "exposed_wait_frac", "model_s", "seam_s")
SEEN = (*OF_WINDOW, "cpus", "memory_used_bytes", "memory_limit_bytes", "gpu_utilisation")
RATES = tuple(one.name for one in fields(StageRates))
REMEMBERED = 1000
"""Of each kind of decision so many are remembered besides the first ones. A choice: at one a second a
quarter of an hour."""
FIRST = 500
"""The first decisions in which something happened. A choice: there most of a run is decided."""
WRITTEN = 5000
"""So many decisions are written one by one; from then on, each time so many were, half as often. A choice: a month at
one a second makes some 50,000 lines."""
SAVED = 20
"""Decisions at the end that a checkpoint holds. A choice: they say how it went; the file holds all."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One turn of the loop.

    Args:
        observation: what was seen.
        before: the allocation then.
        after: the allocation from then on.
        proposed: the changes the policy wanted, before the guard.
        granted: the changes the guard left of it; in mode ``advise`` that is the advice.
        reason: why, in one sentence.
        vetoes: what the guard refused, and why.
        applied: True if the pipeline was resized.
        settled: True while the policy holds what it found.
        resize_s: seconds the resize took.
        effect: samples/s of the next observation / samples/s of this one; None until it is known.
    """

    observation: Observation
    before: Allocation
    after: Allocation
    proposed: Allocation = field(default_factory=dict)
    granted: Allocation = field(default_factory=dict)
    reason: str = ""
    vetoes: tuple[str, ...] = ()
    applied: bool = False
    settled: bool = False
    resize_s: float = 0.0
    effect: float | None = None

    @property
    def is_eventful(self) -> bool:
        """True if something was proposed, changed or refused."""
        return self.applied or bool(self.proposed) or bool(self.vetoes)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain JSON types, numbers with six digits."""
        seen, machine = self.observation, self.observation.resources
        rates = {name: {key: six_digits(getattr(rate, key)) for key in RATES} for name, rate in seen.rates.items()}
        return {
            "step": seen.step,
            # Of a clock that counts since the machine was started: six digits would be seconds.
            "at_s": round(seen.at_s, 3) if math.isfinite(seen.at_s) else None,
            "observation": {
                **{name: six_digits(getattr(seen, name)) for name in OF_WINDOW},
                "cpus": six_digits(seen.cpus),
                "memory_used_bytes": machine.memory_used_bytes,
                "memory_limit_bytes": machine.memory_limit_bytes,
                "gpu_utilisation": six_digits(machine.gpu_utilisation),
                "rates": rates,
            },
            "before": self.before,
            "proposed": self.proposed,
            "granted": self.granted,
            "after": self.after,
            "reason": self.reason,
            "vetoes": list(self.vetoes),
            "applied": self.applied,
            "settled": self.settled,
            "resize_s": six_digits(self.resize_s),
            "effect": six_digits(self.effect),
        }


class History:
    """Keeps eventful decisions, the first 500 and the last thousand, and the last thousand others; writes to a file.

    The file holds each of the first 5,000 decisions, every second one until it holds 5,000 more, every fourth one
    after that, and so on, and each one that changed something: some 50,000 lines after a month at one a second.

    Args:
        path: the file, appended to; its folder is made at the first line. None writes nothing.

    Attributes:
        past: decisions that a checkpoint brought, as `Decision.to_json` gives them.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._first: list[Decision] = []
        self._events: deque[Decision] = deque(maxlen=REMEMBERED)
        self._others: deque[Decision] = deque(maxlen=REMEMBERED)
        self._last: Decision | None = None
        self._added = self._lines = 0
        self.past: tuple[dict[str, Any], ...] = ()

    def decided(self, decision: Decision) -> None:
        """Take the newest decision, which shows the effect of the one before; that one is added."""
        last, self._last = self._last, decision
        if last is not None:
            before, after = last.observation.samples_per_s, decision.observation.samples_per_s
            self.add(replace(last, effect=after / before if before > 0.0 else None))

    def close(self) -> None:
        """Add the newest decision; its effect is never known."""
        last, self._last = self._last, None
        if last is not None:
            self.add(last)

    def add(self, decision: Decision) -> None:
        """Remember one decision whose effect is known, or never will be; a line that cannot be written is the last."""
        if not decision.is_eventful:
            self._others.append(decision)
        elif len(self._first) < FIRST:
            self._first.append(decision)
        else:
            self._events.append(decision)
        number, self._added = self._added, self._added + 1
        if self.path is None or not (decision.applied or number % (1 << self._lines // WRITTEN) == 0):
            return
        self._lines += 1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Opened anew for each line: nothing is lost when the process is killed, and no file is left open.
            with self.path.open("a", encoding="utf-8") as file:
                line = {**decision.to_json(), "process": this_process()}
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            warn(f"InTune writes no more decisions to {self.path}: {error}. Training goes on and is tuned all the same")
            self.path = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What is remembered, oldest first, but for the newest one."""
        known = (*self._first, *self._events, *self._others)
        return tuple(sorted(known, key=lambda decision: decision.observation.step))

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint holds: the last decisions, earlier fits' included."""
        return [*self.past, *(decision.to_json() for decision in self.decisions[-SAVED:])][-SAVED:]

    @property
    def events(self) -> tuple[Decision, ...]:
        """The decisions in which something was proposed, changed or refused, the newest one included."""
        newest = (self._last,) if self._last is not None and self._last.is_eventful else ()
        return (*self._first, *self._events, *newest)


class Tail:
    """Reads a history, also while it is written: complete lines only, and of a file with several fits the last one.

    Args:
        path: of the file; it need not exist yet.

    Attributes:
        unread: lines that hold no decision, as after a crash in the middle of one.
        why_not: why the file that is there cannot be read; empty where it can.
        earlier: decisions of earlier fits.
        is_cut: True while the last line is not complete.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.why_not = path, ""
        self._forget()

    def _forget(self) -> None:
        self.unread = self.earlier = self._read = self._offset = self._file = 0
        self.is_cut, self._step = False, -math.inf

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the decisions written since the last call, and whether what was read before is of another fit.

        Each has the keys of `Decision.to_json`: numbers or None, allocations, texts.

        A file that was replaced or cut is read from its beginning.
        """
        new: list[dict[str, Any]] = []
        anew, self.why_not = False, ""
        try:
            if self.path.exists() and not self.path.is_file():
                raise OSError("it is no file")  # to open a pipe would wait for its writer
            with self.path.open("rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._file or now.st_size < self._offset:
                    self._forget()
                    self._file, anew = now.st_ino, True
                file.seek(self._offset)
                for line in file:
                    self.is_cut = not line.endswith(b"\n")
                    if self.is_cut:
                        break
                    self._offset += len(line)
                    decision = _decision(line)
                    if decision is None:
                        self.unread += 1
                        continue
                    if decision["step"] <= self._step:
                        self.earlier, self._read, new, anew = self.earlier + self._read, 0, [], True
                    self._step, self._read = decision["step"], self._read + 1
                    new.append(decision)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.why_not = str(error)
            self._forget()
            return [], True
        return new, anew


def _decision(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds, with all that is looked at, of the kind it has; None if that is no decision.

    Another version may have written other things, or more of them.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    seen = found.get("observation") if isinstance(found, dict) else None
    if not isinstance(seen, dict) or number(found.get("step")) is None:
        return None
    reason, vetoes = found.get("reason"), found.get("vetoes")
    rates = {name: rate for name, rate in _mapping(seen.get("rates")).items() if isinstance(rate, dict)}
    return {
        **found,
        **{key: number(found.get(key)) for key in ("at_s", "effect")},
        **{key: _allocation(found.get(key)) for key in ("before", "granted", "after")},
        "applied": found.get("applied") is True,
        "reason": reason if isinstance(reason, str) else "",
        "vetoes": [str(veto) for veto in vetoes] if isinstance(vetoes, list) else [],
        "observation": {
            **{key: number(seen.get(key)) for key in SEEN},
            "rates": {name: {key: number(rate.get(key)) for key in RATES} for name, rate in rates.items()},
        },
    }


def _allocation(given: object) -> dict[str, int]:
    """Return what is an allocation: anything else in its place cannot be compared, nor added up."""
    return {name: int(value) for name, value in _mapping(given).items() if number(value) is not None}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
