"""A Ray cluster of several nodes on the loopback of this machine, and the items that are made on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FOLDER = Path(__file__).parent
STORE_BYTES = 80 << 20
HERE = os.getpid()

# Before anybody imports Ray; the first one has its servers listen on the loopback alone.
SETTING = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore", "PYTHONPATH": f"{FOLDER.parent}{os.pathsep}{FOLDER}",
}  # fmt: skip


class Nodes:
    """A cluster: a head without CPUs, where the training is, and one node for each number of CPUs."""

    def __init__(self, *cpus: int, head_cpus: int = 0) -> None:
        self.folder = tempfile.mkdtemp(prefix="ir", dir="/tmp")  # the paths of its sockets must be short
        os.environ.update(SETTING, RAY_TMPDIR=self.folder)
        (Path(self.folder) / "ray").mkdir()
        from ray.cluster_utils import Cluster

        self._given = {"object_store_memory": STORE_BYTES, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
        head = {**self._given, "num_cpus": head_cpus, "temp_dir": self.folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.nodes = [self.add(many) for many in cpus]

    def add(self, cpus: int, **env: str) -> Any:
        return self._cluster.add_node(num_cpus=cpus, wait=False, env_vars=env or None, **self._given)

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def process(self, node: Any, kind: str) -> psutil.Process:
        return psutil.Process(node.all_processes[kind][0].process.pid)

    def kill_head(self) -> None:
        self.process(self._cluster.head_node, "gcs_server").kill()

    def actors(self) -> list[psutil.Process]:
        """Return the processes of workers."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if line.startswith("ray::Worker"):
                found.append(process)
        return found

    def has_no_actor(self, within_s: float = 10.0) -> bool:
        return wait_for(lambda: not self.actors(), within_s)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for(is_so: Callable[[], bool], within_s: float = 30.0) -> bool:
    until_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def heard_elsewhere() -> list[tuple[str, str, int]]:
    """Return all that listens outside of the loopback, of this process's and of Ray's."""
    ours = psutil.Process().children(recursive=True)
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "ray" in line.partition(" ")[0] or "pipelines.ray.bridge" in line or "/tmp/ir" in line:
            ours.append(process)
    found, heard = [], 0
    for process in {*ours, psutil.Process()}:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    heard += 1
                    ip = connection.laddr.ip
                    if not (ip.startswith("127.") or ip in ("::1", "::ffff:127.0.0.1")):
                        found.append((process.name(), ip, connection.laddr.port))
    assert heard > 0, "nothing listens: this looks at the wrong processes"
    return found


@contextlib.contextmanager
def running(*cpus: int, head_cpus: int = 0) -> Iterator[Nodes]:
    nodes = Nodes(*cpus, head_cpus=head_cpus)
    try:
        yield nodes
        assert not heard_elsewhere()
    finally:
        nodes.close()


# -- what is made there ----------------------------------------------------------------------------------------------


def item(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    """Some milliseconds, other ones for each number."""
    time.sleep(random.Random(number).random() * 0.02)
    return number, np.full(2000, number)


def poison(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    if number == 150:
        os.kill(os.getpid(), 9)
    return item(number)


def raising(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    if number == 150:
        raise KeyError("no item 150")
    return item(number)


def of_file(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    """As if the file had other contents on some machine."""
    made, values = item(number)
    return made, values + int(os.environ.get("OTHER_FILE", "0"))


def unseeded(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    time.sleep(0.01)
    return number, np.random.default_rng().random(2000)


class Module:
    """A function of a module that some machine does not have."""

    def __call__(self, number: int) -> Any:
        return item(number)

    def __setstate__(self, state: Any) -> None:
        if "NO_MODULE" in os.environ:
            raise ModuleNotFoundError("No module named 'of_the_user'")

    def __getstate__(self) -> Any:
        return {"any": 1}


class Restless:
    """An engine that is resized all the time while it is read.

    Args:
        engine: an `ElasticMap` over 0, 1, 2, ...
    """

    def __init__(self, engine: Any, most: int) -> None:
        self.engine, self._most = engine, most
        self.values: list[Any] = []
        self.at_s: list[float] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._random = random.Random(0)

    def _read(self) -> None:
        try:
            for value in self.engine:
                self.values.append(value)
                self.at_s.append(time.monotonic())
        except BaseException as error:
            self.error = error

    def resize(self, times: int, pause_s: float = 0.008) -> None:
        for _ in range(times):
            if self.error is not None:
                return
            self.engine.resize(self._random.randint(1, self._most), self._random.randint(1, 48))
            time.sleep(self._random.random() * pause_s)

    def longest_gap_s(self, since_s: float) -> float:
        """Return the longest time without an item from then on."""
        at = [since_s, *(one for one in self.at_s if one >= since_s), time.monotonic()]
        return max(later - sooner for sooner, later in itertools.pairwise(at))

    def end(self) -> None:
        self.engine.close()
        self._thread.join(15)
        assert not self._thread.is_alive()

    def are_right(self) -> bool:
        numbers = [value[0] for value in self.values]
        return numbers == list(range(len(numbers))) and all((value[1] == value[0]).all() for value in self.values)


class Ending:
    """A function whose workers end on some machine."""

    def __call__(self, number: int) -> Any:
        if "ENDS" in os.environ:
            os.kill(os.getpid(), 9)
        return item(number)


class OfHere:
    """What only this process can read."""

    def __reduce__(self) -> Any:
        return _made_here, (os.environ.get("ELSEWHERE", ""),)


def _made_here(where: str) -> Any:
    if where:
        raise AttributeError("no such class here")
    return OfHere()


def unread(number: int) -> Any:
    made, values = item(number)
    return made, values, OfHere()


class Start:
    told: Any = None

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    def again(self) -> None:
        pass

    def __call__(self, number: int) -> None:
        if self._fails:
            raise ValueError("no such table")
