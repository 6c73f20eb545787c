"""What is public is described: a sentence, arguments and errors by names that exist; in full on the API pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs_pages import ROOT, text_of

PACKAGES = ("intune_callbacks", "recipes", "dlrm_examples")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
Described = ast.FunctionDef | ast.ClassDef


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def public(tree: ast.Module) -> Iterator[Described]:
    """Yield the functions and classes that are defined in a module and named in its `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            yield from (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in names)


def parameters(node: Described) -> list[str]:
    """Return what a caller gives: arguments, or a dataclass's fields."""
    made = node
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:
            data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            fields = [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)] if data else []
            return [name for name in fields if not name.startswith("_")]
        made = inits[0]
    assert isinstance(made, ast.FunctionDef)
    given = [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs, made.args.vararg, made.args.kwarg]
    return [a.arg for a in given if a is not None and a.arg not in ("self", "cls") and not a.arg.startswith("_")]


def section(docstring: str, title: str) -> str | None:
    """Return the indented text below ``title:``, None where there is none."""
    found = re.search(rf"^{title}:\n((?: +.*\n?|\n)+)", docstring, re.MULTILINE)
    return found.group(1) if found else None


def entries(text: str) -> list[str]:
    """Return the names a section describes; one line may describe several."""
    least = min(len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip())
    heads = re.findall(rf"^ {{{least}}}(\S[^:]*?)(?: \(.*?\))?:", text, re.MULTILINE)
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


def raised(node: Described) -> set[str]:
    """Return the errors a function, or a class's `__init__`, raises by itself and does not catch."""
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__post_init__")]
        return set().union(*(raised(init) for init in inits))
    caught = {id(inner) for t in ast.walk(node) if isinstance(t, ast.Try) for s in t.body for inner in ast.walk(s)}
    nested = {id(i) for f in ast.walk(node) if isinstance(f, ast.FunctionDef) and f is not node for i in ast.walk(f)}
    errors = {
        ast.unparse(found.exc.func)
        for found in ast.walk(node)
        if isinstance(found, ast.Raise) and isinstance(found.exc, ast.Call) and id(found) not in caught | nested
    }
    return {name for name in errors if name[0].isupper()} - {"AssertionError"}  # that one says the code is wrong


def undescribed(node: Described) -> str:
    """Return what is wrong with the docstring of a public name, nothing where it is right."""
    told = ast.get_docstring(node)
    if not told:
        return "no docstring"
    sentence = told.split("\n\n")[0].rstrip()
    if not sentence.endswith((".", ":", ">")):
        return f"does not begin with a sentence: {sentence!r}"
    arguments = section(told, "Args")
    if unknown := set(entries(arguments)) - set(parameters(node)) if arguments else set():
        return f"describes what it does not take: {sorted(unknown)}"
    elsewhere = "see `" in told
    silent = set() if elsewhere else raised(node) - set(entries(section(told, "Raises") or "  :"))
    return f"does not say that it raises {', '.join(sorted(silent))}" if silent else ""


def test_public_names_are_described() -> None:
    assert len(FILES) > 100
    wrong = [
        f"{module_of(file)}.{node.name}: {why}"
        for file in FILES
        for node in public(ast.parse(file.read_text(encoding="utf-8")))
        if (why := undescribed(node))
    ]
    assert not wrong, "\n".join(wrong)


def on_api_pages() -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of the API pages and the names shown of each, none for all of `__all__`."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = text_of(page.relative_to(ROOT).as_posix())
        for module, options in re.findall(r"^::: (\S+)\n((?:    .*\n?)*)", text, re.MULTILINE):
            shown = re.search(r"members: \[(.+)\]", options)
            yield module, shown.group(1).split(", ") if shown else []


@pytest.mark.parametrize(("module", "shown"), [*on_api_pages()])
def test_api_pages_are_complete(module: str, shown: list[str]) -> None:
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))
    nodes = {node.name: node for node in public(tree)}
    assert set(shown) <= set(nodes)
    for name in shown or nodes:
        told = ast.get_docstring(nodes[name]) or ""
        wanted = parameters(nodes[name])
        described = entries(section(told, "Args") or "  :")
        left = [parameter for parameter in wanted if parameter not in described]
        assert not left, f"{module}.{name} does not describe {', '.join(left)}"
        # What is not Markdown, in Google style, comes out as a mess.
        assert not re.search(r"^ *={4}|::$|^Example:", told, re.MULTILINE), f"{module}.{name}: not Markdown"


def test_what_the_package_offers_is_on_an_api_page() -> None:
    import intune_callbacks

    shown = dict(on_api_pages())
    for name in intune_callbacks.__all__:
        if name != "__version__" and isinstance(value := getattr(intune_callbacks, name), type):
            assert value.__module__ in shown and (not shown[value.__module__] or name in shown[value.__module__]), name
