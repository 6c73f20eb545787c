"""Two gloo ranks on this machine: each tunes its own loader with its share of the CPUs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from intune_callbacks.session import fit
from intune_callbacks.lightning import InTuneCallback

out = Path(sys.argv[1])


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).mean() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(LightningDataModule):
    def train_dataloader(self):
        data = TensorDataset(torch.arange(800.0).view(800, 1))
        return DataLoader(data, 4, shuffle=True, num_workers=1)


ranks = []
probe = fit.MachineProbe
fit.MachineProbe = lambda **given: ranks.append(given["local_ranks"]) or probe(**given)
for mode in ("off", "tune"):
    torch.manual_seed(0)
    model = Model()
    often = {"decide_every_s": 0.0, "decide_every_batches": 2, "warmup_batches": 2}
    callback = InTuneCallback(mode, run_dir=str(out / "run"), **often)
    logger = CSVLogger(out / "logs", version=0) if mode == "tune" else False
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )
    trainer.fit(model, Data() if sys.argv[2] == "module" else Data().train_dataloader())
    result = {"seen": model.seen, "report": callback.report, "local_ranks": ranks}
    (out / f"{mode}{trainer.global_rank}.json").write_text(json.dumps(result))
"""


@pytest.mark.parametrize("given", ["loader", "module"])
def test_two_ranks_see_the_same_batches_and_share_the_cpus(given: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), given],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert set(results) == {"off0", "off1", "tune0", "tune1"}
    for rank in "01":
        assert results[f"tune{rank}"]["seen"] == results[f"off{rank}"]["seen"]
        assert len(results[f"tune{rank}"]["seen"]) == 200
        assert results[f"tune{rank}"]["local_ranks"] == [2]
        assert results[f"off{rank}"]["report"] == {}
        assert len((tmp_path / "run" / f"rank{rank}" / "history.jsonl").read_text().splitlines()) > 3
        assert (tmp_path / "run" / f"rank{rank}" / "report.json").exists()
    first_epoch = [row for rank in "01" for batch in results[f"tune{rank}"]["seen"][:100] for row in batch]
    assert sorted(first_epoch) == [float(row) for row in range(800)]
    assert run.stdout.count("InTune ") == 1  # the card, at rank zero only
    (logged,) = (tmp_path / "logs").rglob("metrics.csv")
    steps = [line["step"] for line in csv.DictReader(logged.read_text().splitlines()) if line["intune/wait_frac"]]
    assert len(steps) == len(set(steps)) == len((tmp_path / "run/rank0/history.jsonl").read_text().splitlines())
