"""What the proofs share that the modes `observe` and `advise` change nothing: who lives in this process, and when."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

MODES = ("observe", "advise")


def natives() -> Counter[str]:
    """Return the threads of this process by the name the kernel knows, those of C++ libraries too."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("the threads of a process are listed in /proc, which is not here")
    names: Counter[str] = Counter()
    for task in tasks.iterdir():
        try:
            names[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return names


Alive = tuple[dict[str, int], dict[str, int], int]


class Census:
    """The most of each kind that were alive at once: native threads, Python's threads, child processes."""

    def __init__(self) -> None:
        self.native: Counter[str] = Counter()
        self.python: Counter[str] = Counter()
        self.children = 0

    def take(self) -> None:
        self.native |= natives()
        # Many are called Thread-<number>.
        self.python |= Counter(thread.name.split("-")[0] for thread in threading.enumerate())
        self.children = max(self.children, len(multiprocessing.active_children()))

    def told(self) -> Alive:
        return dict(self.native), dict(self.python), self.children


def beyond(ours: Alive, off: Alive) -> dict[str, int]:
    """Return what was alive beyond what was without us; what earlier tests left may have ended meanwhile."""
    more = (Counter(ours[0]) - Counter(off[0])) + (Counter(ours[1]) - Counter(off[1]))
    return dict(more) | ({"children": ours[2] - off[2]} if ours[2] > off[2] else {})


def settled(most: int, within_s: float = 10.0) -> int:
    """Return how many native threads are alive once they are no more than `most`, or the time is over."""
    deadline = time.monotonic() + within_s
    while (alive := sum(natives().values())) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def allocations(run_dir: Path) -> set[str]:
    """Return each allocation a run had, at any decision, before or after it."""
    lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    assert len(lines) >= 5, "too few decisions to prove anything"
    assert not any(line["applied"] for line in lines)
    return {json.dumps(line[side], sort_keys=True) for line in lines for side in ("before", "after")}
