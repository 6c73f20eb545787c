"""Loaders with ``workers_kind="ray"`` where there is no cluster, and those that know nothing of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import intune_callbacks

ROOT = Path(intune_callbacks.__file__).parent.parent
OF_OTHERS = """
import torch.utils.data as data
from intune_callbacks.pipelines.find import find
loader = data.DataLoader(range(8), num_workers=1)
found = find(loader, workers_kind="process")
found.pipeline.prepare()
assert list(map(int, loader)) == list(range(8))
found.pipeline.close()"""


@pytest.mark.parametrize(
    "statement", ["import intune_callbacks.pipelines.find", "import intune_callbacks.session.live", OF_OTHERS]
)
def test_nobody_else_imports_anything_of_it(statement: str) -> None:
    if statement is OF_OTHERS:
        pytest.importorskip("torch")
    code = f"{statement}\nimport sys; print([name for name in sys.modules if 'ray' in name.split('.')])"
    told = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, timeout=60)
    assert told.strip() == "[]"


def test_only_map_style_loaders() -> None:
    torch = pytest.importorskip("torch")
    find = pytest.importorskip("intune_callbacks.pipelines.find").find

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Any:
            return iter(range(10))

    of_cluster = {"workers_kind": "ray", "ray_address": "127.0.0.1:9"}
    for loader in (torch.utils.data.DataLoader(Stream(), num_workers=2), [1, 2, 3]):
        found = find(loader, **of_cluster)
        assert found.pipeline is None
        assert found.why.startswith("workers_kind='ray' is for a map-style DataLoader")
        assert type(loader).__name__ in found.why


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_cluster_a_training_goes_on(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from intune_callbacks.pipelines.ray.cluster import LOST_CLUSTER
    from intune_callbacks.session.live import live

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # else it would be refused
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=workers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        given = {"workers_kind": "ray", "ray_address": "127.0.0.1:9", "show_card": False, "decide_every_s": 0.1}
        watched = live(loader, warmup_batches=2, cpus=4.0, **given)
        got = [batch.tolist() for batch in watched]
        report = watched.close()
    assert got == [[(2 * i) ** 2, (2 * i + 1) ** 2] for i in range(200)]
    assert report["frozen"] is None and report["changes"] > 0  # workers here are moved as always
    (said,) = [str(one.message) for one in told if "InTune" in str(one.message)]
    assert said.startswith(LOST_CLUSTER.partition(" {}")[0]) and "127.0.0.1:9" in said
    assert not [thread for thread in threading.enumerate() if thread.name == "intune-ray"]


class Squares:
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index**2
