"""The reference pages name what the code has, and nothing else: variables, metrics, modes, switches, messages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from intune_callbacks.config import MODES, POLICIES, TunerConfig
from intune_callbacks.session.arguments import BaseCallback
from intune_callbacks.session.metrics import metrics
from tests.docs_pages import ROOT, inline, text_of, tuned_run
from tests.fakes import FakeLoop, FakeMachine, FakePipeline, Work

VARIABLE = re.compile(r"INTUNE_[A-Z]+(?:_[A-Z]+)*")
SHORTEST = 12
PACKAGES = ("intune_callbacks", "recipes", "dlrm_examples")


@functools.cache
def constants(*folders: str) -> tuple[str, ...]:
    """Return every string in the code of some folders, the parts of an f-string one by one; docstrings left out."""
    found: list[str] = []
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
        ]
    return tuple(found)


def rows(page: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a title."""
    section = re.split(r"^#+ ", text_of(page).split(f"# {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in table[2:]]


def first_codes(page: str, title: str) -> list[str]:
    """Return what the first column of a table has between backticks."""
    return [code for cells in rows(page, title) for code in re.findall(r"`([^`]+)`", cells[0])]


def test_variables_of_ours() -> None:
    used = {text for text in constants(*PACKAGES, "benchmarks", "tests") if VARIABLE.fullmatch(text)}
    told = {name for code in inline("docs/environment.md") for name in VARIABLE.findall(code)}
    assert told == used


def test_variables_of_others() -> None:
    read = set()
    for file in (file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py")):
        read |= set(re.findall(r'environ(?:\.\w+)?[(\[]"([A-Z_]+)"', file.read_text(encoding="utf-8")))
    assert read
    assert read <= set(inline("docs/environment.md"))


@functools.cache
def logged() -> frozenset[str]:
    """Return the keys of all that is logged, with <stage> for a stage's name."""
    loop = FakeLoop(FakePipeline({"parse": Work(0.01)}, FakeMachine(), depth=2))
    seen = loop.observe()
    stages = (dataclasses.replace(s, delivering=1) if s.unit == "workers" else s for s in seen.stages)
    seen = dataclasses.replace(seen, exposed_wait_frac=0.1, stages=tuple(stages))
    return frozenset(re.sub(r"/(parse|prefetch)$", "/<stage>", key) for key in metrics(seen))


def keys_in(text: str) -> set[str]:
    return set(re.findall(r"intune/[a-z_]+(?:/<stage>)?", text))


def test_metrics() -> None:
    assert set(first_codes("docs/metrics.md", "Metrics")) == logged()


def test_no_other_metric_is_spoken_of() -> None:
    whole = logged() | {key.removesuffix("/<stage>") for key in logged()}
    assert keys_in(" ".join(constants("intune_callbacks"))) - {"intune/"} <= whole
    assert keys_in(text_of("README.md")) <= whole


def callback(module: str) -> ast.ClassDef:
    """Return the source of a framework's callback; it need not be installed."""
    tree = ast.parse((ROOT / "intune_callbacks" / f"{module}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "InTuneCallback"]
    return found


@pytest.mark.parametrize("module", ["lightning", "keras"])
def test_metrics_of_the_docstrings(module: str) -> None:
    assert keys_in(str(ast.get_docstring(callback(module)))) == logged()


def test_modes_and_policies() -> None:
    assert first_codes("README.md", "Modes") == [*MODES]
    assert first_codes("docs/modes.md", "Policies") == [*POLICIES]


def test_switches() -> None:
    listed = {cells[0].strip("`"): cells[1].strip("`") for cells in rows("docs/modes.md", "Switches")}
    fields = {field.name: field.default for field in dataclasses.fields(TunerConfig)}
    for name, default in fields.items():
        assert name in listed, f"{name} is not on the page"
        told = listed[name]
        assert told == ("none" if default is None else str(default)) or float(told) == default, name


def test_switches_are_the_callbacks_arguments() -> None:
    listed = {cells[0].strip("`") for cells in rows("docs/modes.md", "Switches")}
    assert listed == set(inspect.signature(BaseCallback.__init__).parameters) - {"self"}


def messages() -> Iterator[str]:
    text = text_of("docs/troubleshooting.md")
    for line in text.splitlines():
        found = re.match(r"\| `([^`]+)` \|", line) or re.match(r"\*\*`([^`]+)`", line)
        if found:
            yield found.group(1)


def test_every_message_is_one_the_code_has() -> None:
    code = "\n".join(constants(*PACKAGES))
    told = list(messages())
    assert len(told) > 30
    for message in told:
        parts = [part.strip(" ;,:") for part in message.split("…")]
        long = [part for part in parts if len(part) >= SHORTEST]
        assert long, f"{message}: nothing to recognise it by"
        for part in long:
            assert part in code, f"{message!r}: no part of the code says {part!r}"


def test_keys_of_the_files(tmp_path: Path) -> None:
    tuned_run(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    # What only some runs have is put in by the callbacks.
    sometimes = {"pipeline", "ranks", "warm_start"}
    assert set(first_codes("docs/report.md", "report.json")) == set(report) | sometimes
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert set(first_codes("docs/report.md", "history.jsonl")) == set(history[0])
    assert sometimes <= set(constants("intune_callbacks"))
