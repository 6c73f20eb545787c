"""Agent services for the tests, on loopback, and trainings on a virtual clock that ask them."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fakes import FakeLoop
from policy_runs import five_stages, tuner_of

from intune_callbacks.decide.policies import make_policy
from intune_callbacks.record.history import Decision
from intune_callbacks.service.client import Agent, RemotePolicy
from intune_callbacks.service.jobs import Jobs
from intune_callbacks.service.server import Service
from intune_callbacks.types import Clock


def jobs(policy: str = "dqn") -> Jobs:
    """Trainings whose virtual seconds are much shorter than those in which a service counts what it is asked."""
    seconds = itertools.count()
    return Jobs(policy, lambda: float(next(seconds)))


@contextmanager
def serving(**given: Any) -> Iterator[Service]:
    """A running service; it is closed at the end, if it is not yet. A second passes with each question."""
    service = Service(**{"jobs": jobs(), **given})
    thread = threading.Thread(target=service.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        service.shutdown()
        service.server_close()
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def answering(reply: Callable[[bytes], bytes | None]) -> Iterator[str]:
    """The address of something that reads a question and sends `reply` of it; None keeps the connection open."""
    listener = socket.create_server(("127.0.0.1", 0))
    held, threads = [], []

    def serve(connection: socket.socket) -> None:
        text = b""
        while b"\r\n\r\n" not in text:
            text += connection.recv(65536) or b"\r\n\r\n"
        answer = reply(text)
        if answer is None:
            held.append(connection)
            return
        with connection, suppress(OSError):
            connection.sendall(answer)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for connection in held:
            connection.close()
        for one in threads:
            one.join(10)


def remote(address: str, clock: Clock | None = None) -> RemotePolicy:
    """The policy of a training that asks; its clock counts no waiting, unless another is given."""
    return RemotePolicy(Agent(address), make_policy("dqn"), clock=clock or Clock(wall=lambda: 0.0))


def train(policy: Any, seconds: float = 120.0, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """What a policy does on five stages whose machine grows and shrinks; `meanwhile` comes after the first third."""
    pipeline = five_stages(16.0)
    tuner, loop = tuner_of(pipeline, policy), FakeLoop(pipeline)
    made: list[Decision] = loop.run(tuner, seconds / 3)
    meanwhile()
    pipeline.machine.cpus = 32.0
    made += loop.run(tuner, seconds / 3)
    pipeline.machine.cpus = 12.0
    made += loop.run(tuner, seconds / 3)
    assert tuner.frozen is None
    return [(one.before, one.after, one.proposed, one.reason, one.settled) for one in made]
