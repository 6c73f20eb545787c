"""Workers on a Ray cluster, as far as no Ray is needed: arguments, what is missing, what is sent."""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import intune_callbacks
from intune_callbacks.config import TunerConfig
from intune_callbacks.errors import ConfigError, MissingPackage, install_line
from intune_callbacks.guard.guard import Guard
from intune_callbacks.pipelines.ray import given
from intune_callbacks.pipelines.ray.actor import Worker
from intune_callbacks.pipelines.ray.channel import Channel
from intune_callbacks.pipelines.ray.members import Line, Members
from intune_callbacks.pipelines.workers.wire import Wire
from intune_callbacks.session.arguments import BaseCallback
from tests.fakes import FakeLoop, FakeMachine, FakePipeline, Work

ROOT = Path(intune_callbacks.__file__).parent.parent


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variable", "problem"),
    [
        ({"workers_kind": "ray"}, None, "workers_kind='ray': expected the address of a cluster's head"),
        ({"workers_kind": "ray", "ray_address": "auto"}, None, "ray_address='auto': expected the address"),
        ({"workers_kind": "ray", "ray_address": "ray://10.0.0.1:10001"}, None, "not that of a client (ray://)"),
        ({"workers_kind": "ray", "ray_address": "10.0.0.1:0"}, None, "ray_address='10.0.0.1:0': expected"),
        ({"workers_kind": "ray"}, "http://127.0.0.1:8265", "RAY_ADDRESS='http://127.0.0.1:8265': expected"),
        ({"ray_address": "10.0.0.1:6379"}, None, "ray_address='10.0.0.1:6379': expected workers_kind='ray' beside it"),
    ],
)
def test_wrong_addresses(
    arguments: dict[str, Any], variable: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError) as told:
        TunerConfig(**arguments)
    assert problem in str(told.value)
    assert len(told.value.problems) == 1


def test_the_address_of_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert TunerConfig(workers_kind="ray").cluster_address == "10.0.0.2:6379"
    assert TunerConfig(workers_kind="ray", ray_address="head:6379").cluster_address == "head:6379"
    assert TunerConfig().cluster_address == ""


def test_the_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cloudpickle": object()}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    with pytest.raises(MissingPackage) as told:
        BaseCallback(workers_kind="ray", ray_address="10.0.0.1:6379")
    assert str(told.value).endswith(f"; run: {install_line('ray')}")
    BaseCallback(mode="observe", workers_kind="ray", ray_address="10.0.0.1:6379")  # nobody asks for it there
    found["ray"] = object()
    BaseCallback(workers_kind="ray", ray_address="10.0.0.1:6379")


# -- the CPUs of other machines --------------------------------------------------------------------------------------


def test_the_budget_has_both() -> None:
    loop = FakeLoop(FakePipeline({"parse": Work(0.01)}, FakeMachine(), depth=2))
    seen = loop.observe()
    more = dataclasses.replace(seen, resources=dataclasses.replace(seen.resources, remote_cpus=6.0))
    assert more.cpus == seen.cpus + 6.0
    wanted = {"parse": 10_000}
    here = Guard(TunerConfig()).check(wanted, seen).allocation["parse"]
    both = Guard(TunerConfig()).check(wanted, more).allocation["parse"]
    assert both > here


def members(**machines: tuple[float, float]) -> Members:
    made = Members(ranks=2)
    made._look_at({name: (name, cpus, free) for name, (cpus, free) in machines.items()})
    return made


def test_cpus_are_those_that_are_free_and_a_share_of_all() -> None:
    assert members(a=(4.0, 4.0), b=(8.0, 1.0)).cpus == 2.0 + 1.0
    seen = members(a=(4.0, 0.0), b=(0.0, 0.0))
    assert seen.cpus == 0.0
    seen._lines[1] = Line(1, seen._machines["a"], None)  # type: ignore[arg-type]
    assert seen.cpus == 1.0  # ours
    assert seen.ready == 0  # it has yet to take the dataset: no growth is judged by it
    seen._lines[1].version = 1
    assert seen.ready == 1
    seen._machines["a"].why_not = "its file is another one"
    assert seen.cpus == 0.0
    seen = members(a=(4.0, 4.0))
    seen._look_at({})  # it has left
    assert seen.cpus == 0.0


def test_of_a_new_machine_one_worker_is_tried() -> None:
    seen = members(a=(4.0, 4.0))
    machine = seen._machines["a"]
    seen._free = [Line(number, machine, None) for number in range(3)]  # type: ignore[arg-type]
    assert seen.take(0) is None  # what is to be done has not come there yet
    for line in seen._free:
        line.version = 0
    assert seen.take(0) is not None
    assert seen.take(0) is None
    machine.is_good = True
    assert seen.take(0) is not None
    machine.is_good, machine.is_tried, machine.why_not = False, False, "it differs"
    assert seen.take(0) is None


def test_workers_here_keep_the_cpus_busy_first() -> None:
    seen = members()
    seen.local_cpus = 4.0
    assert seen.most_here(own=1) == 5
    assert seen.most_here(own=7) == 7
    for _ in range(20):
        seen.worked(0.1, 0.05)
    assert seen.most_here(own=1) == 11
    for _ in range(20):
        seen.worked(0.1, 0.01)  # crowded: the largest share of late counts
    assert seen.most_here(own=1) == 11
    assert seen.longest_s == 0.1


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_messages_stay_whole_and_carry_descriptors() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    assert theirs.receive(0.0) is None
    read, write = os.pipe()
    ours.send(("first", 1), [write])
    ours.send(("second", "x" * 50_000))
    found = theirs.receive(1.0)
    assert found is not None and found[0] == ("first", 1)
    os.write(found[1][0], b"through it")
    assert os.read(read, 100) == b"through it"
    assert theirs.receive(1.0) == (("second", "x" * 50_000), [])
    for descriptor in (read, write, *found[1]):
        os.close(descriptor)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive(1.0)
    with pytest.raises(OSError):  # noqa: PT011
        theirs.send("nobody reads it")
    theirs.close()


class Start:
    told: Any = None

    def __init__(self) -> None:
        self.seed = 0

    def again(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, number: int) -> None:
        self.number = number


class Sums:
    """The work of a dataset that holds an array, and a map of a file."""

    def __init__(self, folder: Path, start: Start) -> None:
        np.arange(5000, dtype=np.int64).tofile(folder / "rows")
        self.held, self.start = np.arange(5000), start
        self.mapped = np.memmap(folder / "rows", np.int64, "r", shape=(5000,))

    def __call__(self, number: int) -> Any:
        if number < 0:
            raise ValueError("a negative number")
        if number == 7:
            self.held[0] = 1
        return self.held + self.mapped + number + self.start.seed


def answers(worker: Worker, *tasks: Any) -> list[Any]:
    """Return the answers of a worker, read as the training process reads them."""
    one, other = socket.socketpair()
    ours, theirs = Wire(Connection(one.detach()), None), Wire(Connection(other.detach()), None)
    found = []
    for task in tasks:
        theirs.write([memoryview(part) for part in worker.run(pickle.dumps((task, "told")))])
        found.append(ours.receive(lambda: True))
    ours.close()
    theirs.close()
    return found


def test_a_worker_does_what_it_was_given(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    start = Start()
    package = given.Package((Sums(tmp_path, start), start, None), None)
    assert len(package.sizes) == 2  # the array apart, and nothing of the file
    descriptor = package.file()
    parts = given.Package.parts_of(descriptor, package.sizes)
    os.close(descriptor)
    worker = Worker(3, str(tmp_path), ["/nowhere"])
    assert answers(worker, 1)[0][0] is False  # nothing was given yet
    worker.renew(parts, pickle.dumps((100,)))
    right, wrong, written = answers(worker, 2, -1, 7)
    ok, values, cpu_s = right
    assert ok and cpu_s >= 0.0 and (values == 2 * np.arange(5000) + 102).all() and values.flags.writeable
    assert not wrong[0] and isinstance(wrong[1], ValueError) and "a negative number" in wrong[2][0]
    assert not written[0] and "read-only" in str(written[1])  # all workers of a machine share it
    assert package.key() == given.Package((Sums(tmp_path, start), start, None), None).key()
    start.seed = 5
    assert package.key() != given.Package((Sums(tmp_path, start), start, None), None).key()
    sys.path.remove("/nowhere")
    os.chdir(ROOT)


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    held = Sums(tmp_path, Start())
    held.mapped = held.mapped[10:]
    with pytest.raises(TypeError, match=r"a part of a np\.memmap cannot be sent"):
        given.Package(held, None)
    with pytest.raises(TypeError, match="lock"):
        given.Package(threading.Lock(), None)


def test_images_are_of_values() -> None:
    word = "".join(["a", "b"])
    assert given.image([word, word], None) == given.image([word, "".join(["a", "b"])], None)
    assert given.image({"x": np.arange(3)}, None) != given.image({"x": np.arange(3.0)}, None)
    assert given.image(float("nan"), None) == given.image(float("nan"), None)
    held: list[Any] = []
    held.append(held)
    assert given.image(held, None)
