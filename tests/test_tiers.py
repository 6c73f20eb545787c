"""The list of slow tests names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_slow_test_is_there() -> None:
    names = [line.split(" ")[0] for line in (FOLDER / "slow.txt").read_text().splitlines() if line[:1] != "#"]
    assert len(set(names)) == len(names) > 100
    unknown = []
    for name in names:
        file, _, function = name.partition("::")
        source = FOLDER / file
        if not source.exists() or not re.search(rf"^ *def {function}\(", source.read_text(), re.M):
            unknown.append(name)
    assert unknown == []
