"""`intune doctor`: what is there, what is missing, and the line that mends it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
from fakes import GB, MACHINE

from intune_callbacks import cli
from intune_callbacks.doctor import Finding, examine, text
from intune_callbacks.errors import MissingPackage, install_line
from intune_callbacks.types import Resources

BUILT, POSSIBLE, IMPOSSIBLE = (True, True), (False, True), (False, False)
ALL = dict.fromkeys(
    (
        "torch",
        "torchdata",
        "lightning",
        "keras",
        "transformers",
        "tensorflow-cpu",
        "nvidia-ml-py",
        "numba",
        "plotly",
        "rich",
        "ray",
    ),
    "1.2.3",
)
OLDEST = {"torch": "1.2", "pytorch-lightning": "1.2.3", "tensorflow": "1", "plotly": "1.1", "shtab": "6.0"}


class Fixed:
    def __init__(self, resources: Resources) -> None:
        self.resources = resources

    def read(self) -> Resources:
        return self.resources


def findings(
    installed: Mapping[str, str] = ALL, library: tuple[bool, bool] = BUILT, resources: Resources = MACHINE
) -> dict[str, Finding]:
    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    return {f.name: f for f in examine(Fixed(resources), version_of, lambda: library, OLDEST)}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_the_cluster_that_is_named_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def cluster(address: str) -> Finding:
        asked.append(address)
        return Finding("Ray cluster", "ok", "2 other machines")

    examine(Fixed(MACHINE), lambda package: "1.2.3", lambda: BUILT, OLDEST, cluster)
    assert asked == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = examine(Fixed(MACHINE), lambda package: "1.2.3", lambda: BUILT, OLDEST, cluster)
    assert asked == ["10.0.0.1:6379"] and found[-1].says == "2 other machines"


def test_all_is_well() -> None:
    found = findings()
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["pytorch-lightning"].says.startswith("lightning 1.2.3")
    assert found["tensorflow"].says.startswith("tensorflow-cpu 1.2.3")


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("torch", "torch", "lightning"),
        ("lightning", "pytorch-lightning", "lightning"),
        ("keras", "keras", "keras"),
        ("transformers", "transformers", "transformers"),
        ("tensorflow-cpu", "tensorflow", "tensorflow"),
        ("nvidia-ml-py", "nvidia-ml-py", "gpu"),
        ("numba", "numba", "criteo"),
        ("plotly", "plotly", "report"),
        ("rich", "rich", "report"),
    ],
)
def test_what_is_missing_comes_with_its_line_of_pip(package: str, name: str, extra: str) -> None:
    found = findings({key: value for key, value in ALL.items() if key != package})
    assert found[name].state == "missing"
    assert found[name].remedy == install_line(extra)
    assert [f.name for f in found.values() if f.state == "missing"] == [name]
    assert ("tf.data operations" in found) == (package != "tensorflow-cpu")


@pytest.mark.parametrize(
    ("package", "given", "name", "is_old"),
    [
        ("torch", "1.1.9+cpu", "torch", True),
        ("torch", "1.2.0+cpu", "torch", False),
        ("torch", "1.10", "torch", False),
        ("lightning", "1.2.2", "pytorch-lightning", True),
        ("lightning", "1.2.3rc1", "pytorch-lightning", False),
        ("tensorflow-cpu", "0.9", "tensorflow", True),
        ("plotly", "1.0.9", "plotly", True),
        ("shtab", "5.24.1", "shtab", True),
        ("shtab", "6.0.0", "shtab", False),
    ],
)
def test_what_is_too_old_comes_with_its_line_of_pip(package: str, given: str, name: str, is_old: bool) -> None:
    found = findings(ALL | {package: given})
    assert [f.name for f in found.values() if f.state != "ok"] == [name] * is_old
    if is_old:
        assert f"{package} {given}" in found[name].says and f"{OLDEST[name]} is the oldest" in found[name].says
        assert found[name].remedy == f"python -m pip install '{package}>={OLDEST[name]}'"


@pytest.mark.parametrize(
    ("library", "state", "word"),
    [(BUILT, "ok", "compiled"), (POSSIBLE, "ok", "beside the first fit"), (IMPOSSIBLE, "limited", "no compiler")],
)
def test_the_compiled_operations(library: tuple[bool, bool], state: str, word: str) -> None:
    found = findings(library=library)["tf.data operations"]
    assert (found.state, word in found.says) == (state, True)
    assert (found.remedy is None) == (library == BUILT)


def test_a_tensorflow_that_does_not_import_is_told() -> None:
    def library() -> tuple[bool, bool]:
        raise ImportError("libsomething.so: cannot open")

    found = {f.name: f for f in examine(Fixed(MACHINE), lambda package: "1", library, {})}["tf.data operations"]
    assert found.state == "missing" and "libsomething.so" in found.says
    assert isinstance(MissingPackage("tensorflow", "tensorflow"), ImportError)


def test_a_small_container() -> None:
    small = replace(MACHINE, cpus=0.5, memory_limit_bytes=int(0.5 * GB), shm_free_bytes=64 << 20)
    found = findings(resources=small)
    assert {name for name, finding in found.items() if finding.state == "limited"} == {"CPUs", "shared memory"}
    assert "limit of the container" in found["memory"].says
    assert "--shm-size" in str(found["shared memory"].remedy)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_start_method_and_what_a_worker_then_holds(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [method])
    told = findings()["start method"]
    assert told.state == "ok" and told.says.startswith(f"{method} by default: ")
    assert ("copies" in told.says) == (method == "fork")


def test_text_has_a_line_for_each_and_the_remedies() -> None:
    lines = text([Finding("a", "ok", "good"), Finding("bcd", "missing", "gone", "pip install it")]).splitlines()
    assert lines == [
        "ok       a    good",
        "missing  bcd  gone",
        "              pip install it",
        "",
        "1 ok, 0 limited, 1 missing",
    ]


def test_text_fits_a_terminal_and_what_is_to_be_pasted_stays_whole() -> None:
    paste = "python -m pip install " + 9 * "'accelerate>=0.34' "
    first, *rest = text([Finding("start method", "limited", 30 * "some word ", paste)]).splitlines()
    assert first.startswith("limited  start method  some word") and len(first) <= 80
    assert all(len(line) <= 80 and line.startswith(23 * " ") for line in rest[:4])
    assert 23 * " " + paste in rest


def test_the_command_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "for the input pipeline" in printed and "GB used" in printed
