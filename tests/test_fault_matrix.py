"""Every adapter, fault and moment: samples as stock or an error in its place, and nothing left behind.

The cells and what they promise are in docs/reliability.md, which a test compares with this file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

from fault_runs import (
    ADAPTERS,
    BOUND_S,
    EPOCH,
    EPOCHS,
    ITEMS,
    MOMENTS,
    NTH,
    OF_ITEMS,
    OF_PROCESSES,
    OF_SYSTEM,
    PLAN,
    epochs,
    in_its_place,
    refuse,
    run,
)

pytestmark = pytest.mark.filterwarnings("ignore")
USED: set[str] = set()


@pytest.fixture(autouse=True)
def _plan(request: pytest.FixtureRequest) -> Iterator[None]:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name and name not in USED:
        USED.add(name)
        list(epochs(ADAPTERS[name], 0))  # the first use opens what stays open
    yield
    PLAN.update(at=None, what="")
    EPOCH.value = 0


@pytest.mark.parametrize("name", ADAPTERS)
def test_without_a_fault_all_is_there(name: str) -> None:
    assert run(ADAPTERS[name]) == [list(range(ITEMS))] * EPOCHS


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", [*OF_ITEMS, *OF_PROCESSES])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_fault_of_one_item(name: str, what: str, moment: str) -> None:
    adapter = ADAPTERS[name]
    if what in OF_PROCESSES and not adapter.forks:
        pytest.skip("the item is computed in this process")
    if what not in ("raise", "slow") and moment == "first" and "DataLoader" in name:
        pytest.skip("it comes from the stock loader, which may hang")
    PLAN.update(at=MOMENTS[moment], what=what)
    epoch, at = MOMENTS[moment]
    seen = run(adapter)
    for number, delivered in enumerate(seen):
        if number != epoch or what == "slow":
            # Where stock kept workers died, the loader is of no more use; it says so at each batch.
            assert delivered == list(range(ITEMS)) or (
                what == "kill" and "kept" in name and all(isinstance(value, str) for value in delivered)
            )
        elif what == "stop" and "DataLoader" in name:
            assert delivered == list(range(at)), delivered  # as in a stock loader the epoch ends there
        else:
            assert in_its_place(delivered, at), delivered


@pytest.mark.parametrize("nth", NTH)
@pytest.mark.parametrize("what", OF_SYSTEM)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "tf.data"])
def test_a_fault_of_the_system(name: str, what: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ADAPTERS[name]
    if what != "thread" and not adapter.forks:
        pytest.skip("no process is started")
    refuse(monkeypatch, what, nth)
    seen = run(adapter, seed=nth)
    if what == "memory":
        lost = [(epoch, at) for epoch, part in enumerate(seen) for at, v in enumerate(part) if isinstance(v, str)]
        assert len(lost) <= 1
        for epoch, at in lost:
            assert seen[epoch][at] == "MemoryError" and in_its_place(seen[epoch], at)
            del seen[epoch]
        assert seen == [list(range(ITEMS))] * len(seen)
        return
    assert seen == [list(range(ITEMS))] * EPOCHS


HANGS = """
import multiprocessing, os, sys, time, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import fault_runs as matrix
adapter = matrix.ADAPTERS[sys.argv[2]]
matrix.PLAN.update(at=(1, 5), what="hang")
source = adapter.make()
pipeline = matrix.find(source, **adapter.options).pipeline
pipeline.prepare()
for matrix.EPOCH.value in range(2):
    iterator = pipeline.adopt(iter(source))
    for number in range(matrix.ITEMS if matrix.EPOCH.value == 0 else 5):
        assert int(next(iterator)) == number
        pipeline.resize({stage.name: 3 for stage in pipeline.stages() if stage.unit == "workers"})
    if matrix.EPOCH.value == 0:
        assert next(iterator, None) is None
begin_s = time.monotonic()
pipeline.close()
print(time.monotonic() - begin_s, len(multiprocessing.active_children()), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "tf.data"])
def test_a_worker_that_hangs_is_not_waited_for_at_the_end(name: str) -> None:
    """In a process of its own: threads that hang stay for as long as they do."""
    command = [sys.executable, "-c", HANGS, str(Path(__file__).parent), name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    took_s, children = run.stdout.split()
    if ADAPTERS[name].forks:
        assert float(took_s) < 8.0
        assert int(children) == 0
    else:
        assert float(took_s) < BOUND_S


def test_the_page_lists_the_matrix() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reliability.md").read_text()
    for word in (*OF_ITEMS, *OF_PROCESSES, *OF_SYSTEM, *ADAPTERS, *MOMENTS):
        assert re.search(rf"`{re.escape(word)}`", text), word
