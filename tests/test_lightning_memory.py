"""Memory: a container's limit is respected while training goes on, and the callback itself is small."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_BYTES = 1_400_000_000

# The user asks for 400 batches of 16 MB kept ready, 6.4 GB; the source is faster than the model, so they fill up.
GREEDY = """
import json, sys, time, resource
import numpy as np
import pytorch_lightning as pl, torch, torchdata.nodes as tn
from intune_callbacks.lightning import InTuneCallback

def load(i):
    time.sleep(0.02)
    return torch.from_numpy(np.full((1, 4_000_000), float(i), np.float32))

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch, _):
        self.seen.append(int(batch[0, 0]))
        time.sleep(0.08)
        return self.layer(batch[:, :1]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)

loader = tn.Loader(tn.Prefetcher(tn.ParallelMapper(tn.IterableWrapper(range(200)), load, num_workers=1), 400))
callback = InTuneCallback(sys.argv[1], decide_every_s=0.1, decide_every_batches=1, warmup_batches=0, show_card=False)
model = Model()
pl.Trainer(max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
           enable_model_summary=False, accelerator="cpu").fit(model, loader)
report, exact = callback.report, model.seen == list(range(200))
reasons = [d["reason"] for d in report.get("decisions", [])]
print(json.dumps({"exact": exact, "reasons": reasons, "frozen": report.get("frozen")}))
"""


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A real cgroup (v2 or v1) with a memory limit, or a skip that says why there is none."""
    name = f"intune-test-{uuid.uuid4().hex[:8]}"
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory") / name
    try:
        group.mkdir()
        (group / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        swap = group / ("memory.swap.max" if v2 else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if v2 else str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here ({error}); test_guard.py checks the guard's own accounting")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def run(script: str, *arguments: str, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    join = f"echo $$ > {group}/cgroup.procs && " if group is not None else ""
    command = f'{join}exec "$0" "$@"'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
        check=False,
    )


def test_a_memory_limit_kills_the_untuned_run_and_not_the_tuned_one() -> None:
    with memory_group(LIMIT_BYTES) as group:
        untuned = run(GREEDY, "off", group=group)
        assert untuned.returncode == -9, f"the limit was not reached: {untuned.stderr[-2000:]}"
        tuned = run(GREEDY, "tune", group=group)
    assert tuned.returncode == 0, tuned.stderr[-2000:]
    result = json.loads(tuned.stdout.splitlines()[-1])
    assert result["exact"]
    assert result["frozen"] is None
    assert any("memory" in reason for reason in result["reasons"]), result["reasons"]


WEIGHT = """
import gc, os, sys, time
import psutil, torch, pytorch_lightning as pl
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, _):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

callbacks = []
if sys.argv[1] == "with":
    from intune_callbacks.lightning import InTuneCallback
    callbacks = [InTuneCallback(decide_every_s=0.05, decide_every_batches=1, warmup_batches=0, show_card=False)]
loader = DataLoader(TensorDataset(torch.zeros(40_000, 8)), batch_size=8, num_workers=1)
pl.Trainer(max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
           enable_model_summary=False, accelerator="cpu").fit(Model(), loader)
print(psutil.Process().memory_info().rss)
"""


def test_the_callback_adds_less_than_60_mb_to_the_process() -> None:
    sizes = {}
    for which in ("with", "without"):
        result = run(WEIGHT, which)
        assert result.returncode == 0, result.stderr[-2000:]
        sizes[which] = int(result.stdout.splitlines()[-1])
    assert sizes["with"] - sizes["without"] < 60_000_000
