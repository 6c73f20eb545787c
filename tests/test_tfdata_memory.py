"""A real memory limit: large batches under AUTOTUNE are killed, tuned by us they are not."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from benchmarks.memory_tfdata import LIMIT_BYTES, measure, memory_group
from intune_callbacks.pipelines.tf import build as tf_build


@pytest.mark.timeout(600)
@pytest.mark.skipif(not tf_build.available(), reason="the operations cannot be compiled here")
def test_limit_kills_autotune_and_not_us() -> None:
    with memory_group(LIMIT_BYTES) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here; test_guard.py checks the guard's own accounting")
    ours = measure("InTune (dqn)", 32, 64, True, 0)
    assert not ours["killed"], ours
    assert ours["frozen"] is None
    assert ours["peak_gb"] * 1e9 < LIMIT_BYTES
    assert measure("AUTOTUNE", 32, 64, True, 0)["killed"]
