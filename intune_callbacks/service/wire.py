"""What a training and the agent service tell each other, as JSON; nothing that is read is believed unchecked."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from intune_callbacks.types import Allocation, Observation, Proposal

__all__ = [
    "FORMAT",
    "LARGEST_BYTES",
    "MOST_EVENTS",
    "Event",
    "Malformed",
    "Question",
    "TakenBack",
    "answer",
    "decode",
    "encode",
    "parse",
    "proposal",
]

FORMAT = 1
LARGEST_BYTES = 1 << 20
"""Of a question or an answer. A choice: a decision of 32 stages takes 25 KB."""
MOST_EVENTS = 32
"""Of one question, a choice: what a training has seen while it did not ask."""
MOST_PARTS, LONGEST_TEXT, LARGEST_INT, LARGEST = 256, 1000, 1 << 62, 1e300
"""Of a list or a mapping, of a text, of numbers. A choice: far beyond what a pipeline has."""


class Malformed(ValueError):
    """What was received is not what was agreed upon; the message says where and how."""


@dataclass(frozen=True, slots=True)
class TakenBack:
    """An allocation that was left because it was measured to be worse.

    Args:
        failed: the allocation.
        ratio: its throughput / the best one's.
    """

    failed: Mapping[str, int]
    ratio: float


@dataclass(frozen=True, slots=True)
class Event:
    """What a policy is told, one of the two."""

    observation: Observation | None = None
    taken_back: TakenBack | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What a training asks: everything its policy was to be told since the last answer, a decision at the end.

    Args:
        run: a name nobody else has.
        job: for people: the machine and the process.
        memory_limit: share of the memory the policy plans with, 0..1.
        first: number of the first event, counted from `state` on.
        events: in their order.
        state: of a policy to go on from, as JSON in a text; None where the service has one.
        format: of this question.
    """

    run: str
    job: str
    memory_limit: float
    first: int
    events: tuple[Event, ...]
    state: str | None = None
    format: int = FORMAT


def encode(value: Any) -> bytes:
    """Return a dataclass or plain types as JSON.

    Raises:
        ValueError: for a number that is not finite.
    """
    return json.dumps(asdict(value) if is_dataclass(value) else value, allow_nan=False).encode()  # type: ignore[arg-type]


def decode(text: bytes) -> Any:
    """Return JSON as plain types.

    Raises:
        Malformed: for anything else.
    """
    if len(text) > LARGEST_BYTES:
        raise Malformed(f"more than {LARGEST_BYTES} bytes")
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None


def parse(state: Any) -> Question:
    """Return a question from plain types.

    Raises:
        Malformed: naming the place.
    """
    question = _value(Question, state, "question")
    assert isinstance(question, Question)
    if question.format != FORMAT:
        raise Malformed(f"format: {question.format} was sent, this service knows {FORMAT}")
    if not question.run or not 0.0 < question.memory_limit < 1.0 or question.first < 0:
        raise Malformed("expected a run, 0 < memory_limit < 1 and 0 <= first")
    if not 1 <= len(question.events) <= MOST_EVENTS or question.events[-1].observation is None:
        raise Malformed(f"expected 1 to {MOST_EVENTS} events, an observation at the end")
    for event in question.events:
        if (event.observation is None) == (event.taken_back is None):
            raise Malformed("expected of each event either an observation or what was taken back")
        if event.observation is not None:
            _check(event.observation)
    return question


def answer(given: Proposal) -> dict[str, Any]:
    """Return a policy's answer as plain types."""
    return {"format": FORMAT, "allocation": dict(given.allocation), "reason": given.reason, "settled": given.settled}


def proposal(state: Any, observation: Observation) -> Proposal:
    """Return the answer to the question whose last event was `observation`.

    Raises:
        Malformed: for anything else than an allocation of its stages within their bounds.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Malformed(f"expected an answer of format {FORMAT}")
    allocation: Allocation = _value(Mapping[str, int], state.get("allocation"), "allocation")
    bounds = {stage.name: (stage.low, stage.high) for stage in observation.stages}
    for name, value in allocation.items():
        low, high = bounds.get(name, (1, 0))
        # A stage that computes in the training loop is known to policies as one of one worker.
        if not low <= value <= max(high, 1 if name in bounds else high):
            raise Malformed(f"allocation: {name[:80]!r} {value} is no value of a stage")
    reason, settled = _value(str, state.get("reason"), "reason"), _value(bool, state.get("settled"), "settled")
    # It goes to a terminal, a page and a log.
    return Proposal(allocation, "".join(c if c.isprintable() else " " for c in reason), settled)


def _check(seen: Observation) -> None:
    names = [stage.name for stage in seen.stages]
    if len(set(names)) < len(names):
        raise Malformed("stages: a name is there twice")
    if not set(seen.rates) <= set(names):
        raise Malformed("rates: of something that is no stage")
    for stage in seen.stages:
        if not 0 <= stage.low <= stage.current <= stage.high:
            raise Malformed(f"stages: expected low <= current <= high of {stage.name[:80]!r}")


def _refuse(word: str) -> float:
    raise Malformed(f"{word} is no number")


_kinds = functools.cache(get_type_hints)


def _value(kind: Any, state: Any, where: str) -> Any:
    """Return plain types as a value of `kind`, exactly that."""
    if isinstance(kind, UnionType):
        return None if state is None else _value(get_args(kind)[0], state, where)
    if is_dataclass(kind):
        return _object(kind, state, where)
    origin = get_origin(kind)
    if origin is Literal:
        if state not in get_args(kind):
            raise Malformed(f"{where}: expected one of {', '.join(map(str, get_args(kind)))}")
        return state
    if origin is tuple:
        return tuple(_value(get_args(kind)[0], one, where) for one in _parts(state, list, where))
    if origin is not None:
        parts = _parts(state, dict, where)
        return {_value(str, key, where): _value(get_args(kind)[1], one, where) for key, one in parts.items()}
    if kind is float:
        if type(state) not in (int, float) or not abs(state) < LARGEST:
            raise Malformed(f"{where}: expected a number")
        return state
    if type(state) is not kind:
        raise Malformed(f"{where}: expected {kind.__name__}, got {type(state).__name__}")
    if kind is str and len(state) > (LARGEST_BYTES if where.endswith(".state") else LONGEST_TEXT):
        raise Malformed(f"{where}: a text of {len(state)} characters")
    if kind is int and abs(state) > LARGEST_INT:
        raise Malformed(f"{where}: too large")
    return state


def _object(cls: Any, state: Any, where: str) -> Any:
    parts, known = _parts(state, dict, where), {one.name: one for one in fields(cls)}
    if unknown := [name for name in parts if name not in known]:
        raise Malformed(f"{where}: there is no {unknown[0][:80]!r}")
    if missing := [name for name, one in known.items() if name not in parts and one.default is MISSING]:
        raise Malformed(f"{where}: {missing[0]!r} is missing")
    kinds = _kinds(cls)
    return cls(**{name: _value(kinds[name], one, f"{where}.{name}") for name, one in parts.items()})


def _parts(state: Any, kind: type, where: str) -> Any:
    if not isinstance(state, kind):
        raise Malformed(f"{where}: expected {'an object' if kind is dict else 'a list'}, got {type(state).__name__}")
    if len(state) > MOST_PARTS:  # type: ignore[arg-type]
        raise Malformed(f"{where}: {len(state)} parts")  # type: ignore[arg-type]
    return state
