"""The driver of Ray, in a process of its own: Ray ends its process a minute after the head of the cluster has gone.

It starts and ends the actors it is asked for, hands items on to them and their answers back, and tells what the
cluster has. What is in these it does not look at, and it decides nothing.

    training process --channel: start, end, given--> bridge --> actors
                     <--channel: ready, gone, cluster--
                     <--one pipe per actor: items, answers-->
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import RayError

from intune_callbacks.errors import first_line
from intune_callbacks.pipelines.ray.actor import Worker
from intune_callbacks.pipelines.ray.channel import Channel
from intune_callbacks.pipelines.ray.given import Package
from intune_callbacks.pipelines.workers.wire import Wire

__all__ = ["LOST", "main"]

LOST = "intune: lost"
"""In place of whether the answer is a result: the actor is gone, or its machine."""
TURN_S, FACTS_EVERY_S = 0.1, 2.0
ANSWER_S = 5.0
VERSIONS = 8  # iterators of one loader that run at once
GIVEN_S = 60.0  # how long an item waits for what is to be done to it


class _Actor:
    """One worker, as the driver has it.

    Args:
        handle: of Ray.
        ready: the reference to its first answer.
    """

    def __init__(self, handle: Any, ready: Any) -> None:
        self.handle, self.ready = handle, ready
        self.version, self.lock = -1, threading.Lock()


class _Bridge:
    def __init__(self, channel: Channel, setting: Mapping[str, Any]) -> None:
        self._channel, self._setting, self._parent = channel, setting, os.getppid()
        self._here = ray.get_runtime_context().get_node_id()
        self._left_out = {self._here}
        self._starting: dict[int, _Actor] = {}
        self._running: dict[int, _Actor] = {}
        self._packages: dict[int, Any] = {}
        # Version -> reference to the package, and what belongs to the iterator.
        self._versions: dict[int, tuple[Any, bytes]] = {}
        self._turn = threading.Condition()
        self._facts_at_s = 0.0

    def is_needed(self) -> bool:
        return os.getppid() == self._parent

    def run(self) -> None:
        actions: dict[str, Callable[..., None]] = {
            "start": self._start, "end": self._end, "leave": self._left_out.add,
            "package": self._package, "version": self._version,
        }  # fmt: skip
        while self.is_needed():
            found = self._channel.receive(TURN_S)
            if found is not None:
                (name, *given), descriptors = found
                if name == "close":
                    return
                actions[name](*given, *descriptors)
            self._look_for_ready()
            if time.monotonic() >= self._facts_at_s:
                with suppress(Exception):  # its head is gone, or busy
                    self._channel.send(("cluster", self._machines()))
                self._facts_at_s = time.monotonic() + FACTS_EVERY_S

    # -- what is asked -------------------------------------------------------------------------------------------

    def _start(self, key: int) -> None:
        options: dict[str, Any] = {
            "num_cpus": 1, "max_restarts": 0, "max_task_retries": 0,
            "label_selector": {"ray.io/node-id": f"!in({','.join(sorted(self._left_out))})"},
        }  # fmt: skip
        kind: Any = ray.remote(**options)(Worker)
        handle = kind.remote(key, self._setting["directory"], self._setting["path"])
        self._starting[key] = _Actor(handle, handle.ready.remote())

    def _end(self, key: int) -> None:
        actor = self._starting.pop(key, None) or self._running.pop(key, None)
        if actor is not None:
            with suppress(Exception):  # it is gone
                ray.kill(actor.handle)

    def _package(self, number: int, sizes: list[int], descriptor: int) -> None:
        try:
            self._packages = {number: ray.put(Package.parts_of(descriptor, sizes))}
        finally:
            os.close(descriptor)

    def _version(self, version: int, package: int, again: bytes) -> None:
        with self._turn:
            self._versions[version] = self._packages[package], again
            for old in sorted(self._versions)[:-VERSIONS]:
                del self._versions[old]
            self._turn.notify_all()
        for key, actor in list(self._running.items()):
            self._give(key, actor)

    def _give(self, key: int, actor: _Actor) -> None:
        """Have an actor take what is to be done now, before any item waits for that."""
        if self._versions:
            threading.Thread(target=self._given, args=(key, actor, max(self._versions)), daemon=True).start()

    def _given(self, key: int, actor: _Actor, version: int) -> None:
        try:
            with actor.lock:
                self._renew(actor, version)
            self._channel.send(("has", key, version))
        except (KeyError, OSError):  # there is a newer one, or nobody wants it
            pass
        except RayError as error:
            self._end(key)
            with suppress(OSError):
                self._channel.send(("gone", key, first_line(error)))

    # -- what is told --------------------------------------------------------------------------------------------

    def _look_for_ready(self) -> None:
        if not self._starting:
            return
        refs = {actor.ready: key for key, actor in self._starting.items()}
        for ref in ray.wait([*refs], num_returns=len(refs), timeout=0)[0]:
            key = refs[ref]
            actor = self._starting.pop(key)
            try:
                node = ray.get(ref)
            except Exception as error:
                self._channel.send(("gone", key, first_line(error)))
                continue
            self._running[key] = actor
            ours, theirs = socket.socketpair()
            serve = threading.Thread(target=self._serve, args=(key, actor, Connection(ours.detach())), daemon=True)
            serve.start()
            with theirs:
                self._channel.send(("ready", key, node), [theirs.fileno()])
            self._give(key, actor)

    def _machines(self) -> dict[str, tuple[str, float, float]]:
        """Return of each machine but this one its name, its CPUs and those nobody has taken."""
        free: dict[str, Any] | None = None
        with suppress(Exception):  # not of Ray's public functions
            free = ray._private.state.available_resources_per_node()
        found = {}
        for node in ray.nodes():
            key, cpus = node["NodeID"], float(node["Resources"].get("CPU", 0.0))
            if node["Alive"] and key != self._here:
                left = cpus if free is None else float(free.get(key, {}).get("CPU", 0.0))
                found[key] = str(node["NodeManagerAddress"]), cpus, left
        return found

    # -- one actor's items ---------------------------------------------------------------------------------------

    def _serve(self, key: int, actor: _Actor, connection: Connection) -> None:
        wire = Wire(connection, None)
        why = "it was ended"
        try:
            while (asked := wire.receive(self.is_needed)) is not None:
                try:
                    answer = ray.get(self._asked(actor, *asked))
                except RayError as error:
                    why = first_line(error)
                    wire.send((LOST, why, None))
                    break
                wire.write([memoryview(part) for part in answer])
                asked = answer = None
        except (EOFError, OSError):  # nobody wants the answer
            pass
        finally:
            wire.close()
            self._end(key)
            with suppress(OSError):
                self._channel.send(("gone", key, why))

    def _asked(self, actor: _Actor, version: int, task: bytes) -> Any:
        """Return the reference to the answer."""
        with actor.lock:  # the calls of one process are done in their order
            self._renew(actor, version)
            return actor.handle.run.remote(task)

    def _renew(self, actor: _Actor, version: int) -> None:
        if actor.version != version:
            with self._turn:
                self._turn.wait_for(lambda: version in self._versions, GIVEN_S)
                package, again = self._versions[version]
            ray.get(actor.handle.renew.remote(package, again))
            actor.version = version


def _end_with(parent: int) -> None:
    """Leave when the training process has: what Ray is asked may wait for a cluster that is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ANSWER_S)
    os._exit(1)


def main(descriptor: int) -> None:
    """Be the bridge; called in its process.

    Args:
        descriptor: of this side's end of the channel.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    found = channel.receive(GIVEN_S)
    assert found is not None
    setting = found[0]
    try:
        host, _, port = setting["address"].rpartition(":")
        # Ray would ask for minutes.
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        ray.init(address=setting["address"], logging_level="ERROR", log_to_driver=False, configure_logging=False)
    except Exception as error:
        channel.send(("failed", first_line(error)))
        return
    try:
        _Bridge(channel, setting).run()
    except (EOFError, OSError):  # the training process is gone
        pass
    finally:
        ray.shutdown()  # its actors end with it
        os._exit(0)  # threads that wait for an answer would hold it up
