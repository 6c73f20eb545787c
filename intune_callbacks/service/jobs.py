"""The trainings a service decides for, each with a policy of its own, and what earlier ones found."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from intune_callbacks.decide.policies import make_policy
from intune_callbacks.record.files import write_whole
from intune_callbacks.record.fingerprint import differences
from intune_callbacks.service.wire import LARGEST_BYTES, Malformed, Question
from intune_callbacks.types import Observation, Policy, Proposal

__all__ = ["MOST_JOBS", "Busy", "Found", "Gone", "Job", "Jobs"]

MOST_JOBS = 1000
"""A choice. A decision was measured to take 4 to 6 ms of CPU: some 200 trainings may decide each second."""
IDLE_S = 600.0
"""A training that has not asked for so long gives way to a new one. A choice: an evaluation takes minutes."""
RATE, BURST = 10.0, 40.0
"""Decisions a second of one training, and how many at once. A choice: they are to be one a second at most."""
MOST_FOUND = 10_000
"""Kept results of trainings, a choice; the oldest goes."""


class Gone(Exception):
    """Nothing is known of this training, or something between: it has to send its policy's state."""


class Busy(Exception):
    """Too many trainings, or too many questions of one."""


@dataclass(slots=True)
class Job:
    """One training.

    Args:
        policy: that decides for it.
        name: for people.
        told: events its policy was told.
        asked: decisions made here.
        last: the newest observation.
        answer: to it.
        at_s: when that was.
        room: decisions it may ask for at once.
    """

    policy: Policy
    name: str
    told: int = 0
    asked: int = 0
    last: Observation | None = None
    answer: Proposal = field(default_factory=Proposal)
    at_s: float = 0.0
    room: float = BURST
    lock: threading.Lock = field(default_factory=threading.Lock)


class Jobs:
    """Decides for many trainings."""

    def __init__(self, policy: str = "dqn", clock: Callable[[], float] = time.monotonic) -> None:
        make_policy(policy)
        self._policy, self._clock = policy, clock
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()

    def decide(self, question: Question) -> Proposal:
        """Return the policy's answer to the last event.

        Raises:
            Gone: the policy of this training is not here, or was not told all before.
            Busy: there are too many.
            Malformed: the policy makes nothing of it; it is forgotten.
        """
        job = self._job(question)
        with job.lock:
            if question.first > job.told:
                raise Gone
            for event in question.events[job.told - question.first :]:
                try:
                    self._tell(job, event)
                except Exception as error:  # whatever numbers were sent: the other trainings go on
                    self.forget(question.run)
                    raise Malformed(f"the policy cannot use it: {type(error).__name__}: {error}") from None
            # The answer to a question that was asked again, for the first one got lost.
            return job.answer

    def forget(self, run: str) -> None:
        """Forget one training."""
        with self._lock:
            self._jobs.pop(run, None)

    def rows(self) -> list[tuple[float, Job]]:
        """Return the trainings, each with the seconds since its last question, those that asked last first."""
        with self._lock:
            jobs = list(reversed(self._jobs.values()))
        return [(self._clock() - job.at_s, job) for job in jobs]

    def _job(self, question: Question) -> Job:
        now_s = self._clock()
        with self._lock:
            job = self._jobs.get(question.run)
            if job is None or question.state is not None:
                job = self._begin(question, job, now_s)
            job.room = min(BURST, job.room + RATE * (now_s - job.at_s)) - 1.0
            job.at_s = now_s
            self._jobs.move_to_end(question.run)
            if job.room < 0.0:
                job.room = 0.0
                raise Busy(f"more than {RATE:g} decisions a second")
            return job

    def _begin(self, question: Question, before: Job | None, now_s: float) -> Job:
        if question.state is None:
            raise Gone
        policy = make_policy(self._policy, memory_limit=question.memory_limit)
        try:
            policy.load_state_dict(json.loads(question.state))
        except Exception as error:
            raise Malformed(f"no state of the policy {self._policy!r}: {type(error).__name__}: {error}") from None
        if before is None and len(self._jobs) >= MOST_JOBS:
            oldest, idle = next(iter(self._jobs.items()))
            if now_s - idle.at_s < IDLE_S:
                raise Busy(f"{MOST_JOBS} trainings already")
            del self._jobs[oldest]
        job = Job(policy, question.job, at_s=now_s)
        if before is not None:
            job.room, job.at_s, job.asked = before.room, before.at_s, before.asked
        self._jobs[question.run] = job
        return job

    def _tell(self, job: Job, event: Any) -> None:
        if event.taken_back is not None:
            job.policy.taken_back(dict(event.taken_back.failed), event.taken_back.ratio)
        else:
            job.answer, job.last = job.policy.decide(event.observation), event.observation
            job.asked += 1
        job.told += 1


class Found:
    """What trainings found, for the next ones of their kind to start from: the newest of each fingerprint.

    Args:
        folder: where it is kept over a restart; None keeps it in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[-MOST_FOUND:]:
                try:
                    self._known[path.stem] = _checked(json.loads(path.read_text(encoding="utf-8")))
                except (OSError, ValueError, RecursionError):
                    continue  # of another version, or cut off: it is as if it had not been kept

    def __len__(self) -> int:
        return len(self._known)

    def keep(self, given: Any) -> None:
        """Keep what a training found.

        Args:
            given: ``found``, what `found.yaml` holds, and ``state``, the text of `state.json`.

        Raises:
            Malformed: for anything else.
            OSError: when it cannot be written.
        """
        entry = _checked(given)
        name = hashlib.sha256(json.dumps(entry["found"]["fingerprint"], sort_keys=True).encode()).hexdigest()
        with self._lock:
            self._known.pop(name, None)
            self._known[name] = entry
            gone = self._known.popitem(last=False)[0] if len(self._known) > MOST_FOUND else None
            if self._folder is not None:
                write_whole(self._folder / f"{name}.json", json.dumps(entry))
                if gone is not None:
                    (self._folder / f"{gone}.json").unlink(missing_ok=True)

    def like(self, fingerprint: Any) -> dict[str, Any] | None:
        """Return the newest entry whose fingerprint is the same, None without one.

        Raises:
            Malformed: this is no fingerprint.
        """
        with self._lock:
            entries = list(reversed(self._known.values()))
        try:
            return next((one for one in entries if not differences(one["found"]["fingerprint"], fingerprint)), None)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Malformed(f"no fingerprint: {type(error).__name__}: {error}") from None


def _checked(given: Any) -> dict[str, Any]:
    """Return an entry that the training it is for can read."""
    found, state = (given.get("found"), given.get("state")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(found, dict) or not {"format", "allocation", "fingerprint", "state"} <= set(found):
        raise Malformed("expected what found.yaml holds")
    if not isinstance(state, str) or len(state) > LARGEST_BYTES or not isinstance(found["state"], dict):
        raise Malformed("expected the text of state.json")
    if hashlib.sha256(state.encode()).hexdigest() != found["state"].get("sha256"):
        raise Malformed("the state is not the one that belongs to what was found")
    try:
        if differences(found["fingerprint"], found["fingerprint"]):
            raise Malformed("a fingerprint that is not like itself")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"no fingerprint: {type(error).__name__}: {error}") from None
    return {"found": found, "state": state}
