"""Every block of Python in the documentation runs as it stands, and every link leads somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs_pages import PAGES, ROOT, Block, blocks, text_of, tuned_run

NEEDS = {
    "intune_callbacks.lightning": ("torch", "pytorch_lightning"),
    "intune_callbacks.keras": ("keras", "tensorflow"),
    "intune_callbacks.transformers": ("torch", "transformers", "accelerate"),
    "dlrm_examples.hybrid.lightning": ("torch", "pytorch_lightning", "torchrec"),
}
OURS = ("intune_callbacks", "dlrm_examples", "recipes", "tests")
# Lightning starts the other ranks by running the script again.
SCRIPTS = ("docs/hybrid.md",)
PYTHON = tuple(page for page in PAGES if any(block.language == "python" for block in blocks(page)))


def missing(tree: ast.Module) -> list[str]:
    """Return the packages a block needs and that are not installed."""
    needed: set[str] = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            root = name.split(".")[0]
            needed.update(NEEDS.get(name, () if root in OURS else (root,)))
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)


def names(tree: ast.Module, context: type[ast.expr_context]) -> set[str]:
    """Return the names a block reads (`ast.Load`), or binds (`ast.Store`)."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    if context is ast.Store:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return found


def given(page: str, text: str) -> dict[str, Any]:
    """Return what a block takes as given: what its reader has."""
    if page == "README.md" and "pytorch_lightning" in text:
        import pytorch_lightning

        from tests import lightning_runs

        return {"model": lightning_runs.make_model(pytorch_lightning), "loader": lightning_runs.shuffled()}
    if page == "README.md" and "intune_callbacks.transformers" in text:
        from tests import transformers_runs

        return transformers_runs.given()
    if page == "README.md" and "import live" in text:
        from tests import lightning_runs

        return {"step": lambda batch: None, "loader": lightning_runs.shuffled()}
    if page == "README.md" and "intune_callbacks.keras" in text:
        import tensorflow as tf

        from tests import keras_runs

        rows = tf.data.Dataset.range(96).map(lambda i: (tf.fill([2], tf.cast(i, tf.float32)), 0.0))
        return {"model": keras_runs.make_model(), "dataset": rows.batch(4)}
    if page == "docs/report.md":
        tuned_run(Path("runs/mine"))
    return {}


# Lightning advises the user (a logger to install, more workers); a warning of ours is a RuntimeWarning.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", [page for page in PYTHON if page not in SCRIPTS])
def test_every_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    left_out: list[str] = []
    absent: set[str] = set()
    for block in blocks(page):
        if block.language != "python":
            continue
        tree = ast.parse(block.text)
        packages = missing(tree)
        if packages or names(tree, ast.Load) & absent - set(namespace):
            left_out.append(f"line {block.line} ({', '.join(packages) or 'goes on with what was left out'})")
            absent |= names(tree, ast.Store)
            continue
        namespace |= given(page, block.text)
        run(block, namespace)
    if left_out:
        pytest.skip(f"left out: {'; '.join(left_out)}")


def run(block: Block, namespace: dict[str, Any]) -> None:
    # With as many lines before it as in the file, so that a traceback names the page's own line.
    code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec", dont_inherit=True)
    exec(code, namespace)


def test_a_script_runs_in_two_ranks(tmp_path: Path) -> None:
    page = SCRIPTS[0]
    found = [block.text for block in blocks(page) if block.language == "python"]
    assert len(found) == 1
    packages = missing(ast.parse(found[0]))
    if packages:
        pytest.skip(f"{', '.join(packages)} not installed")
    from dlrm_examples.generate import generate

    generate(tmp_path / "data", rows=1000, shards=2)
    script = tmp_path / "script.py"
    head = "import os, warnings\nfrom pathlib import Path\nwarnings.simplefilter('ignore')\n"
    head += f"files = sorted(Path({str(tmp_path / 'data')!r}).glob('*.tsv'))\n"
    script.write_text(f"{head}\n{found[0]}")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "InTune" in done.stdout


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page}: {link}"


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as Markdown processors make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_snippets_are_there(page: str) -> None:
    for file, section in re.findall(r'^--8<-- "([^":]+):?(\w*)"$', text_of(page), re.MULTILINE):
        text = text_of(file)
        assert not section or (f"[start:{section}]" in text and f"[end:{section}]" in text), f"{page}: {file}:{section}"
