"""What a module says it offers is what it offers, and the version is the one the changelog speaks of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import intune_callbacks

ROOT = Path(intune_callbacks.__file__).parent.parent
FILES = sorted(f for part in ("intune_callbacks", "recipes", "dlrm_examples") for f in (ROOT / part).rglob("*.py"))


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def bound(tree: ast.Module) -> set[str]:
    """Return the names a module binds at its top level."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names


def wrong(file: Path) -> str:
    """Return what is wrong with a module's `__all__`, nothing where it is right."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = exported(tree)
    if names is None:
        if file.name not in ("__init__.py", "__main__.py"):
            return "no __all__"
        does_something = file.name == "__init__.py" and len(tree.body) > 1
        return "an __init__ that does something needs __all__" if does_something else ""
    if len(names) > len(set(names)):  # ruff keeps it sorted
        return "__all__ names something twice"
    return "" if set(names) <= bound(tree) else "__all__ names what is not there"


def test_all_is_reality() -> None:
    assert len(FILES) > 100
    assert not {file.relative_to(ROOT).as_posix(): why for file in FILES if (why := wrong(file))}


def test_no_module_uses_what_another_keeps_to_itself() -> None:
    trees = {".".join(f.relative_to(ROOT).with_suffix("").parts): ast.parse(f.read_text("utf-8")) for f in FILES}
    offered = {name.removesuffix(".__init__"): set(exported(tree) or ()) for name, tree in trees.items()}
    taken = [
        f"{name} takes {alias.name} from {node.module}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in offered
        for alias in node.names
        if alias.name not in offered[node.module] and f"{node.module}.{alias.name}" not in offered
    ]
    assert not taken


def test_version_is_the_changelogs() -> None:
    changelog = ROOT / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("the changelog is only in the repository")
    head = re.search(r"^## \[(.+?)\]", changelog.read_text(encoding="utf-8"), re.MULTILINE)
    assert head
    assert head.group(1) == intune_callbacks.__version__
