"""A loop of the user's own on two ranks of torchrun: each tunes its own loader and trains as without us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

SCRIPT = """
import json, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from intune_callbacks import live
from intune_callbacks.session import fit

sys.path.insert(0, sys.argv[3])
from restless import Restless
fit.Tuner = Restless

class Slow(Dataset):
    def __len__(self):
        return 480
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((4,), index / 480)

def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given = DataLoader(Slow(), batch_size=4, sampler=DistributedSampler(Slow(), seed=3), num_workers=1)
    loader = live(given, mode=sys.argv[1], run_dir=sys.argv[2], decide_every_s=0.1, decide_every_batches=5,
                  warmup_batches=3)
    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    loader.close()
    # In one piece: the launcher runs python -u, and what both ranks print goes into one pipe.
    sys.stdout.write(f"RESULT {json.dumps([dist.get_rank(), losses, Restless.resizes])}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def trained(folder: Path, mode: str) -> dict[int, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, mode, str(folder / mode), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line.partition("RESULT")[2]) for line in done.stdout.splitlines() if "RESULT" in line]
    return {rank: (losses, resizes) for rank, losses, resizes in results}


def test_two_ranks_train_the_same_and_are_compared(tmp_path: Path) -> None:
    stock, tuned = trained(tmp_path, "off"), trained(tmp_path, "tune")
    assert set(stock) == set(tuned) == {0, 1}
    for rank in (0, 1):
        assert tuned[rank][0] == stock[rank][0]
        assert tuned[rank][1] > 1
        assert json.loads((tmp_path / "tune" / f"rank{rank}" / "report.json").read_text())["frozen"] is None
    report = json.loads((tmp_path / "tune" / "rank0" / "report.json").read_text())
    assert len(report["ranks"]["wait_s"]) == 2
