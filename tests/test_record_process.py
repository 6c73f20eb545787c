"""Whether the process that wrote a history is still there: certain, or not said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from intune_callbacks.record import process
from intune_callbacks.record.process import is_gone, this_process

pytestmark = pytest.mark.skipif(this_process() is None, reason="no /proc")


def test_only_a_process_that_is_gone_is_gone() -> None:
    mine: Any = this_process()
    assert not is_gone(mine)
    assert is_gone(mine | {"begun": "1"})  # its number was given to another one
    assert not is_gone(mine | {"machine": "another", "begun": "1"})
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_gone(mine | {"pid": ended.pid})


@pytest.mark.parametrize("written", [None, 7, {}, {"pid": True}, {"pid": -1}, {"pid": 1 << 40}, {"pid": "1"}])
def test_what_is_not_known_is_not_gone(written: Any) -> None:
    mine: Any = this_process()
    assert not is_gone(mine | written if isinstance(written, dict) and written else written)


def test_without_proc_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine: Any = this_process()
    monkeypatch.setattr(process, "PROC", tmp_path)
    process._named.cache_clear()
    assert this_process() is None and not is_gone(mine | {"begun": "1"})
    process._named.cache_clear()
