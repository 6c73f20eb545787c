"""The documentation as the tests see it: its pages, their code, what is written as code; and a run to speak of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from intune_callbacks import TunerConfig
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.history import History
from intune_callbacks.record.report import write_report
from intune_callbacks.session.tuner import Tuner
from tests.fakes import FakeLoop, FakeMachine, FakePipeline, Work

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")

PAGES = tuple(
    sorted(
        file.relative_to(ROOT).as_posix()
        for file in (*ROOT.glob("*.md"), *ROOT.glob("recipes/*.md"), *ROOT.glob("docs/**/*.md"))
    )
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        page: the file, seen from the project's root.
        line: its first line of code in that file.
        language: the word behind the fence, often none.
        text: what stands inside.
    """

    page: str
    line: int
    language: str
    text: str


def text_of(page: str) -> str:
    """Return a page; skip the test where there is none, as in an installed package."""
    if not (ROOT / page).exists():
        pytest.skip("the documentation is only in the repository")
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = text_of(page)
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(page, line, found.group(2), re.sub(rf"^{found.group(1)}", "", found.group(3), flags=re.MULTILINE))


def lines() -> Iterator[tuple[str, str]]:
    """Yield (place, line) of every line in a block that is not Python; one with a backslash at its end goes on."""
    for page in PAGES:
        for block in blocks(page):
            if block.language != "python":
                joined = block.text.replace("\\\n", "")
                yield from ((f"{page}:{block.line}", line) for line in joined.splitlines())


def inline(page: str) -> list[str]:
    """Return what a page's text has between backticks, line breaks as spaces."""
    return [" ".join(found.split()) for found in INLINE.findall(FENCE.sub("", text_of(page)))]


def tuned_run(folder: Path) -> None:
    """Leave behind the report and the history of a run whose `parse` was too slow."""
    machine = FakeMachine()
    loop = FakeLoop(FakePipeline({"read": Work(0.01), "parse": Work(0.1)}, machine, depth=2), model_s=0.02)
    tuner = Tuner(
        loop.pipeline, TunerConfig(), probe=machine, clock=machine.clock(), history=History(folder / "history.jsonl")
    )
    loop.run(tuner, 60)
    tuner.close()
    write_report(folder, build_report(tuner.summary()))
