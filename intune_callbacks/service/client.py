"""A policy that asks an agent service, and goes on by itself wherever that does not answer as it should."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from intune_callbacks.errors import first_line, pass_on, warn
from intune_callbacks.service.wire import (
    LARGEST_BYTES,
    MOST_EVENTS,
    Event,
    Malformed,
    Question,
    TakenBack,
    decode,
    encode,
    proposal,
)
from intune_callbacks.types import Allocation, Clock, Hint, Observation, Policy, Proposal

__all__ = ["TOKEN", "Agent", "RemotePolicy", "Unanswered"]

LONGEST_S = 1.0
"""What a decision waits for at most: the training stands meanwhile."""
OF_RUN = 0.01
"""Share of the training's wall time that waiting for answers may take, beyond a first `LONGEST_S`. A choice."""
TOKEN, TOKEN_FILE = "INTUNE_AGENT_TOKEN", "INTUNE_AGENT_TOKEN_FILE"


class Unanswered(Exception):
    """No answer, or none that is of use; the message says why in a few words."""


class Agent:
    """The way to a service: one question at a time, each of a bounded time.

    Args:
        address: ``http://host:port`` or ``https://host:port``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._at: SplitResult = urlsplit(address)
        self._running: threading.Thread | None = None

    def ask(self, path: str, question: bytes) -> tuple[int, Any]:
        """Return status and plain types of the answer.

        Raises:
            Unanswered: there is none in `LONGEST_S`, or it is no JSON.
        """
        if self._running is not None and self._running.is_alive():
            raise Unanswered("the last question is still under way")
        call = _Call(self._at, path, question)
        # In a thread, for neither a name's look-up nor an answer that comes in drops can be bounded otherwise.
        self._running = threading.Thread(target=call.run, name="intune-agent", daemon=True)
        self._running.start()
        self._running.join(LONGEST_S)
        if self._running.is_alive() or isinstance(call.error, TimeoutError):  # whichever of the two limits came first
            call.give_up()
            raise Unanswered(f"no answer in {LONGEST_S:g} s")
        if call.error is not None:
            raise Unanswered(first_line(call.error)) from None
        try:
            return call.status, decode(call.answer)
        except Malformed as error:
            raise Unanswered(f"status {call.status}, {error}") from None


@dataclass
class _Call:
    """One question on a connection of its own."""

    at: SplitResult
    path: str
    question: bytes
    status: int = 0
    answer: bytes = b""
    error: Exception | None = None
    socket: socket.socket | None = field(default=None, repr=False)

    def run(self) -> None:
        kind = http.client.HTTPSConnection if self.at.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            if token := _token():
                headers["Authorization"] = f"Bearer {token}"
            with contextlib.closing(kind(self.at.hostname or "", self.at.port, timeout=LONGEST_S)) as connection:
                connection.connect()
                self.socket = connection.sock
                connection.request("POST", self.path, self.question, headers)
                with connection.getresponse() as response:
                    self.answer, self.status = response.read(LARGEST_BYTES + 1), response.status
        except Exception as error:
            self.error = error

    def give_up(self) -> None:
        """End what the thread waits for; it ends by itself then."""
        with contextlib.suppress(OSError, AttributeError):
            self.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


class RemotePolicy:
    """Lets a service decide; beside it the same policy here, told the same, in whose place the service's word stands.

    Args:
        agent: the service.
        local: decides where the service does not.
        memory_limit: share of the memory to plan with, 0..1.
        clock: what waiting is measured with.

    Attributes:
        asked, answered: questions sent, and answers that were of use.
        failures: why a question had no answer -> how often.
    """

    def __init__(self, agent: Agent, local: Policy, memory_limit: float = 0.90, clock: Clock | None = None) -> None:
        self.agent, self.name = agent, local.name
        self.asked = self.answered = self.decisions = 0
        self.failures: Counter[str] = Counter()
        self._local, self._memory_limit, self._now = local, memory_limit, (clock or Clock()).wall
        self._run, self._job = uuid.uuid4().hex, f"{socket.gethostname()[:80]}, process {os.getpid()}"
        self._begin_s, self._waited_s = self._now(), 0.0
        self._events: list[Event] = []
        # Events before the first of `_events` since the service was given a state; None where it has to be given one.
        self._first: int | None = None
        self._state: dict[str, Any] | None = None  # of before `_events`, where the service has to be given one

    def decide(self, observation: Observation) -> Proposal:
        """Return the service's answer, or the local policy's."""
        self.decisions += 1
        self._note(observation)
        own = self._local.decide(observation)
        state, self._state = self._state, None
        if self._waited_s > LONGEST_S + OF_RUN * (self._now() - self._begin_s):
            self.failures["it takes too long, and is asked seldom"] += 1
        else:
            begin_s = self._now()
            try:
                own = self._ask(observation, state)
            except Exception as error:  # of whatever kind, no thread to be had among them: it is decided here
                pass_on(error)
                self._failed(str(error) if isinstance(error, (Unanswered, Malformed)) else first_line(error))
            self._waited_s += self._now() - begin_s
        if len(self._events) >= MOST_EVENTS:
            self._first = None
        return own

    def measured(self, observation: Observation) -> None:
        """Have both learn; the service hears of it with the next question."""
        self._note(observation)
        if (measured := getattr(self._local, "measured", None)) is not None:
            measured(observation)
        if len(self._events) >= MOST_EVENTS:
            self._first = self._state = None

    def _note(self, observation: Observation) -> None:
        """Put an observation down for the service, before the local policy learns from it."""
        if self._first is None and self._state is None:
            self._state, self._events = self._local.state_dict(), []
        self._events.append(Event(observation))

    def taken_back(self, failed: Allocation, ratio: float) -> None:
        """Tell both."""
        self._local.taken_back(failed, ratio)
        if self._first is not None or self._state is not None:
            self._events.append(Event(taken_back=TakenBack(dict(failed), ratio)))

    def state_dict(self) -> dict[str, Any]:
        """Return the local policy's, which knows what the service was told."""
        return self._local.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the service is sent the same state."""
        self._local.load_state_dict(state)
        self._first = self._state = None

    @property
    def hints(self) -> tuple[Hint, ...]:
        """What the report says where the service did not make all decisions."""
        if not self.failures:
            return ()
        why = ", ".join(f"{reason} ({times} times)" for reason, times in self.failures.most_common(3))
        made = f"{self.answered} of {self.decisions} decisions were made by the agent service {self.agent.address}"
        return (Hint(f"{made}, the others here: {why}", kind="loader"),)

    def _ask(self, observation: Observation, state: dict[str, Any] | None) -> Proposal:
        known = None if state is None else encode(state).decode()
        first = 0 if self._first is None else self._first
        question = Question(self._run, self._job, self._memory_limit, first, tuple(self._events), known)
        self.asked += 1
        status, found = self.agent.ask("/v1/decide", encode(question))
        if status != 200:
            # Whatever it is: with a state the service needs to know nothing of before.
            self._first = None
            told = found.get("error", "") if isinstance(found, dict) else ""
            raise Unanswered(f"status {status} {str(told)[:120]}".strip())
        self._first, self._events = first + len(self._events), []
        answer = proposal(found, observation)
        self.answered += 1
        return answer

    def _failed(self, why: str) -> None:
        why = "".join(c if c.isprintable() else " " for c in why[:160])
        if not self.failures:
            warn(f"the agent service {self.agent.address} gave no answer: {why}. InTune decides here until it does")
        if why in self.failures or len(self.failures) < 20:  # whatever it sends, it fills no memory
            self.failures[why] += 1


def _token() -> str | None:
    """Return what shows the service who asks.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    if given := os.environ.get(TOKEN):
        return given
    file = os.environ.get(TOKEN_FILE)
    return Path(file).read_text(encoding="utf-8").strip() if file else None
