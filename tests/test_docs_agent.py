"""docs/agent.md says of the agent's state what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import intune_callbacks
from intune_callbacks.config import POLICIES
from intune_callbacks.decide.features import OF_PIPELINE, OF_SLOT

DOC = Path(intune_callbacks.__file__).parent.parent / "docs" / "agent.md"


@pytest.fixture(scope="module")
def text() -> str:
    if not DOC.exists():
        pytest.skip("the documentation is only in the repository")
    return DOC.read_text(encoding="utf-8")


@pytest.mark.parametrize(("title", "rows"), [("Of every slot", OF_SLOT), ("Of the pipeline", OF_PIPELINE)])
def test_tables_of_the_state_are_the_features(text: str, title: str, rows: tuple[str, ...]) -> None:
    section = re.split(r"^#+ ", text.split(f"### {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^\| (\d+) \| (.+) \|$", section, re.MULTILINE)
    assert found == [(str(i), row) for i, row in enumerate(rows)]


def test_every_policy_is_named(text: str) -> None:
    assert re.findall(r'InTuneCallback\(policy="([a-z-]+)"\)', text) == list(POLICIES)


def test_links_lead_somewhere(text: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links and all((DOC.parent / link).exists() for link in links)
