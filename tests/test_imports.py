"""Data flows one way, each framework has one home, and the package itself is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import intune_callbacks

ROOT = Path(intune_callbacks.__file__).parent
MODULES = {
    ".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in ROOT.rglob("*.py") if f != ROOT / "__init__.py"
}

# A part may import the parts of lower levels, and its own modules.
LEVELS = {
    "installing": -1,
    "errors": 0,
    "types": 1,
    "config": 1,
    "files": 1,
    "fingerprint": 1,
    "spelling": 1,
    "advice": 2,
    "pipelines": 2,
    "monitor": 3,
    "agent": 4,
    "guard": 4,
    "history": 4,
    "course": 4,
    "permit": 4,
    "net": 5,
    "tuner": 6,
    "sim": 6,
    "findings": 6,
    "follow": 6,
    "whole": 6,
    "watch_view": 7,
    "watch": 8,
    "report": 7,
    "card": 8,
    "ranks": 7,
    "doctor": 7,
    "saved": 7,
    "page": 8,
    "fit": 9,
    "lightning": 10,
    "keras": 10,
    "cli": 10,
}
# Policies, monitor and guard know the protocol of a pipeline, never an adapter.
ONLY_THE_PROTOCOL = ("monitor", "agent", "guard", "history", "course")
TORCH = {module for module in MODULES if module.startswith("pipelines.torch")} | {"pipelines.find", "monitor.device"}
# Learning needs torch; deciding needs numpy only.
LEARNING = {"agent.learner", "sim.pretrain", "sim.lessons"} | {
    module for module in MODULES if module.startswith("agent.online")
}
LIGHTNING = {module for module in MODULES if module.startswith("lightning")}
FRAMEWORKS = {
    "torch": TORCH | LEARNING | LIGHTNING,
    "torchdata": {"pipelines.torchdata", "pipelines.torchdata_nodes"},
    "pytorch_lightning": LIGHTNING,
    "lightning": LIGHTNING,
    "keras": {"keras"},
    "tensorflow": {module for module in MODULES if module.startswith("pipelines.tf")},
    "pynvml": {"monitor.device"},
    "plotly": {"page.html"},
}


def part_of(module: str) -> str:
    """Return the first folder or file of a module's name; a callback and its helpers keras_*.py are one part."""
    part = module.split(".")[0]
    return part.split("_")[0] if part.startswith(("lightning_", "keras_")) else part


def imported(module: str) -> Iterator[str]:
    """Yield every module that `module` imports, also inside functions; type-checking imports count too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import on line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_to_lower_levels(module: str) -> None:
    part = part_of(module)
    for name in imported(module):
        if not name.startswith("intune_callbacks."):
            continue
        target = part_of(name.removeprefix("intune_callbacks."))
        if target not in LEVELS:  # a name of the package itself, such as __version__
            assert LEVELS[part] > LEVELS["report"], f"{module} imports {name} from the package's front"
        else:
            assert target == part or LEVELS[target] < LEVELS[part], f"{module} imports {name}: against the flow"
        if part in ONLY_THE_PROTOCOL and target == "pipelines":
            assert name.startswith("intune_callbacks.pipelines.base"), f"{module} imports the adapter {name}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_frameworks_are_imported_in_their_own_module_only(module: str) -> None:
    foreign = {name for name in imported(module) if module not in FRAMEWORKS.get(name.split(".")[0], {module})}
    assert not foreign


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_package_does_not_know_what_is_built_upon_it(module: str) -> None:
    above = {"recipes", "dlrm_examples", "benchmarks", "tests"}
    assert not above & {name.split(".")[0] for name in imported(module)}


def test_package_imports_fast_and_without_frameworks() -> None:
    code = (
        "import sys, time; begin = time.perf_counter(); import intune_callbacks; "
        "print(time.perf_counter() - begin, *{name.split('.')[0] for name in sys.modules})"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split() for _ in range(3)]
    loaded = {"torch", "torchdata", "lightning", "pytorch_lightning", "pynvml", "keras", "tensorflow", "ray", "plotly"}
    assert not loaded & set(runs[0][1:])
    assert min(float(run[0]) for run in runs) < 0.2
