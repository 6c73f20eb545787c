"""Data flows one way, each framework has one home, and the package itself is light."""

from __future__ import annotations

import ast
import graphlib
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
    "errors": 0,
    "types": 1,
    "config": 1,
    "words": 1,
    "pipelines": 2,
    "measure": 3,
    "cache": 4,
    "decide": 4,
    "guard": 4,
    "record": 5,
    "pretrain": 6,
    "show": 7,
    "doctor": 7,
    "service": 7,
    "session": 8,
    "lightning": 9,
    "keras": 9,
    "transformers": 9,
    "cli": 9,
    "__main__": 10,
}
# Within `pipelines`: the contracts and what all adapters share, the workers, the adapters, the choice among them.
OF_PIPELINES = {"workers": 1, "ray": 2, "torch": 3, "tf": 3, "grain_threads": 3, "pydataset": 4, "find": 5}
# Of the examples, the lower ones first.
FOLDERS = ("criteo", "models", "hybrid", "plan", "oracle")
# They know the protocol of a pipeline, never an adapter.
ONLY_THE_PROTOCOL = ("measure", "decide", "guard", "record")
TORCH = {module for module in MODULES if module.startswith("pipelines.torch")} | {"pipelines.find", "measure.device"}
# Learning needs torch; deciding needs numpy only.
LEARNING = {"decide.learner", "pretrain.training", "pretrain.lessons"} | {
    module for module in MODULES if module.startswith("decide.online")
}
LIGHTNING = {module for module in MODULES if module.startswith(("lightning", "session.lightning"))}
FRAMEWORKS = {
    "torch": TORCH | LEARNING | LIGHTNING,
    "torchdata": {"pipelines.torch.torchdata", "pipelines.torch.torchdata_nodes"},
    "pytorch_lightning": LIGHTNING,
    "lightning": LIGHTNING,
    "keras": {"keras"},
    "tensorflow": {module for module in MODULES if module.startswith("pipelines.tf")} | {"session.tf_fetches"},
    "transformers": {"transformers"},
    "ray": {"pipelines.ray.bridge", "pipelines.ray.actor"},
    "cloudpickle": {"pipelines.ray.given"},
    "pynvml": {"measure.device"},
    "plotly": {"show.page.html"},
    "jinja2": {"show.page.html"},
}


def part_of(module: str) -> str:
    """Return the first folder or file of a module's name."""
    return module.split(".")[0]


def imported(file: Path) -> Iterator[str]:
    """Yield every module that a file imports, also inside functions; type-checking imports count too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # The recipes have another name where they are installed.
            allowed = file.parent == ROOT.parent / "recipes"
            assert node.level <= allowed, f"{file}: relative import on line {node.lineno}"
            module = ".".join([*["recipes"] * node.level, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def against_the_flow(module: str) -> Iterator[str]:
    part = part_of(module)
    for name in imported(MODULES[module]):
        if not name.startswith("intune_callbacks."):
            continue
        target = part_of(name.removeprefix("intune_callbacks."))
        if target not in LEVELS:  # a name of the package itself, such as __version__
            right = LEVELS[part] > LEVELS["record"]
        else:
            right = target == part or LEVELS[target] < LEVELS[part]
        if part in ONLY_THE_PROTOCOL and target == "pipelines":
            right = name.startswith("intune_callbacks.pipelines.base")
        if not right:
            yield f"{module} imports {name}"


def test_imports_point_to_lower_levels() -> None:
    assert len(MODULES) > 80
    assert not [wrong for module in MODULES for wrong in against_the_flow(module)]


def test_adapters_import_what_is_below_them() -> None:
    def room(module: str) -> str:
        return module.split(".")[1]

    folder = [module for module in MODULES if module.startswith("pipelines.")]
    assert {room(module) for module in folder} >= set(OF_PIPELINES)
    for module in folder:
        for name in imported(MODULES[module]):
            if not name.startswith("intune_callbacks.pipelines."):
                continue
            target = room(name.removeprefix("intune_callbacks."))
            below = OF_PIPELINES.get(target, 0) < OF_PIPELINES.get(room(module), 0)
            assert target == room(module) or below or not OF_PIPELINES.get(target, 0), f"{module} imports {name}"


def test_frameworks_are_imported_in_their_own_module_only() -> None:
    assert not [
        f"{module} imports {name}"
        for module in MODULES
        for name in imported(MODULES[module])
        if module not in FRAMEWORKS.get(name.split(".")[0], {module})
    ]


def test_the_package_does_not_know_what_is_built_upon_it() -> None:
    above = {"recipes", "dlrm_examples", "benchmarks", "tests"}
    assert not [module for module in MODULES if above & {name.split(".")[0] for name in imported(MODULES[module])}]


@pytest.mark.parametrize("package", ["dlrm_examples", "recipes"])
def test_what_is_built_upon_it_has_no_circle(package: str) -> None:
    files = (ROOT.parent / package).rglob("*.py")
    modules = {".".join(f.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in files}
    # `from a import b` imports the module a.b, or a name of the module a.
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imported(file)} & set(modules)
        for module, file in modules.items()
    }
    assert len(graph) > 10
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


@pytest.mark.parametrize("level", range(1, 1 + len(FOLDERS)))
def test_the_folders_of_the_examples_import_lower_ones(level: int) -> None:
    lower = tuple(f"dlrm_examples.{folder}." for folder in FOLDERS[:level])
    for file in (ROOT.parent / "dlrm_examples" / FOLDERS[level - 1]).rglob("*.py"):
        assert not [
            f"{file}: {name}" for name in imported(file) if name.startswith("dlrm") and not name.startswith(lower)
        ]


def test_package_imports_fast_and_without_frameworks() -> None:
    code = (
        "import sys, time; begin = time.process_time(); import intune_callbacks; "
        "print(time.process_time() - begin, *{name.split('.')[0] for name in sys.modules})"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split() for _ in range(3)]
    loaded = {"torch", "torchdata", "lightning", "pytorch_lightning", "pynvml", "keras", "tensorflow", "ray", "plotly"}
    loaded |= {"jinja2"}
    assert not loaded & set(runs[0][1:])
    assert min(float(run[0]) for run in runs) < 0.2


def test_the_tiers_name_files_that_are_there() -> None:
    import conftest

    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert files >= conftest.CAMPAIGN | conftest.CORE
    assert not conftest.CAMPAIGN & conftest.CORE
