"""Who lacks an optional package is told a line of pip that works: one that names what the extra brings."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from intune_callbacks.doctor import PACKAGES
from intune_callbacks.errors import MissingPackage, install_line, lower_bounds, requirements
from tests.docs_pages import ROOT, text_of

OURS, FOLDERS = "intune-callbacks", ("intune_callbacks", "recipes", "dlrm_examples", "benchmarks")
# What is not there -> what is tried, and the line that must be told.
TRIED = {
    ("pytorch_lightning", "lightning"): ("import intune_callbacks.lightning", "lightning"),
    ("keras",): ("import intune_callbacks.keras", "keras"),
    ("tensorflow",): ("from intune_callbacks.pipelines.tf import build; build.build()", "tensorflow"),
    ("torch",): ("import intune_callbacks.pretrain.training", "lightning"),
    ("numba",): ("import dlrm_examples.criteo.kernel", "criteo"),
    ("pyarrow",): ("import dlrm_examples.criteo.parquet", "criteo"),
    ("xxhash",): ("import dlrm_examples.criteo.packed", "criteo"),
    ("zstandard",): (
        "from dlrm_examples.convert import convert; convert(__import__('os').devnull, '.', 'zstd')",
        "criteo",
    ),
    ("yaml",): (
        "from dlrm_examples.recipes import config, source; config.load(source('dlrm-keras'))",
        "dlrm",
    ),
    ("keras", "tensorflow"): ("import dlrm_examples.recipes.keras_runner", "dlrm-keras"),
    ("plotly",): ("from intune_callbacks.show.page.html import check_packages; check_packages()", "report"),
    ("jinja2",): ("from intune_callbacks.show.page.html import check_packages; check_packages()", "report"),
}


def extras() -> dict[str, list[str]]:
    tomllib = pytest.importorskip("tomllib")
    return dict(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])


def brought(extra: str) -> set[str]:
    """Return the packages an extra installs, those of the extras inside it as well."""
    found: set[str] = set()
    for requirement in extras()[extra]:
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        found |= set().union(*(brought(part) for part in inner.split(","))) if name == OURS else {name.lower()}
    return found


def raised() -> Iterator[tuple[str, str | None, str]]:
    """Yield (place, package, extra) of each `MissingPackage` in the code; the package is None where it is computed."""
    for file in (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingPackage":
                package, extra = node.args
                known = ast.literal_eval(package) if isinstance(package, ast.Constant) else None
                yield f"{file.relative_to(ROOT)}:{node.lineno}", known, ast.literal_eval(extra)


@pytest.mark.parametrize(("place", "package", "extra"), [*raised()])
def test_the_extra_holds_the_package(place: str, package: str | None, extra: str) -> None:
    assert extra in extras(), place
    assert package is None or re.split(r"[<>=]", package)[0].lower() in brought(extra), place
    line = str(MissingPackage(package or "x", extra)).partition("; run: ")[2]
    command, *words = shlex.split(line)[3:]
    assert command == "install" and {re.split(r"[<>=]", word)[0] for word in words} == brought(extra), place


@pytest.mark.parametrize(("names", "extra"), [(names, extra) for names, _, extra in PACKAGES])
def test_the_doctors_lines_bring_the_package(names: tuple[str, ...], extra: str) -> None:
    assert brought(extra) & set(names)


@pytest.mark.parametrize("absent", TRIED, ids="+".join)
def test_the_line_is_told(absent: tuple[str, ...], tmp_path: Path) -> None:
    statement, extra = TRIED[absent]
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in absent)
    code = f"import sys; {hidden}\ntry:\n    exec({statement!r})\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip().endswith(f"; run: {install_line(extra)}")


def test_the_bounds_are_those_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    asked = {*project["dependencies"], *itertools.chain(*extras().values())}
    outside = {line for line in asked if not line.startswith(OURS)}
    assert {f"{name}>={oldest}" for name, oldest in lower_bounds().items()} == outside
    assert {f"{name}{bounds}" for name, bounds in requirements().items()} == set(project["dependencies"])


def test_without_metadata_the_line_is_that_of_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intune_callbacks.errors.NAME", "no-such-package")
    assert install_line("report") == "python -m pip install '.[report]'"
    assert not lower_bounds()


def test_every_extra_is_asked_for() -> None:
    asked = {extra for _, _, extra in raised()} | {extra for _, _, extra in PACKAGES}
    assert asked == set(extras())
